"""``freescale serve``: recommendations over HTTP.

* ``app.py``: the endpoints, with FastAPI; ``page.html``: the page at ``/``.
* ``request.py``: the fields of a request, and their errors.
* ``service.py``: a batch of requests to their answers.
* ``known_histories.py``: the events of the users of a file, for requests that bring none.
* ``state_cache.py``: the states of the users that were served last.
* ``batching.py``: collects requests that arrive together into one batch.
* ``prometheus.py``: counters and histograms for ``/metrics``.

``app.py`` and ``request.py`` need the extra ``serve``.
"""
