"""The torch.distributed backend ``"freescale"``, whose transfers leave the GPU's SMs to compute.

    import lightning_freescale.transport                    # registers the backend
    group = dist.new_group(backend="freescale")             # or pg_options=transport.Options(priority="high")
    work = dist.all_to_all_single(output, input, group=group, async_op=True)

====================================  ==========================================================
all-to-all, AllGather, broadcast      CUDA tensors: copy engines and host memory (host_staged.py);
                                      CPU tensors: gloo. Uneven sizes and every dtype work.
barrier                               gloo
AllReduce, ReduceScatter, and every   the inner backend: for CUDA tensors NCCL, which uses SMs, or
other collective                      gloo where torch has no NCCL; for CPU tensors gloo
====================================  ==========================================================

As with NCCL, ``wait()`` makes the current stream wait for the transfer and does not block the host. With CPU tensors it blocks
the host, as with gloo.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_freescale.runtime.errors import InputError
from lightning_freescale.transport.gloo import GlooMover
from lightning_freescale.transport.host_staged import HostStagedMover
from lightning_freescale.transport.options import Options
from lightning_freescale.transport.rank_buffers import RankBuffers

BACKEND_NAME = "freescale"
_ProcessGroup: Any = (
    dist.ProcessGroup
)  # untyped, because its stubs overload each collective and the class below does not


class FreeScaleGroup(_ProcessGroup):
    """One ``freescale`` process group. It overrides methods of c10d; all other methods run on the inner backends."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any, options: Options):
        super().__init__(rank, size)
        self.freescale_options = options
        kinds = dist.ProcessGroup.BackendType
        gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        self._gloo = gloo
        self._cuda: Any = gloo  # the inner backend of CUDA tensors
        self._set_default_backend(kinds.GLOO)
        self._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
        self._store, self._timeout = store, timeout
        self._movers: dict[torch.device, GlooMover | HostStagedMover] = {}
        self._lock = threading.Lock()
        if torch.cuda.is_available():
            if options.reductions == "nccl" or (options.reductions == "auto" and dist.is_nccl_available()):
                nccl_options = dist.ProcessGroupNCCL.Options()
                nccl_options._timeout = timeout
                nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, nccl_options)
                self._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
                self._cuda = nccl
            else:
                self._register_backend(torch.device("cuda"), kinds.GLOO, gloo)

    @override
    def getBackendName(self) -> str:
        return BACKEND_NAME

    @override
    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:
        world = self.size()
        send = RankBuffers.split(input, input_splits, world, "input")
        receive = RankBuffers.split(output, output_splits, world, "output")
        return self._exchange("all_to_all", [input, output], send, receive)

    @override
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        world = self.size()
        send = RankBuffers.listed(inputs, world, "input_tensor_list")
        receive = RankBuffers.listed(outputs, world, "output_tensor_list")
        return self._exchange("all_to_all", [*inputs, *outputs], send, receive)

    @override
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        if len(inputs) != 1 or len(outputs) != 1:
            raise InputError(f"all_gather: pass one tensor per rank, not {len(inputs)}")
        send = RankBuffers.same(inputs[0], self.size(), "tensor")
        receive = RankBuffers.listed(outputs[0], self.size(), "tensor_list")
        return self._gather(inputs[0], outputs[0], send, receive)

    @override
    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        send = RankBuffers.same(input, self.size(), "input_tensor")
        receive = RankBuffers.even(output, self.size(), "output_tensor")
        return self._gather(input, [output], send, receive)

    @override
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        if len(tensors) != 1:
            raise InputError(f"broadcast: pass one tensor per rank, not {len(tensors)}")
        root, rank, world = (opts.rootRank if opts is not None else 0), self.rank(), self.size()
        others = [peer for peer in range(world) if peer != root]
        send = RankBuffers.only(tensors[0], others if rank == root else [], world, "tensor")
        receive = RankBuffers.only(tensors[0], [root] if rank != root else [], world, "tensor")
        return self._exchange("broadcast", tensors, send, receive)

    @override
    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()

    # The base class would call the inner backend while it holds the GIL. Gloo's threads need the GIL to release the tensors of
    # an earlier exchange, so both would wait forever. The overrides below call the inner backend from Python instead.
    @override
    def allreduce(self, tensors: list[Tensor], *args: Any) -> Any:
        return self._inner(tensors[0]).allreduce(tensors, *args)

    @override
    def reduce(self, tensors: list[Tensor], *args: Any) -> Any:
        return self._inner(tensors[0]).reduce(tensors, *args)

    @override
    def reduce_scatter(self, outputs: list[Tensor], *args: Any) -> Any:
        return self._inner(outputs[0]).reduce_scatter(outputs, *args)

    @override
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *args: Any) -> Any:
        return self._inner(inputs[0]).gather(outputs, inputs, *args)

    @override
    def scatter(self, outputs: list[Tensor], *args: Any) -> Any:
        return self._inner(outputs[0]).scatter(outputs, *args)

    @override
    def send(self, tensors: list[Tensor], *args: Any) -> Any:
        return self._inner(tensors[0]).send(tensors, *args)

    @override
    def recv(self, tensors: list[Tensor], *args: Any) -> Any:
        return self._inner(tensors[0]).recv(tensors, *args)

    def _inner(self, tensor: Tensor) -> Any:
        return self._gloo if tensor.device.type == "cpu" else self._cuda

    # torch 2.13 calls the same collectives by these names.
    all_to_all_single = alltoall_base
    all_gather_single = _allgather_base

    def _gather(self, input: Tensor, outputs: list[Tensor], send: RankBuffers, receive: RankBuffers) -> Any:
        if receive.sizes[self.rank()] != send.sizes[0]:
            raise InputError(
                f"all_gather: rank {self.rank()} sends {send.sizes[0]} bytes, but its part of the output "
                f"has {receive.sizes[self.rank()]} bytes"
            )
        return self._exchange("all_gather", [input, *outputs], send, receive)

    def _exchange(self, kind: str, tensors: list[Tensor], send: RankBuffers, receive: RankBuffers) -> Any:
        device = tensors[0].device
        for tensor in tensors:
            if tensor.device != device:
                devices = sorted({str(tensor.device) for tensor in tensors})
                raise InputError(f"{kind}: all tensors must be on one device, not {devices}")
        return self._mover(device).exchange(kind, send, receive)

    def _mover(self, device: torch.device) -> GlooMover | HostStagedMover:
        """The mover of this device's tensors. Making a host-staged mover is a collective: all ranks do it in their first call."""
        mover = self._movers.get(device)
        if mover is not None:
            return mover
        with self._lock:
            if device not in self._movers:
                if device.type == "cpu" and self.freescale_options.cpu == "gloo":
                    self._movers[device] = GlooMover(self._gloo)
                else:
                    store = dist.PrefixStore(f"queue/{device.type}", self._store)
                    self._movers[device] = HostStagedMover(
                        store, self.rank(), self.size(), self._timeout, device, self.freescale_options
                    )
            return self._movers[device]

    def report(self) -> dict[str, dict[str, int]]:
        """Memory and traffic of the host-staged movers of this group, by device; :meth:`HostStagedMover.report` has the keys."""
        return {
            str(device): mover.report() for device, mover in self._movers.items() if isinstance(mover, HostStagedMover)
        }

    @override
    def shutdown(self) -> None:
        try:
            for mover in self._movers.values():
                if isinstance(mover, HostStagedMover):
                    mover.close(min(30.0, self._timeout.total_seconds()))
        finally:
            super().shutdown()


def _create(group: Any, pg_options: Any) -> FreeScaleGroup:
    return FreeScaleGroup(group.store, group.group_rank, group.group_size, group.timeout, Options.of(pg_options))


def register() -> None:
    """Register ``backend="freescale"`` with torch.distributed. A second call changes nothing."""
    if BACKEND_NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND_NAME, _create, extended_api=True, devices=["cpu", "cuda"])
