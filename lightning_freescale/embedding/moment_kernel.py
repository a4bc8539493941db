"""Adam and LAMB of the tables on a CPU, where FBGEMM has no kernel for them.

:class:`MomentKernel` takes the place of FBGEMM's kernel. FBGEMM looks the rows up. The update inside backward is our own
(``csrc/table_optimizer``), with the formulas of FBGEMM's CUDA kernels:

    m = beta1 * m + (1 - beta1) * g           v = beta2 * v + (1 - beta2) * g * g
    r = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * w
    w = w - lr * r                            with LAMB:  w = w - lr * |w| / |r| * r

``g`` is the sum of the gradients of a row in the order of the look-up, and ``t`` counts training steps. Rows without a gradient
keep their weights and moments. With one second moment a row ("partial row-wise"), ``g * g`` is the mean over the row.
The state has FBGEMM's names and shapes, so a checkpoint moves between CPU and CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor
from torchrec.distributed import batched_embedding_kernel

from lightning_freescale import _C
from lightning_freescale.runtime.errors import ConfigurationError

_ROWWISE = (EmbOptimType.PARTIAL_ROWWISE_ADAM, EmbOptimType.PARTIAL_ROWWISE_LAMB)
_LAMB = (EmbOptimType.LAMB, EmbOptimType.PARTIAL_ROWWISE_LAMB)
_OPTIMIZERS = (EmbOptimType.ADAM, *_ROWWISE, EmbOptimType.LAMB)


class _TableLookup(NamedTuple):
    """What a look-up reads of one table: ``n`` ids with the features of the table one after the other."""

    table: int
    ids: Tensor  # [n]
    source: Tensor  # [n] where the output of each id, or of its bag, begins
    scale: Tensor | None  # [n] factor of each row in its bag; None: 1
    share: Tensor | None  # [n] this factor without the weight of the row; None: 1
    first: int  # place of the first id among the ids of all tables


class _StepSettings(NamedTuple):
    """What an update depends on, apart from the gradients. As in FBGEMM, it is fixed in the forward."""

    rate: float
    step: int


class MomentKernel(SplitTableBatchedEmbeddingBagsCodegen):
    """FBGEMM's kernel of one group of tables on a CPU, with an update of our own for optimizers with moments.

    With any other optimizer it is FBGEMM's kernel.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        optimizer = kwargs.get("optimizer")
        self._own: EmbOptimType | None = None
        if optimizer in _OPTIMIZERS:
            kwargs["optimizer"] = EmbOptimType.EXACT_SGD  # FBGEMM only looks rows up
        super().__init__(*args, **kwargs)
        if optimizer in _OPTIMIZERS:
            self._own = optimizer
            self._moments = [
                [
                    torch.zeros(rows, dim, dtype=torch.float32),
                    torch.zeros(rows, *([] if optimizer in _ROWWISE else [dim]), dtype=torch.float32),
                ]
                for rows, dim, *_ in self.embedding_specs
            ]

    # ---- state, under FBGEMM's names --------------------------------------------------------------------------------
    def split_optimizer_states(self) -> list[list[Tensor]]:
        return super().split_optimizer_states() if self._own is None else self._moments

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        if self._own is None:
            return super().get_optimizer_state()
        return [{"exp_avg": first, "exp_avg_sq": second} for first, second in self._moments]

    # ---- look up and update -----------------------------------------------------------------------------------------
    def forward(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None, **rest: Any
    ) -> Tensor:
        if self._own is None:
            return super().forward(indices, offsets, per_sample_weights, **rest)
        if rest.get("batch_size_per_feature_per_rank") is not None:
            raise ConfigurationError(
                f"embedding_optimizer: {self._own.value} on a CPU cannot train a collection that is called with a batch size "
                "that varies by feature. Use the same batch size for all features, or another optimizer"
            )
        with torch.no_grad():
            output: Tensor = super().forward(indices, offsets, per_sample_weights, **rest)
        if not torch.is_grad_enabled():
            return output
        for count in (self.iter_cpu, self.iter):  # FBGEMM's SGD does not count
            count.add_(1)
        settings = _StepSettings(self.get_learning_rate(), int(self.iter_cpu))
        anchor = self.placeholder_autograd_tensor
        return _UpdateRows.apply(anchor, self, indices, offsets, per_sample_weights, settings, output)

    @property
    def updates_rows(self) -> bool:
        """Whether the update is our own."""
        return self._own is not None

    def update_rows(self, indices: Tensor, offsets: Tensor, gradient: Tensor, step: int) -> None:
        """The update alone, as the backward of a look-up makes it in training step number ``step``."""
        settings = _StepSettings(self.get_learning_rate(), step)
        self.update(self.tables_of(indices, offsets, None), self.clipped(gradient), settings)

    def clipped(self, gradient: Tensor) -> Tensor:
        """The gradient as the update takes it: float32, contiguous, and within the limit of the options."""
        gradient, options = gradient.float(), self.optimizer_args
        if options.gradient_clipping:
            gradient = gradient.clamp(-options.max_gradient, options.max_gradient)
        return gradient.contiguous()

    def tables_of(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> list[_TableLookup]:
        """What a look-up reads, table by table."""
        if not indices.numel():
            return []
        features = self.feature_table_map
        bags = offsets.numel() - 1
        samples = bags // len(features)
        bounds = offsets[::samples].tolist()  # the ids of feature f begin at bounds[f]
        share: Tensor | None = None
        if self.pooling_mode == PoolingMode.NONE:
            source = torch.arange(indices.numel()) * self.max_D
        else:
            lengths = offsets.diff()
            bag = torch.repeat_interleave(torch.arange(bags), lengths)
            source = (bag % samples) * self.total_D + self.D_offsets.to(torch.int64)[bag // samples]
            if self.pooling_mode == PoolingMode.MEAN:
                share = (1.0 / lengths.float())[bag]
        scale = share
        if weights is not None:
            scale = weights.detach().float() if share is None else weights.detach().float() * share
        found = []
        for table in sorted(set(features)):
            mine = [number for number, other in enumerate(features) if other == table]
            assert mine == list(range(mine[0], mine[-1] + 1)), "the features of a table follow each other"
            begin, end = bounds[mine[0]], bounds[mine[-1] + 1]
            if end > begin:
                of_rows, of_bags = (None if part is None else part[begin:end].contiguous() for part in (scale, share))
                found.append(_TableLookup(table, indices[begin:end], source[begin:end], of_rows, of_bags, first=begin))
        return found

    def update(self, lookups: list[_TableLookup], gradient: Tensor, settings: _StepSettings) -> None:
        """Update each row of ``lookups`` once, with the sum of its gradients."""
        weights, values = self.split_embedding_weights(), gradient.flatten()
        for lookup in lookups:
            tensors = [weights[lookup.table].detach(), *self._moments[lookup.table]]
            rows = lookup.ids.to(torch.int64)
            if tensors[0].dtype == torch.float32:
                self._update(lookup, values, rows, tensors, settings)
                continue
            touched, rows = rows.unique(return_inverse=True)  # update these rows in float32, and round them once
            copies = [tensor[touched].float() for tensor in tensors]
            self._update(lookup, values, rows, copies, settings)
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor[touched] = copy.to(tensor.dtype)

    def _update(
        self, lookup: _TableLookup, values: Tensor, rows: Tensor, tensors: list[Tensor], settings: _StepSettings
    ) -> None:
        """Update the ``rows`` of three tensors: the weights and both moments."""
        options = self.optimizer_args
        weight, first, second = (tensor.numpy() for tensor in tensors)
        _C.update_moments(
            values=values.numpy(),
            source=lookup.source.numpy(),
            scale=None if lookup.scale is None else lookup.scale.numpy(),
            rows=rows.contiguous().numpy(),
            order=rows.argsort(stable=True).numpy(),
            weights=weight,
            first=first,
            second=second,
            rate=settings.rate,
            beta1=options.beta1,
            beta2=options.beta2,
            eps=options.eps,
            weight_decay=options.weight_decay,
            step=settings.step,
            lamb=self._own in _LAMB,
        )

    def weight_gradients(self, lookups: list[_TableLookup], gradient: Tensor, like: Tensor) -> Tensor:
        """Gradient of the weights of weighted bags, ``[n]``."""
        values, result = gradient.flatten(), torch.zeros_like(like, dtype=torch.float32)
        for lookup in lookups:
            rows = self.split_embedding_weights()[lookup.table].detach()[lookup.ids.to(torch.int64)].float()
            of_bags = values[lookup.source[:, None] + torch.arange(rows.shape[1])]
            part = (of_bags * rows).sum(1)
            result[lookup.first : lookup.first + len(part)] = part if lookup.share is None else part * lookup.share
        return result.to(like.dtype)


class _UpdateRows(torch.autograd.Function):
    """Returns the output of a look-up. Its backward updates the rows."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        kernel: MomentKernel,
        indices: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        settings: _StepSettings,
        output: Tensor,
    ) -> Tensor:
        """``anchor`` requires a gradient, so that autograd calls backward."""
        ctx.kernel, ctx.settings = kernel, settings
        ctx.lookup = indices, offsets, weights
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        kernel, (indices, offsets, weights) = ctx.kernel, ctx.lookup
        gradient = kernel.clipped(gradients[0])
        lookups = kernel.tables_of(indices, offsets, weights)
        of_weights = kernel.weight_gradients(lookups, gradient, weights) if ctx.needs_input_grad[4] else None
        kernel.update(lookups, gradient, ctx.settings)
        return None, None, None, None, of_weights, None, None


@contextmanager
def moment_kernels(device: torch.device) -> Iterator[None]:
    """Inside the ``with`` block, TorchRec creates :class:`MomentKernel` in place of FBGEMM's kernel, if ``device`` is a CPU."""
    name, theirs = "SplitTableBatchedEmbeddingBagsCodegen", SplitTableBatchedEmbeddingBagsCodegen
    if device.type == "cpu":
        setattr(batched_embedding_kernel, name, MomentKernel)
    try:
        yield
    finally:
        setattr(batched_embedding_kernel, name, theirs)
