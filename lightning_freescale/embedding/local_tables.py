"""The table rows of one sharded module that this rank owns: number them, read them, update them."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel

from lightning_freescale.embedding.grouped_update import GroupedGradients, GroupedUpdate
from lightning_freescale.embedding.index_results import Features, as_kjt
from lightning_freescale.embedding.row_update import RowUpdate
from lightning_freescale.embedding.table_optimizer import ModuleOptimizer, UpdateSettings, kernels_in
from lightning_freescale.runtime.streams import int64_on_device

CACHING = EmbeddingComputeKernel.FUSED_UVM_CACHING


class LocalTables:
    """This rank's rows of the tables of one ``ShardedEmbeddingCollection``, by sharding group.

    Attributes:
        module: the sharded collection. Its parameters stay where they are.
        device: the device of the tables.
        optimizer: the fused optimizer of the tables.
        dims: row width ``D`` of each sharding group.
        num_rows: local rows of each sharding group, all of its tables together.
    """

    def __init__(self, module: ShardedEmbeddingCollection):
        self.module = module
        self.device = torch.device(module._device or "cpu")
        self.optimizer = ModuleOptimizer(module)
        self.dims = [module._embedding_dim_for_sharding_type(kind) for kind in module._sharding_type_to_sharding]
        self.num_rows: list[int] = []
        self._first_key: list[Tensor] = []  # [T] by group: number of the first row of each feature's table
        self._weights: list[list[Tensor]] = []  # [rows, D] by group: the table of each feature
        # By group: the table ``[rows, D]`` of all features if they use the same one.
        self._only_table: list[Tensor | None] = []
        # By group: the update without a look-up, if the group has one kernel and no cache.
        self._row_updates: list[RowUpdate | None] = []
        # By group: the update with gradients that were sorted, if the group has one kernel and no cache.
        self._grouped_updates: list[GroupedUpdate | None] = []
        # By group: whether some rows lie in a cache. The tables in host memory then hold old values of them.
        self.cached: list[bool] = []
        for lookup in module._lookups:
            first_key, rows, weights = [], 0, []
            kernels = kernels_in(lookup)
            for config, kernel in zip(lookup.grouped_configs, kernels, strict=True):
                for table, weight in zip(config.embedding_tables, kernel.split_embedding_weights(), strict=True):
                    first_key += [rows] * len(table.feature_names)  # the features of one table share its rows
                    weights += [weight.detach()] * len(table.feature_names)  # the same object for features of one table
                    rows += table.local_rows
            self._weights.append(weights)
            self._only_table.append(weights[0] if weights and all(table is weights[0] for table in weights) else None)
            configs = [table for config in lookup.grouped_configs for table in config.embedding_tables]
            self.cached.append(any(table.compute_kernel == CACHING for table in configs))
            only_kernel = None if self.cached[-1] or len(kernels) != 1 else kernels[0]
            self._row_updates.append(None if only_kernel is None else RowUpdate(only_kernel))
            self._grouped_updates.append(None if only_kernel is None else GroupedUpdate(only_kernel))
            self._first_key.append(torch.tensor(first_key, dtype=torch.int64, device=self.device))
            self.num_rows.append(rows)

    def row_keys(self, group: int, ids: Tensor, feature: Tensor) -> Tensor:
        """Number of each id's row among all local rows of the group: ``[n]`` ids and ``[n]`` feature indices to ``[n]`` int64."""
        return ids.to(torch.int64) + self._first_key[group][feature]

    def first_key(self, group: int) -> Tensor:
        """``[T]`` int64: number of the first row of each feature's table among all local rows of the group."""
        return self._first_key[group]

    def only_table(self, group: int) -> Tensor | None:
        """``[rows, D]``, the table that all features of the group use; None if they use several tables, or a cache."""
        return None if self.cached[group] else self._only_table[group]

    def read(self, group: int, features: Features) -> Tensor:
        """The rows of all ids of ``features``: ``[n, D]`` float32 in lookup order, whatever the type of the table.

        Plain reads of the tables are faster than the forward of FBGEMM's kernels, which prepares an update. Rows behind a
        cache are read by FBGEMM, which also brings them into the cache, before the update needs them there.
        """
        if self.cached[group]:
            return self.look_up(group, features).view(-1, self.dims[group])
        rows = torch.empty(features.values().numel(), self.dims[group], dtype=torch.float32, device=self.device)
        counts = features.length_per_key()
        tables = self._weights[group]
        for table, ids, into in zip(tables, features.values().split(counts), rows.split(counts), strict=True):
            if table.dtype == torch.float32:
                torch.index_select(table, 0, ids, out=into)
            else:
                into.copy_(table.index_select(0, ids))
        return rows

    def look_up(self, group: int, features: Features) -> Tensor:
        """What FBGEMM's kernels return for ``features``, without an update to follow."""
        with torch.no_grad():
            rows: Tensor = self.module._lookups[group](as_kjt(features))
        self.optimizer.restore_count()  # the kernels have counted a step
        return rows

    def update(self, group: int, features: Features, gradient: Tensor, settings: UpdateSettings) -> None:
        """Update the rows of all ids of ``features``. Several gradients of one row are summed first.

        Args:
            gradient: ``[n, D]`` in lookup order.
            settings: learning rates and step count must be those of the gradient's own step. The caller sets the rates.
        """
        update = self._row_updates[group]
        if update is not None:
            if update(features.values(), features.offsets(), gradient, settings.step):
                self.optimizer.restore_count()
            return
        self.optimizer.count_next_lookup_as(settings.step)
        with torch.enable_grad():
            rows = self.module._lookups[group](as_kjt(features)).view(-1, self.dims[group])
        with torch.autograd.set_multithreading_enabled(False):  # saves a switch of threads
            rows.backward(gradient)  # the fused optimizer runs in here
        self.optimizer.restore_count()

    def group_gradients(self, group: int, features: Features, wire_position: Tensor) -> GroupedGradients | None:
        """Prepare :meth:`update_grouped` for the ids of ``features``; None if the group has no such update.

        Args:
            wire_position: ``[n]`` place in wire order of each id in lookup order.
        """
        update = self._grouped_updates[group]
        if update is None or not update.is_possible():
            return None
        keys = features.values()
        if self._only_table[group] is None:
            counts = int64_on_device(features.length_per_key(), self.device)
            keys = keys + self._first_key[group].repeat_interleave(counts, output_size=len(keys))
        return update.group(keys, wire_position)

    def update_grouped(self, group: int, grouped: GroupedGradients, received: Tensor, divisor: int) -> None:
        """Update rows as :meth:`update` does. ``received [n, D]`` is in wire order. Sums are divided by ``divisor``."""
        update = self._grouped_updates[group]
        assert update is not None
        update(grouped, received, divisor)
