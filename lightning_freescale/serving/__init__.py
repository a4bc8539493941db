"""``freescale serve``: recommendations over HTTP.

* ``app.py``: the endpoints, with FastAPI; ``page.html``: the page at ``/``.
* ``request.py``: the fields of a request, and their errors.
* ``service.py``: a batch of requests to their answers.
* ``state_cache.py``: the states of the users that were served last.
* ``batching.py``: collects requests that arrive together into one batch.
* ``prometheus.py``: counters and histograms for ``/metrics``.

``app.py`` and ``request.py`` need the extra ``serve``.
"""
