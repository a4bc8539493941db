"""Where spans come from when nobody marks them: hooks on TorchRec's modules, on autograd and on DDP.

Nothing here changes a value or a collective. Between recorded steps a hook costs one look at ``timeline.active``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.types import Awaitable, LazyAwaitable, ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.bubbles.timeline import Kind, Moment, Timeline


@dataclass
class _Call:
    """One synchronous forward of a sharded module, under way."""

    began: Moment
    ids: int  # bytes
    looked_up: bool = False


class _TimedAwaitable(LazyAwaitable[Any]):
    """A module's output that marks the wait for its rows."""

    def __init__(self, inner: Awaitable[Any], timeline: Timeline):
        super().__init__()
        self._inner, self._timeline, self._arrived = inner, timeline, timeline.mark()

    def _wait_impl(self) -> Any:
        with self._timeline.span(Kind.ROW_EXCHANGE, arrived=self._arrived):
            return self._inner.wait()


class ExchangeProbe:
    """Marks the synchronous exchanges of every sharded embedding module: ids, rows, gradients of the rows.

    ids: from the call of the module to its first lookup. rows: the wait for its output. gradients: from the gradient of the
    rows received to the gradient of the rows looked up. A forward without a lookup is not the synchronous one, and is left
    to whoever drives it.
    """

    def __init__(self, model: nn.Module, timeline: Timeline):
        self._timeline = timeline
        self._calls: dict[nn.Module, _Call] = {}
        self.collisions = CollisionEstimate()
        self._handles: list[Any] = []
        for module in model.modules():
            if isinstance(module, ShardedModule) and hasattr(module, "_lookups") and hasattr(module, "_output_dists"):
                self._attach(module)

    def _attach(self, module: Any) -> None:
        hooks = self._handles
        hooks.append(module.register_forward_pre_hook(self._called, with_kwargs=True))
        hooks.append(module.register_forward_hook(self._returned))
        for index, (lookup, output_dist) in enumerate(zip(module._lookups, module._output_dists, strict=True)):
            hooks.append(lookup.register_forward_pre_hook(self._looking_up(module, index)))
            hooks.append(output_dist.register_forward_hook(self._sent(module)))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._calls.pop(module, None)
        if (self._timeline.active or self.collisions.watching) and torch.is_grad_enabled():
            features = args[0] if args else kwargs.get("features")
            self._calls[module] = _Call(self._timeline.mark(), _nbytes(features))

    def _looking_up(self, module: nn.Module, index: int) -> Callable[..., None]:
        def hook(lookup: nn.Module, args: Any) -> None:
            call = self._calls.get(module)
            if call is None:
                return
            if not call.looked_up:
                call.looked_up = True
                self._timeline.add(Kind.ID_EXCHANGE, call.began, self._timeline.mark())
                self._timeline.count("bytes", call.ids)
            if self.collisions.watching:
                self.collisions.see((module, index), lookup, args[0], self._timeline)

        return hook

    def _sent(self, module: nn.Module) -> Callable[..., None]:
        def hook(output_dist: nn.Module, args: Any, output: Any) -> None:
            rows = args[0] if args else None
            if module not in self._calls or not isinstance(rows, Tensor) or not isinstance(output, Awaitable):
                return
            self._timeline.count("bytes", _nbytes(rows))
            if rows.requires_grad and self._timeline.active:
                gradient = _Gradient(self._timeline, _nbytes(rows))
                rows.register_hook(gradient.left)
                output.callbacks.append(gradient.watch)

        return hook

    def _returned(self, module: nn.Module, args: Any, output: Any) -> Any:
        call = self._calls.pop(module, None)
        if call is None or not call.looked_up or not isinstance(output, LazyAwaitable):
            return None
        return _TimedAwaitable(output, self._timeline)


class _Gradient:
    """The way back of one exchange of rows."""

    def __init__(self, timeline: Timeline, nbytes: int):
        self._timeline, self._nbytes = timeline, nbytes
        self._began: Moment | None = None

    def watch(self, received: Any) -> Any:
        if isinstance(received, Tensor) and received.requires_grad:
            received.register_hook(self.came)
        return received

    def came(self, _: Tensor) -> None:
        if self._timeline.active:
            self._began = self._timeline.mark()

    def left(self, _: Tensor) -> None:
        if self._began is not None and self._timeline.active:
            self._timeline.add(Kind.GRADIENT_EXCHANGE, self._began, self._timeline.mark())
            self._timeline.count("bytes", self._nbytes)
        self._began = None


class AllReduceProbe:
    """Marks the time that backward spends in nothing but the wait for DDP's AllReduce.

    DDP waits in a callback that autograd runs when the graph is done; ours is queued before it, and so runs just before it.
    How much of the AllReduce ran behind the backward, DDP measures itself.
    """

    def __init__(self, model: Any, timeline: Timeline):
        self._timeline = timeline
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self._graph_done: Moment | None = None
        self._bytes = 0
        if self._ddp is not None:
            ignored = getattr(self._ddp, "parameters_to_ignore", ())
            dense = (p for name, p in self._ddp.module.named_parameters() if name not in ignored and p.requires_grad)
            self._bytes = sum(_nbytes(parameter) for parameter in dense)
            if self._ddp.device_type == "cpu":  # on CUDA, DDP's sampling waits for the device: keep its own low rate
                self._ddp._set_ddp_runtime_logging_sample_rate(1)

    def before_backward(self, loss: Tensor) -> None:
        self._graph_done = None
        if self._ddp is None or not self._ddp.require_backward_grad_sync or not loss.requires_grad:
            return
        if self._timeline.active:
            loss.register_hook(self._backward_began)

    def _backward_began(self, _: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)  # type: ignore[attr-defined]

    def _backward_ended(self) -> None:
        self._graph_done = self._timeline.mark()

    def after_backward(self) -> None:
        if self._graph_done is not None and self._timeline.active:
            self._timeline.add(Kind.ALLREDUCE, self._graph_done, self._timeline.mark())
            self._timeline.count("bytes", self._bytes)
        self._graph_done = None

    def hidden_before(self) -> float:
        """Seconds of AllReduce that ran behind backward, in the step before the current one. Call it after forward.

        At most: DDP counts from the first bucket's start to the end of backward, though the last may have arrived before.
        On CUDA it looks at one step in a hundred (and at the first ten): there it is that of the last step it looked at.
        """
        if self._ddp is None:
            return 0.0
        return float(self._ddp._get_ddp_logging_data().get("backward_compute_comm_overlap_time", 0)) / 1e9


class CollisionEstimate:
    """Share of the ids of a batch whose rows the batch before has updated, seen at their owner.

    For runs that do not look for collisions themselves. A sample of the rows, chosen by their hash, is marked in a bitmap:
    static shapes, so nothing waits for the device; rows that share a bit make it too large by at most 1.6 points.
    """

    BITS = 1 << 22
    SAMPLE = 1 << 16  # ids at most, in expectation: SAMPLE / BITS is the bound above

    def __init__(self) -> None:
        self.watching = False
        self.counting = False  # whether the batch is compared with the one before, or only remembered
        self._before: dict[Any, Tensor] = {}

    def follow(self, count: bool, remember: bool) -> None:
        """Say, before a step, what is wanted of it. It can be counted only if the step before was remembered."""
        self.counting = count and self.watching
        self.watching = remember
        if not remember:
            self._before.clear()

    def see(self, key: Any, lookup: Any, features: KeyedJaggedTensor, timeline: Timeline) -> None:
        """Look at the ids one lookup is asked for."""
        rows = _row_keys(lookup, features)
        before = self._before.get(key)
        if self.counting and before is not None and rows.numel():
            bits = torch.zeros(self.BITS + 1, dtype=torch.bool, device=rows.device)
            # Both batches are thinned alike, or a row could be in one sample and not in the other.
            every = -(-max(rows.numel(), before.numel()) // self.SAMPLE)
            bits[self._slots(before, every)] = True
            slots = self._slots(rows, every)
            chosen = slots < self.BITS
            timeline.count("collisions", (bits[slots] & chosen).sum() * every)
            timeline.count("rows", chosen.sum() * every)
        self._before[key] = rows

    def _slots(self, rows: Tensor, every: int) -> Tensor:
        """Bit of each row, ``BITS`` for those that are not in the sample."""
        mixed = _mix(rows)
        return torch.where(mixed % every == 0, (mixed // every) % self.BITS, self.BITS)


def _mix(values: Tensor) -> Tensor:
    """Spread int64 values over 62 bits, not negative (the finaliser of SplitMix64, on what int64 leaves of it)."""
    values = (values ^ ((values >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    values = (values ^ ((values >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return (values ^ ((values >> 31) & 0x1FFFFFFFF)) & 0x3FFFFFFFFFFFFFFF


def _row_keys(lookup: Any, features: KeyedJaggedTensor) -> Tensor:
    """``[n]`` a number for the row behind each id: features that share a table share its rows."""
    tables = [table for group in lookup.grouped_configs for table in group.embedding_tables]
    of_feature = [index for index, table in enumerate(tables) for _ in table.feature_names]
    ids = features.values().long()
    if not of_feature:  # whole tables, none of them on this rank
        return ids
    parts = ids.split(features.length_per_key())
    return torch.cat([part + (index << 48) for index, part in zip(of_feature, parts, strict=True)])


def _nbytes(value: Any) -> int:
    if isinstance(value, KeyedJaggedTensor):
        return _nbytes(value.values()) + _nbytes(value.lengths())
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
