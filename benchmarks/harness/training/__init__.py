"""The comparison of whole trainings behind ``benchmarks.end_to_end``, ``benchmarks.cannot_help`` and ``benchmarks.quality``.

- ``step_timestamps``: time stamps inside a training step, and an HSTU that takes them.
- ``variants``: one HSTU trained by TorchRec's pipelines, by the strategy with various settings, and its dense part
  alone.
- ``all_variants``: trains all variants of ``benchmarks.end_to_end``, one after another.
- ``bubble``: from the time stamps of all ranks to the bubble of a variant and its parts.
- ``bubble_report``: these figures as text.
- ``sasrec``: a SASRec with the tables, the loss and the evaluation of HSTU, for ``benchmarks.quality``.
- ``alternation``: two trainings that alternate on one machine, for small differences.
"""
