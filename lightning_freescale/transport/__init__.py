"""Transport between ranks: process groups whose transfers leave the GPU's SMs to compute.

Importing this package registers the torch.distributed backend ``"freescale"``. :func:`choose` picks a backend for a machine,
:func:`new_group` makes a process group of it.

- ``choice``: what this machine can do (:func:`capabilities`), and which backend to use (:func:`choose`).
- ``choice_table``: what ``"auto"`` chooses in every situation, for the documentation and ``freescale doctor``.
- ``groups``: makes a process group of high or low priority.
- ``options``: the settings of one ``freescale`` group.
- ``backend``: the process group. It sends each collective to one of the two movers below, or to NCCL or gloo.
- ``direct_calls``: an all-to-all without the checks of torch.distributed.
- ``host_staged``: the mover of CUDA tensors. It wraps the C++ queue of ``csrc/transport``.
- ``gloo``: the mover of CPU tensors.
- ``rank_buffers``: the tensors of a collective as one byte buffer per rank, the form that both movers take.
- ``nixl``: where NIXL is installed, and whether this machine has RDMA.
- ``engine_timing``: times each engine that can start on this machine.
- ``rings``: whether the buffers between ranks of one host lie in host memory or in GPU memory.
- ``rendezvous``: how ranks meet before the first transfer, over the group's store.
- ``addresses``: which ranks share a host, at which address a rank is reached, and the secret of the group.
- ``errors``: the error of a transfer that fails.

Threads. The thread that calls a collective only issues it. On CUDA, two streams for each group and device copy the data, one
out and one in, by copy engines. The C++ queue starts one watchdog thread for each group and device, which detects timeouts and
dead peers. For peers on other hosts it also starts a few threads that send and receive over TCP. With gloo, gloo's own threads
move the data.
"""

from lightning_freescale.transport.backend import BACKEND_NAME, FreeScaleGroup, register
from lightning_freescale.transport.choice import Capabilities, TransportChoice, capabilities, choose
from lightning_freescale.transport.errors import TransportError
from lightning_freescale.transport.groups import new_group
from lightning_freescale.transport.host_staged import failed_transfer
from lightning_freescale.transport.options import Options

register()

__all__ = [
    "BACKEND_NAME",
    "Capabilities",
    "FreeScaleGroup",
    "Options",
    "TransportChoice",
    "TransportError",
    "capabilities",
    "choose",
    "failed_transfer",
    "new_group",
]
