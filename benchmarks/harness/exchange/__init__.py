"""The comparison of embedding exchanges behind ``benchmarks.exposed``.

- ``machine``: the interface of a rank's machine; ``cuda_machine`` and ``emulated_machine`` implement it.
- ``make_machine``: chooses the machine and the workload of a run.
- ``variants``: the training variants that are compared.
- ``measurement``: trains all variants at all collision rates and takes the step times.
- ``summary``: what follows from the step times, and the table on the console.
"""
