"""Probes: hooks on TorchRec's modules, on autograd and on DDP that record the spans of code which does not record itself.

Probes change neither values nor collectives. Between recorded steps a hook only reads ``timeline.active``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.types import Awaitable, LazyAwaitable, ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.bubbles.collision_estimate import CollisionEstimate
from lightning_freescale.bubbles.pending import Moment
from lightning_freescale.bubbles.spans import ENGINE, Kind, Span, Step
from lightning_freescale.bubbles.timeline import Timeline


# ---- embedding exchange ------------------------------------------------------------------------------------------------
@dataclass
class _ForwardCall:
    """A synchronous forward of a sharded module that has not returned.

    Args:
        began: when it was called.
        id_bytes: of its input.
        looked_up: whether a lookup has begun.
        packing: when it began to sort the rows of the last lookup by rank.
    """

    began: Moment
    id_bytes: int
    looked_up: bool = False
    packing: Moment = math.nan


class _TimedAwaitable(LazyAwaitable[Any]):
    """A module's output that records the wait for its rows."""

    def __init__(self, inner: Awaitable[Any], timeline: Timeline):
        super().__init__()
        self._inner, self._timeline, self._joined = inner, timeline, timeline.mark()

    def _wait_impl(self) -> Any:
        with self._timeline.span(Kind.ROW_EXCHANGE, joined=self._joined):
            return self._inner.wait()


class ExchangeProbe:
    """Records the synchronous exchanges of all sharded embedding modules of a model.

    The exchange of ids lasts from the call of a module to its first lookup. The exchange of rows has two parts: the rows of each
    lookup are sorted by rank, and later the model waits for the module's output. The exchange of gradients lasts from the
    gradient of the received rows to the gradient of the looked-up rows. A forward without a lookup belongs to the prioritized
    exchange, which records itself.
    """

    def __init__(self, model: nn.Module, timeline: Timeline):
        self._timeline = timeline
        self._calls: dict[nn.Module, _ForwardCall] = {}
        self.collisions = CollisionEstimate()
        self._handles: list[Any] = []
        for module in model.modules():
            if isinstance(module, ShardedModule) and hasattr(module, "_lookups") and hasattr(module, "_output_dists"):
                self._attach(module)

    def _attach(self, module: Any) -> None:
        hooks = self._handles
        hooks.append(module.register_forward_pre_hook(self._before_forward, with_kwargs=True))
        hooks.append(module.register_forward_hook(self._after_forward))
        for index, (lookup, output_dist) in enumerate(zip(module._lookups, module._output_dists, strict=True)):
            hooks.append(lookup.register_forward_pre_hook(self._before_lookup(module, index)))
            hooks.append(output_dist.register_forward_pre_hook(self._before_send(module)))
            hooks.append(output_dist.register_forward_hook(self._after_send(module)))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._calls.pop(module, None)
        if (self._timeline.active or self.collisions.watching) and torch.is_grad_enabled():
            features = args[0] if args else kwargs.get("features")
            self._calls[module] = _ForwardCall(self._timeline.mark(), _nbytes(features))

    def _before_lookup(self, module: nn.Module, index: int) -> Callable[..., None]:
        def hook(lookup: nn.Module, args: Any) -> None:
            call = self._calls.get(module)
            if call is None:
                return
            if not call.looked_up:
                call.looked_up = True
                self._timeline.add(Kind.ID_EXCHANGE, call.began, self._timeline.mark())
                self._timeline.count("bytes", call.id_bytes)
            if self.collisions.watching:
                self.collisions.see((module, index), lookup, args[0], self._timeline)

        return hook

    def _before_send(self, module: nn.Module) -> Callable[..., None]:
        def hook(output_dist: nn.Module, args: Any) -> None:
            call = self._calls.get(module)
            if call is not None and self._timeline.active:
                call.packing = self._timeline.mark()

        return hook

    def _after_send(self, module: nn.Module) -> Callable[..., None]:
        def hook(output_dist: nn.Module, args: Any, output: Any) -> None:
            call, rows = self._calls.get(module), args[0] if args else None
            if call is None or not isinstance(rows, Tensor) or not isinstance(output, Awaitable):
                return
            if self._timeline.active:
                self._timeline.add(Kind.ROW_EXCHANGE, call.packing, self._timeline.mark(), joined=math.nan)
            self._timeline.count("bytes", _nbytes(rows))
            if rows.requires_grad and self._timeline.active:
                probe = _GradientProbe(self._timeline, _nbytes(rows))
                rows.register_hook(probe.end)
                output.callbacks.append(probe.attach)

        return hook

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        call = self._calls.pop(module, None)
        if call is None or not call.looked_up or not isinstance(output, LazyAwaitable):
            return None
        return _TimedAwaitable(output, self._timeline)


class _GradientProbe:
    """Records the exchange of the gradients of rows, in the backward of one exchange of rows."""

    def __init__(self, timeline: Timeline, nbytes: int):
        self._timeline, self._nbytes = timeline, nbytes
        self._began: Moment | None = None

    def attach(self, received: Any) -> Any:
        """Register the hook on the received rows, and return them."""
        if isinstance(received, Tensor) and received.requires_grad:
            received.register_hook(self.begin)
        return received

    def begin(self, _: Tensor) -> None:
        if self._timeline.active:
            self._began = self._timeline.mark()

    def end(self, _: Tensor) -> None:
        if self._began is not None and self._timeline.active:
            self._timeline.add(Kind.GRADIENT_EXCHANGE, self._began, self._timeline.mark())
            self._timeline.count("bytes", self._nbytes)
        self._began = None


# ---- experts ---------------------------------------------------------------------------------------------------------------
class ExpertProbe:
    """Records the exchanges of modules that have an ``expert_exchange``, which calls ``observe`` with each transfer."""

    def __init__(self, model: nn.Module, timeline: Timeline):
        found = (getattr(module, "expert_exchange", None) for module in model.modules())
        self._restore = [(exchange, exchange.observe) for exchange in found if exchange is not None]
        self._timeline = timeline
        for exchange, _ in self._restore:
            exchange.observe = self._observe

    def close(self) -> None:
        """Stop recording."""
        for exchange, before in self._restore:
            exchange.observe = before

    def _observe(self, work: Any, sent_bytes: int) -> Callable[[], AbstractContextManager[None]]:
        return self._timeline.transfer(Kind.EXPERT_EXCHANGE, work, sent_bytes).waiting


# ---- dense AllReduce ---------------------------------------------------------------------------------------------------
class AllReduceProbe:
    """Records the time in which backward only waits for DDP's AllReduce.

    DDP waits in a callback that autograd runs when the graph is done. The callback of this probe is queued first, so it runs
    just before the wait. DDP itself measures how much of the AllReduce ran during backward.
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
            if (
                self._ddp.device_type == "cpu"
            ):  # on CUDA, DDP's measurement waits for the device: keep its low default rate
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
        """Seconds of AllReduce that ran during the backward of the previous step. Call it after forward.

        This is an upper bound: DDP counts from the start of the first bucket to the end of backward, though the last bucket
        may be done before. On CUDA, DDP measures the first ten steps and then one step in a hundred; between them this returns
        the figure of the last measured step.
        """
        if self._ddp is None:
            return 0.0
        return float(self._ddp._get_ddp_logging_data().get("backward_compute_comm_overlap_time", 0)) / 1e9


def hidden_allreduce(step: Step, seconds: float) -> tuple[Span, ...]:
    """A background span for the AllReduce that ran for ``seconds`` during the backward of ``step``; empty if there is none."""
    waited = [span.start for span in step.spans if span.kind is Kind.ALLREDUCE and span.track == ENGINE]
    if not seconds or not waited:
        return ()
    began = max(step.start, waited[-1] - seconds)
    return (Span(Kind.ALLREDUCE, f"{Kind.ALLREDUCE.value} (async)", began, waited[-1], math.nan),)


def _nbytes(value: Any) -> int:
    if isinstance(value, KeyedJaggedTensor):
        return _nbytes(value.values()) + _nbytes(value.lengths())
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
