"""The Markdown that ``python -m benchmarks.tables`` generates from the stored results. No figure is typed by hand.

- ``markdown``: tables, and generated blocks between two marker comments of a hand-written page.
- ``claims``: one summary line per stored result: before, after, change.
- ``readme_block``: the four results in the top-level README.
- ``results_blocks``: the tables of ``docs/results.md``.
- ``paper_page``: ``docs/paper.md``, our figures next to the paper's.
- ``benchmarks_page``: ``benchmarks/README.md``, all scripts and all stored results.
"""
