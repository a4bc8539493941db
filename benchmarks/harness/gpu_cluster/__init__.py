"""One GPU as a cluster of one-GPU nodes: every rank is a process that sees the same GPU.

- ``launcher``: starts the ranks, collects their output and ends all of them if one fails. Also the launcher on a CPU.
- ``rank_process``: one rank as an operating system process.
- ``mps``: NVIDIA's Multi-Process Service (MPS), which lets several processes use one GPU at the same time.
- ``reserved_sms``: reserves SMs (streaming multiprocessors) for each rank, so that kernels of two ranks never share
  one. Ranks that share SMs can wait for one another without end: a kernel of NCCL keeps its SMs until all ranks take
  part.
- ``transports``: names of the transports that are compared, and a way to make ranks of one host use TCP.
- ``link_bandwidth``: the bandwidth of each transport without compute beside it.
- ``matrix_product_check``: fails if matrix products are wrong, which some MPS settings cause.
- ``bare_ranks``: ranks that need torch and the compiled core only, not the packages that ``lightning_freescale``
  requires.

The ranks share the GPU's memory, caches and copy engines. In a real cluster they would not.

NCCL refuses two ranks on one GPU of one machine. A different ``NCCL_HOSTID`` per rank makes NCCL treat every rank as
its own machine, so its traffic goes over TCP on the loopback device.
"""
