"""Benchmarks: one script per claim. ``python -m benchmarks`` lists them.

Each script prints a table, and its figures as JSON with ``--json``.

- ``*.py`` in this folder: the scripts. ``python -m benchmarks.<script> --help`` explains one.
- ``harness/``: the code that the scripts share.
- ``results/``: stored results, one JSON file per run, and the figures that ``benchmarks.figures`` draws from them.
- ``README.md``, ``docs/results.md``, ``docs/paper.md`` and the table in the top-level README are generated from the
  stored results by ``python -m benchmarks.tables``.
"""
