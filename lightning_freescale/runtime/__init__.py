"""What every other package builds on: errors, logging, CUDA streams and arrays. It imports none of the other packages.

- ``errors``: the exceptions that this package raises for mistakes and damage that a user can fix.
- ``log``: the logger, and ``log_once``, which logs a message once in a process, on rank 0.
- ``collector``: pauses Python's garbage collector during the imports.
- ``frozen_objects``: short garbage collections during a training on a GPU.
- ``lightning_compat``: every private name of Lightning that this package uses.
- ``requirements``: finds out whether TorchRec and FBGEMM are installed, and says what to install if they are not.
- ``third_party_warnings``: hides deprecation warnings between TorchRec, Lightning and torch.
- ``streams``: CUDA streams beside the compute stream, and copies between host and device that do not block the host.
- ``host_pacing``: makes the host wait inside a step if it runs too far ahead of the GPU.
- ``cpu_threads``: one CPU thread for PyTorch in a process that trains on a GPU.
- ``direct_triton``: launches of Triton kernels that take less of the host's time.
- ``gradient_places``: where DDP sums the gradients of parameters.
- ``process_groups``: process groups beside the default one, and how a rank leaves them.
- ``store_connection``: a connection to the rendezvous store that is open before it is needed.
- ``bounded``: calls that may block for long, with a limit.
- ``device_errors``: tells errors of CUDA and NCCL from others.
- ``nccl_groups``: errors of NCCL's process groups, and their abort.
- ``nccl_calls``: which threads are inside a call of NCCL.
- ``last_resort``: the end of a process that is stuck, with an explanation, also if no Python code can run.
- ``object_gather``: a gather of small Python objects in one collective.
- ``jagged``: NumPy functions on samples of different lengths, implemented in C++.
"""
