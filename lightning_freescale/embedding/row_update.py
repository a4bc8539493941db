"""The update of table rows without the look-up before it.

FBGEMM updates rows inside the backward of a look-up. The prioritized exchange has read the rows before, in another way, so the
look-up would be wasted: its kernels, its check of the ids, and above all the time of the host. The backward ends in one operator,
which has the rows, their gradients and the state of the optimizer as arguments. The first update of a kernel makes the look-up
and its backward, and records the call of this operator. Later updates repeat the call with their own ids and gradients.

Nothing is guessed about a release of FBGEMM. Every recorded argument must be a tensor that the kernel holds, or a number of
:data:`FIXED`, or one of those that this file sets for each update. Otherwise all updates make the look-up, and the log says why.

The ids need no check here. The exchange has read the rows of the same ids from the same tables, and that read checks them.
"""

from __future__ import annotations

from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_freescale.embedding.moment_kernel import MomentKernel
from lightning_freescale.embedding.table_optimizer import TABLE_OPTIMIZERS, set_count
from lightning_freescale.runtime.log import log_once

OPERATOR = ("split_embedding_nobag_backward_codegen_", "_unweighted_pt2_wrapper")  # how its name begins and ends
# Arguments that differ from update to update.
SET_EACH_TIME = ("grad_output", "indices", "offsets", "learning_rate_tensor", "iter")
# Numbers that stay the same until ``optimizer_args`` of the kernel is replaced.
FIXED = (
    "D", "total_hash_size_bits", "BT_block_size", "max_segment_length_per_warp", "stochastic_rounding", "info_B_num_bits",
    "info_B_mask_int64", "use_uniq_cache_locations", "use_homogeneous_placements", "eps", "weight_decay", "weight_decay_mode",
    "max_norm", "beta1", "beta2", "use_rowwise_bias_correction",
)  # fmt: skip
# FBGEMM does more than the operator for other modes.
DECAYS = (WeightDecayMode.NONE, WeightDecayMode.L2, WeightDecayMode.DECOUPLE)


class CannotRepeat(Exception):
    """Why the recorded call cannot be repeated."""


class RowUpdate:
    """Updates rows of the tables of one kernel that does not pool.

    Args:
        kernel: FBGEMM's kernel. Its rows lie in the tables, and none of them in a cache.
    """

    def __init__(self, kernel: SplitTableBatchedEmbeddingBagsCodegen):
        self._kernel = kernel
        self._call: _RepeatedCall | None = None
        self._possible = True

    def __call__(self, ids: Tensor, offsets: Tensor, gradient: Tensor, step: int) -> bool:
        """Update the rows of ``ids``. Several gradients of one row are summed first.

        Args:
            ids: ``[n]`` in lookup order. They are known to be rows of their tables.
            offsets: ``[T * B + 1]``.
            gradient: ``[n, D]`` float32.
            step: number of the training step, from 1.

        Returns:
            whether a look-up was made, which the kernel counts as a step.
        """
        kernel = self._kernel
        if self._call is not None and self._call.holds():
            self._call(ids, offsets, gradient, step)
            return False
        if isinstance(kernel, MomentKernel) and kernel.updates_rows:
            kernel.update_rows(ids, offsets, gradient, step)
            return False
        if self._possible:
            self._record(ids, offsets, gradient, step)
        else:
            update_by_look_up(kernel, ids, offsets, gradient, step)
        return True

    @property
    def repeats(self) -> bool:
        """Whether the next update makes no look-up."""
        return self._call is not None and self._call.holds()

    def _record(self, ids: Tensor, offsets: Tensor, gradient: Tensor, step: int) -> None:
        """Make the look-up and its backward, and find out how to repeat the call in it."""
        with _Recorder() as recorder:
            update_by_look_up(self._kernel, ids, offsets, gradient, step)
        try:
            self._call = _RepeatedCall(self._kernel, recorder.calls, gradient)
        except CannotRepeat as reason:
            self._call, self._possible = None, False
            log_once(
                f"prioritize: an update of rows also makes FBGEMM's look-up of them, which takes the host longer: {reason}"
            )


def update_by_look_up(
    kernel: SplitTableBatchedEmbeddingBagsCodegen, ids: Tensor, offsets: Tensor, gradient: Tensor, step: int
) -> None:
    """Update rows as FBGEMM offers it: inside the backward of their look-up. The arguments are those of :class:`RowUpdate`."""
    set_count([kernel], step - 1)  # the look-up counts one more
    with torch.enable_grad():
        rows = kernel(indices=ids, offsets=offsets)
    with torch.autograd.set_multithreading_enabled(False):  # saves a switch of threads
        rows.backward(gradient)


class _Recorder(TorchDispatchMode):
    """Records the calls of :data:`OPERATOR` with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin, end = OPERATOR
        name = func.overloadpacket.__name__
        if name.startswith(begin) and name.endswith(end):
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


class _RepeatedCall:
    """The call that was recorded, with the ids and gradients of another update.

    Raises:
        CannotRepeat: if the meaning of an argument is not known, or if FBGEMM does more than this call.
    """

    def __init__(
        self, kernel: SplitTableBatchedEmbeddingBagsCodegen, calls: list[tuple[Any, tuple[Any, ...]]], gradient: Tensor
    ):
        _check_kernel(kernel)
        if len(calls) != 1:
            raise CannotRepeat(f"the backward called {OPERATOR[0]}*{OPERATOR[1]} {len(calls)} times, not once")
        self._kernel = kernel
        self._operator, recorded = calls[0]
        schema = self._operator._schema.arguments
        given = [*recorded, *(argument.default_value for argument in schema[len(recorded) :])]
        places = {argument.name: place for place, argument in enumerate(schema)}
        missing = [name for name in SET_EACH_TIME[:-1] if name not in places]  # not every optimizer counts steps
        if missing:
            raise CannotRepeat(f"{self._operator.name()} has no argument {', '.join(missing)}")
        self._gradient, self._ids, self._offsets, self._rate = (places[name] for name in SET_EACH_TIME[:-1])
        self._step = places.get(SET_EACH_TIME[-1])
        self._id_type = given[self._ids].dtype
        self._options = kernel.optimizer_args
        self._limit: float | None = self._options.max_gradient if self._options.gradient_clipping else None
        passed = given[self._gradient]
        if passed.dtype != gradient.dtype or (self._limit is None and not _same(passed, gradient)):
            raise CannotRepeat("FBGEMM changes the gradient first")
        self._held: list[tuple[dict[str, Any], str, Tensor]] = []  # tensors of the kernel, and where it keeps them
        self._arguments = [
            None if name in SET_EACH_TIME else self._constant(name, value)
            for name, value in zip(places, given, strict=True)
        ]

    def _constant(self, name: str, value: Any) -> Any:
        """An argument that is the same in every update. A tensor is replaced by the kernel's own object."""
        if isinstance(value, (list, tuple)):  # from FBGEMM 1.9 on, some tensors are in lists
            return [self._constant(name, item) for item in value]
        if name in FIXED or value is None or (isinstance(value, Tensor) and not value.numel()):
            return value
        if isinstance(value, Tensor):
            for holder in (self._kernel._buffers, self._kernel._parameters):
                for attribute, tensor in holder.items():
                    if tensor is not None and _same(tensor, value):
                        self._held.append((holder, attribute, tensor))
                        return tensor
        raise CannotRepeat(f"the argument {name} of {self._operator.name()} is not known")

    def holds(self) -> bool:
        """Whether the kernel still has the tensors and options that were recorded."""
        for holder, name, tensor in self._held:  # a loop of its own: ``all`` would take several times as long
            if name not in holder or holder[name] is not tensor:  # ``get`` would be a call
                return False
        return self._kernel.optimizer_args is self._options

    def __call__(self, ids: Tensor, offsets: Tensor, gradient: Tensor, step: int) -> None:
        arguments = self._arguments.copy()
        arguments[self._gradient] = gradient if self._limit is None else gradient.clamp(-self._limit, self._limit)
        arguments[self._ids] = ids if ids.dtype == self._id_type else ids.to(self._id_type)
        arguments[self._offsets] = offsets if offsets.dtype == self._id_type else offsets.to(self._id_type)
        arguments[self._rate] = self._kernel.learning_rate_tensor
        if self._step is not None:
            arguments[self._step] = step
        with torch.set_grad_enabled(False):  # ``no_grad`` does the same with twice as many calls
            self._operator(*arguments)


def _check_kernel(kernel: SplitTableBatchedEmbeddingBagsCodegen) -> None:
    """Refuse kernels whose look-up or backward does more than the operator."""
    if kernel.optimizer not in TABLE_OPTIMIZERS.values():
        raise CannotRepeat(f"the optimizer is {kernel.optimizer}")
    if kernel.optimizer_args.weight_decay_mode not in DECAYS:
        raise CannotRepeat(f"the weight decay mode is {kernel.optimizer_args.weight_decay_mode}")
    if kernel._backward_hooks or kernel._backward_pre_hooks:
        raise CannotRepeat("the kernel has hooks for its backward")


def _same(tensor: Tensor, other: Tensor) -> bool:
    """Whether both are the same memory with the same type and shape."""
    return tensor.data_ptr() == other.data_ptr() and tensor.dtype == other.dtype and tensor.shape == other.shape
