"""The tables of one sharded ``EmbeddingBagCollection`` that this rank owns: pool their rows, and update them.

A *bag* is one feature of one sample; the owner pools its rows before it sends them. Features may have different widths. So that
the operations of ``prioritized.py`` apply, a bag is cut into *pieces* of equal width, the greatest common divisor of all widths
of the sharding group. A piece travels as a row of an ``EmbeddingCollection`` does. The pieces that this rank owns are listed by
feature, then by place in the row, then by sample; this is their *lookup order*.
"""

from __future__ import annotations

import math

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.embedding.index import count_true_by_segment, true_first
from lightning_freescale.embedding.local_tables import LocalTables
from lightning_freescale.embedding.table_optimizer import ModuleOptimizer, UpdateSettings, kernels_in


class BagTables(LocalTables):
    """This rank's rows of the tables of one ``ShardedEmbeddingBagCollection``, by sharding group.

    Attributes:
        dims: width ``D`` of a piece, in each sharding group.
        pieces_by_rank: ``[W]`` in each sharding group, the pieces of a sample that each rank owns. If the tables of the group
            are row-wise, every rank has a partial sum of every piece.
        row_wise: whether the tables are row-wise, in each sharding group.
    """

    def __init__(self, module: ShardedEmbeddingBagCollection):
        # The attributes of the base class are set here: TorchRec's two collections keep them in different places.
        self.module = module  # type: ignore[assignment]
        self.device = torch.device(module._device or "cpu")
        self.optimizer = ModuleOptimizer(module)  # type: ignore[arg-type]
        self.dims, self.pieces_by_rank, self.num_rows = [], [], []
        self.row_wise = [isinstance(sharding, RwPooledEmbeddingSharding) for sharding in module._embedding_shardings]
        self._first_key, self._weights = [], []
        self._bag_of_piece: list[Tensor] = []  # [pieces] by group: the feature of each piece
        # Lists on the host: a GPU need not be asked for them.
        self._pieces: list[list[int]] = []  # [T] by group: pieces of each feature
        self._takes_mean: list[list[bool]] = []  # [T] by group: whether the kernel pools the feature by its mean
        rank, world_size = module._env.rank, module._env.world_size
        for sharding, row_wise, lookup in zip(module._embedding_shardings, self.row_wise, module._lookups, strict=True):
            widths = [sharding.embedding_dims()] * world_size if row_wise else sharding._emb_dim_per_rank_per_feature()
            self.dims.append(math.gcd(*(width for of_rank in widths for width in of_rank)))
            self.pieces_by_rank.append([sum(of_rank) // self.dims[-1] for of_rank in widths])
            self._pieces.append([width // self.dims[-1] for width in widths[rank]])
            of_piece = [number for number, pieces in enumerate(self._pieces[-1]) for _ in range(pieces)]
            self._bag_of_piece.append(torch.tensor(of_piece, dtype=torch.int64, device=self.device))
            first_key, rows, takes_mean = [], 0, []
            for config, kernel in zip(lookup.grouped_configs, kernels_in(lookup), strict=True):
                mean = kernel.pooling_mode == PoolingMode.MEAN  # not of row-wise tables: see partial_sums.py
                for table in config.embedding_tables:
                    first_key += [rows] * len(table.feature_names)  # the features of one table share its rows
                    takes_mean += [mean] * len(table.feature_names)
                    rows += table.local_rows
            self._first_key.append(torch.tensor(first_key, dtype=torch.int64, device=self.device))
            self._takes_mean.append(takes_mean)
            self.num_rows.append(rows)

    def only_table(self, group: int) -> Tensor | None:
        """None: pooled rows are no rows of a table."""
        return None

    # ---- bags and pieces --------------------------------------------------------------------------------------------
    def pieces_of_bags(self, group: int, bags: Tensor) -> Tensor:
        """A value of each bag, ``[T, B]``, for each of its pieces: ``[pieces * B]`` in lookup order."""
        return bags.index_select(0, self._bag_of_piece[group]).flatten()

    def _to_pieces(self, group: int, pooled: Tensor) -> Tensor:
        """``[B, width of all features]`` to ``[pieces * B, D]`` in lookup order."""
        dim, samples = self.dims[group], len(pooled)
        return pooled.view(samples, -1, dim).transpose(0, 1).reshape(-1, dim) if pooled.numel() else pooled.view(0, dim)

    def pooled(self, group: int, pieces: Tensor, samples: int) -> Tensor:
        """``[pieces * B, D]`` in lookup order to ``[B, width of all features]``, as a look-up returns them."""
        return pieces.view(-1, samples, self.dims[group]).transpose(0, 1).reshape(samples, -1)

    # ---- read and update --------------------------------------------------------------------------------------------
    def read(self, group: int, features: KeyedJaggedTensor) -> Tensor:
        """The pooled rows of all bags of ``features``: ``[pieces * B, D]`` in lookup order; zeros for a bag without ids."""
        return self._to_pieces(group, self.look_up(group, features))

    def update_bags(
        self,
        group: int,
        bags: KeyedJaggedTensor,
        features: KeyedJaggedTensor,
        gradient: Tensor,
        settings: UpdateSettings,
    ) -> None:
        """Update the rows of all ids of ``features``. Several gradients of one row are summed first.

        Args:
            bags: the ids of the whole bags.
            features: a part of these ids.
            gradient: ``[pieces * B, D]`` in lookup order, of the whole bags.
        """
        if not features.values().numel():
            return
        by_piece = gradient.view(-1, features.stride(), self.dims[group])
        if any(self._takes_mean[group]):
            features, by_piece = self._one_id_per_bag(group, bags, features, by_piece)
        pooled = by_piece.transpose(0, 1).reshape(features.stride(), -1)
        self.optimizer.count_next_lookup_as(settings.step)
        with torch.enable_grad():
            rows = self.module._lookups[group](features)
        with torch.autograd.set_multithreading_enabled(False):  # as in the base class
            rows.backward(pooled)  # the fused optimizer runs in here
        self.optimizer.restore_count()

    def _one_id_per_bag(
        self, group: int, bags: KeyedJaggedTensor, features: KeyedJaggedTensor, gradient: Tensor
    ) -> tuple[KeyedJaggedTensor, Tensor]:
        """Make every id of ``features`` a bag of its own, whose weight is 1 / length of its whole bag.

        A kernel that pools by the mean divides a gradient by the number of ids that it is given, and these are a part of
        the bag only. With a single id it divides by 1.

        Args:
            gradient: ``[pieces, B, D]``.

        Returns:
            features with as many samples as the feature with the most ids has, and their gradient.
        """
        keys, samples, dim = len(features.keys()), features.stride(), self.dims[group]
        lengths, ids = features.lengths().to(torch.int64), features.length_per_key()
        most, total = max(ids), sum(ids)
        sample = torch.arange(samples, device=self.device).repeat(keys).repeat_interleave(lengths, output_size=total)
        whole = bags.lengths().repeat_interleave(lengths, output_size=total).to(torch.float32)
        gradients = gradient.new_zeros(len(gradient), most, dim)
        factors, first = [], 0
        for count, pieces, chosen, length, takes_mean in zip(
            ids, self._pieces[group], sample.split(ids), whole.split(ids), self._takes_mean[group], strict=True
        ):
            gradients[first : first + pieces, :count] = gradient[first : first + pieces, chosen]
            factors.append(1.0 / length if takes_mean else torch.ones_like(length))
            first += pieces
        alone = torch.arange(most, device=self.device) < lengths.view(keys, samples).sum(1, keepdim=True)
        return KeyedJaggedTensor(
            features.keys(),
            features.values(),
            weights=torch.cat(factors),
            lengths=alone.flatten().to(features.lengths().dtype),
            stride=most,
            length_per_key=ids,
        ), gradients


def choose_bags(features: KeyedJaggedTensor, chosen: Tensor, by_feature: list[int]) -> KeyedJaggedTensor:
    """The same features and samples, with the ids of the chosen bags alone.

    Args:
        chosen: ``[T, B]`` bool.
        by_feature: ``[T]`` number of the ids that are left.
    """
    lengths = features.lengths()
    kept = torch.repeat_interleave(chosen.flatten(), lengths.to(torch.int64), output_size=features.values().numel())
    return _choose(features, kept, torch.where(chosen.flatten(), lengths, 0), by_feature)


def choose_ids(features: KeyedJaggedTensor, chosen: Tensor, by_feature: list[int]) -> KeyedJaggedTensor:
    """The same features and samples, with the chosen ids alone.

    Args:
        chosen: ``[n]`` bool in lookup order.
        by_feature: ``[T]`` number of the ids that are left.
    """
    lengths = marked_by_bag(features, chosen).flatten()
    return _choose(features, chosen, lengths.to(features.lengths().dtype), by_feature)


def _choose(features: KeyedJaggedTensor, kept: Tensor, lengths: Tensor, by_feature: list[int]) -> KeyedJaggedTensor:
    weights = features.weights_or_none()
    order = true_first(kept)[: sum(by_feature)]  # with a mask as index, the host would wait for the number of ids
    return KeyedJaggedTensor(
        features.keys(),
        features.values()[order],
        weights=None if weights is None else weights[order],
        lengths=lengths,
        stride=features.stride(),
        length_per_key=by_feature,
    )


def marked_by_bag(features: KeyedJaggedTensor, ids: Tensor) -> Tensor:
    """How many of the marked ids each bag has: ``[n]`` bool in lookup order to ``[T, B]`` int64."""
    counts = count_true_by_segment(ids, features.offsets().to(torch.int64))
    return counts.view(len(features.keys()), features.stride())
