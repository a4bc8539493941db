"""Prioritized exchange of one sharded ``EmbeddingCollection``: the moves. Their order within a step is in ``schedule.py``.

Composition around TorchRec's ``ShardedEmbeddingCollection``: its input_dist, tables, fused optimizer and state_dict stay at
work; only the exchange of rows and of their gradients is taken over, in two pieces (collisions and exclusive rows) that travel
at different times over different process groups. No row is looked up before every update it must see has been applied.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding import EmbeddingCollectionAwaitable, ShardedEmbeddingCollection
from torchrec.distributed.types import NoWait
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.bubbles.spans import Kind
from lightning_freescale.bubbles.timeline import Timeline
from lightning_freescale.embedding.collisions import (
    CollisionDetector,
    held_between,
    masked_lengths,
    partition,
    place_within,
)
from lightning_freescale.embedding.stages import (
    COLLISION,
    EXCLUSIVE,
    Asked,
    BatchState,
    ExchangeStats,
    Groups,
    Piece,
    Split,
    exchange,
    own_last,
    wire_bounds,
)
from lightning_freescale.embedding.table_optimizer import kernels_in, kernels_of
from lightning_freescale.runtime.errors import FreeScaleError
from lightning_freescale.runtime.streams import Readback, SideStream, current_stream, int64_on_device, mark_used_on


class _Join(torch.autograd.Function):
    """Rows of both pieces, in the order of the batch; backward hands the gradient to the schedule, not to autograd."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, state: BatchState, index: int, order: Tensor, arrived: Any, parts: Tensor
    ) -> Tensor:
        ctx.state, ctx.index, ctx.arrived = state, index, arrived
        return parts.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.state.gradient[ctx.index] is not None:
            raise FreeScaleError(
                "backward ran twice through the embeddings of one step, which updates their rows twice: use prioritize=False"
            )
        ctx.state.gradient[ctx.index] = gradients[0]
        ctx.arrived(ctx.state)
        return (None,) * 6


class PrioritizedEmbedding:
    """The moves of the prioritized exchange for one ``ShardedEmbeddingCollection``.

    Args:
        module: the sharded collection; its parameters and buffers stay where they are.
        groups: process groups for the rows and gradients, by urgency.
        copies: the stream on which batches are copied to the device.
    """

    def __init__(
        self,
        module: ShardedEmbeddingCollection,
        groups: Groups,
        copies: SideStream | None = None,
        timeline: Timeline | None = None,
    ):
        self.module, self.groups, self.copies = module, groups, copies
        self.timeline = timeline or Timeline()
        self.rank, self.world_size = groups.collision.rank(), groups.collision.size()
        # Behind the ids of the same batch, and not behind the gradients of the one before, which wait for their backward.
        self._ids_group = module._env.process_group
        self.kernels = kernels_of(module)
        self.steps = 0  # training steps of this module, see take_over
        self.stats = ExchangeStats()
        self.device = torch.device(module._device or "cpu")
        self._dims = [module._embedding_dim_for_sharding_type(kind) for kind in module._sharding_type_to_sharding]
        self._key_offsets: list[Tensor] = []
        self._detectors: list[CollisionDetector] = []
        self._weights: list[list[Tensor]] = []  # [rows, D] of the table of each feature, by group
        for lookup in module._lookups:
            offsets, rows, weights = [], 0, []
            for config, kernel in zip(lookup.grouped_configs, kernels_in(lookup), strict=True):
                for table, part in zip(config.embedding_tables, kernel.split_embedding_weights(), strict=True):
                    offsets += [rows] * len(table.feature_names)  # the features of one table share its rows
                    weights += [part.detach()] * len(table.feature_names)  # the same object for features of one table
                    rows += table.local_rows
            self._weights.append(weights)
            self._key_offsets.append(torch.tensor(offsets, dtype=torch.int64, device=self.device))
            self._detectors.append(CollisionDetector(rows, self.device))
        self.ids_stream, self.table_stream = (SideStream(self.device, high_priority=True) for _ in range(2))
        # Collections built by other TorchRec releases know other options: pass those that this one has.
        options = inspect.signature(EmbeddingCollectionAwaitable.__init__).parameters
        self._output_options = {
            name: getattr(module, f"_{name}")
            for name in ("use_gather_select", "use_gather_select_per_sharding", "use_sorted_select")
            if name in options and hasattr(module, f"_{name}")
        }

    def take_over(self) -> None:
        """Go on from where the synchronous path has left the tables."""
        self.steps = max((int(kernel.iter_cpu) for kernel in self.kernels), default=0)
        with self.table_stream.work(compute=True):
            pass

    # ---- ids ---------------------------------------------------------------------------------------------------------
    def ask(self, kjt: KeyedJaggedTensor) -> BatchState:
        """Start the exchange of the ids of a batch. Touches no weight, so it may run any number of batches ahead."""
        context = self.module.create_context()
        mark_used_on(self.ids_stream, (kjt.values(), kjt.lengths_or_none(), kjt.offsets_or_none()))
        with self.ids_stream.work(self.copies):
            return BatchState(kjt, context, self.module.input_dist(context, kjt))

    def finish_ids(self, state: BatchState) -> None:
        """Wait for the ids and note who asked for what."""
        if state.ids is None:
            return
        with self.ids_stream.work(), self.timeline.span(Kind.ID_EXCHANGE):
            received, state.ids = state.ids.wait().wait(), None
            for index, (features, context) in enumerate(zip(received, state.context.sharding_contexts, strict=True)):
                state.asked.append(self._note(index, features, context))
        for asked in state.asked:
            mark_used_on(self.table_stream, asked.tensors())

    def _note(self, index: int, features: KeyedJaggedTensor, context: Any) -> Asked:
        count, total = len(features.keys()), features.values().numel()
        sizes = context.batch_size_per_rank or [features.stride() // self.world_size] * self.world_size
        features.offsets()  # works them out, here and now: on the stream of whoever asks first, and kept
        lengths = features.lengths().to(torch.int64)
        rank_of_sample = torch.repeat_interleave(
            torch.arange(self.world_size, device=self.device),
            int64_on_device(sizes, self.device),
            output_size=sum(sizes),
        )
        feature_of_sample = torch.arange(count, device=self.device).repeat_interleave(
            sum(sizes), output_size=count * sum(sizes)
        )
        requester = torch.repeat_interleave(rank_of_sample.repeat(count), lengths, output_size=total)
        feature = torch.repeat_interleave(feature_of_sample, lengths, output_size=total)
        unbucketize = context.unbucketize_permute_tensor
        owned, asked = list(context.output_splits) or [total], list(context.input_splits) or [total]
        return Asked(
            features=features,
            keys=features.values().to(torch.int64) + self._key_offsets[index][feature],
            wire=own_last(torch.argsort(requester, stable=True), owned, self.rank),
            request=own_last(torch.arange(sum(asked), device=self.device), asked, self.rank),
            owned=owned,
            asked=asked,
            unbucketize=unbucketize,
            bucketize=None if unbucketize is None else _inverse(unbucketize),
        )

    # ---- collisions ------------------------------------------------------------------------------------------------------
    def collide(self, first: BatchState, second: BatchState) -> None:
        """Find the rows two consecutive batches share and tell their requesters. Needs no weight either."""
        first.split_after, second.split_before = [], []
        with self.ids_stream.work(), self.timeline.span(Kind.ID_EXCHANGE, joined=math.nan):
            for index, (a, b) in enumerate(zip(first.asked, second.asked, strict=True)):
                of_first, of_second = self._detectors[index](a.keys, b.keys)
                first.split_after.append(self._tell(a, of_first))
                second.split_before.append(self._tell(b, of_second))
        for split in (*first.split_after, *second.split_before):
            mark_used_on(self.table_stream, (split.mask, split.received_mask))

    def _tell(self, asked: Asked, mask: Tensor) -> Split:
        told = exchange(
            mask.to(torch.uint8),
            asked.wire,
            asked.owned,
            asked.asked,
            self._ids_group,
            self.timeline,
            Kind.ID_EXCHANGE,
        )
        split = Split(mask, told)
        if self.device.type == "cuda":  # waits on the stream, not on the host; the counts are there a step later
            self._count(asked, split)
        return split

    def _count(self, asked: Asked, split: Split) -> None:
        split.received_mask = split.told.wait().bool()
        of_keys = asked.features.offsets()[:: asked.features.stride()].to(torch.int64)
        of_ranks = wire_bounds(asked.owned, self.rank) + wire_bounds(asked.asked, self.rank)
        send_from, send_to, from_, to = int64_on_device(of_ranks, self.device).split(self.world_size)
        split.counts = Readback(
            torch.cat(
                [
                    held_between(split.mask[asked.wire], send_from, send_to),
                    masked_lengths(split.mask, of_keys),
                    of_keys.diff(),
                    held_between(split.received_mask, from_, to),
                ]
            )
        )

    def _pieces(self, asked: Asked, split: Split) -> dict[str, Piece]:
        if split.counts is None:
            self._count(asked, split)
        assert split.counts is not None
        assert split.received_mask is not None
        keys = asked.features.keys()
        sizes = [self.world_size, len(keys), len(keys), self.world_size]
        send, by_feature, all_by_feature, receive = (part.tolist() for part in split.counts.wait().split(sizes))
        own, ask = sum(send), sum(receive)
        mask, features = split.mask, asked.features
        values = features.values()[partition(mask)]
        wire = place_within(mask)[asked.wire[partition(mask[asked.wire])]]
        positions = asked.request[partition(split.received_mask)]
        lengths = features.lengths()
        held = masked_lengths(mask, features.offsets().to(torch.int64)).to(lengths.dtype)
        return {
            COLLISION: Piece(
                KeyedJaggedTensor(
                    keys, values[:own], lengths=held, stride=features.stride(), length_per_key=by_feature
                ),
                wire[:own],
                send,
                positions[:ask],
                receive,
            ),
            EXCLUSIVE: Piece(
                KeyedJaggedTensor(
                    keys,
                    values[own:],
                    lengths=lengths - held,
                    stride=features.stride(),
                    length_per_key=[a - b for a, b in zip(all_by_feature, by_feature, strict=True)],
                ),
                wire[own:],
                [a - b for a, b in zip(asked.owned, send, strict=True)],
                positions[ask:],
                [a - b for a, b in zip(asked.asked, receive, strict=True)],
            ),
        }

    def _divide(self, state: BatchState, splits: list[Split] | None, otherwise: str) -> list[dict[str, Piece]]:
        with self.table_stream.work(self.ids_stream), self.timeline.span(Kind.ID_EXCHANGE, joined=math.nan):
            if splits is None:
                return [self._whole(asked, otherwise) for asked in state.asked]
            return [self._pieces(asked, split) for asked, split in zip(state.asked, splits, strict=True)]

    def _whole(self, asked: Asked, piece: str) -> dict[str, Piece]:
        """All rows in one piece: nothing to tell anybody."""
        return {piece: Piece(asked.features, asked.wire, asked.owned, asked.request, asked.asked)}

    # ---- rows ------------------------------------------------------------------------------------------------------------
    def settle_rows(self, state: BatchState) -> None:
        """Decide how the rows of a batch come: by its collisions with the batch before, all at once if there is none."""
        state.rows = self._divide(state, state.split_before, EXCLUSIVE)
        with self.table_stream.work():
            for weights, pieces in zip(self._weights, state.rows, strict=True):
                if weights and all(table is weights[0] for table in weights):
                    for part in pieces.values():
                        part.ids = part.features.values()[part.wire]
        if state.split_before is not None:
            for pieces in state.rows:
                self.timeline.count("rows", sum(sum(piece.send) for piece in pieces.values()))
                self.timeline.count("collisions", sum(pieces[COLLISION].send))
        stats = self.stats
        stats.batches += 1
        stats.ids += state.kjt.values().numel()
        stats.id_bytes += state.kjt.values().numel() * self.module._embedding_dim * 4  # float32
        for pieces, dim in zip(state.rows, self._dims, strict=True):
            rows = sum(sum(piece.receive) for piece in pieces.values())
            stats.rows += rows
            stats.row_bytes += rows * dim * 4
            stats.collisions += sum(pieces[COLLISION].receive) if COLLISION in pieces else 0

    @torch.no_grad()
    def send_rows(self, state: BatchState, piece: str) -> None:
        """Owner: look up the rows of one piece and start sending them."""
        state.incoming[piece] = []
        kind = Kind.ROW_EXCHANGE_COLLISION if piece == COLLISION else Kind.ROW_EXCHANGE_EXCLUSIVE
        with self.table_stream.work(), self.timeline.span(Kind.LOOKUP):
            if not state.arriving:
                state.arriving = [
                    torch.empty(sum(sum(part.receive) for part in pieces.values()), dim, device=self.device)
                    for pieces, dim in zip(state.rows, self._dims, strict=True)
                ]
            for weights, dim, pieces, arriving in zip(
                self._weights, self._dims, state.rows, state.arriving, strict=True
            ):
                if piece in pieces:
                    part = pieces[piece]
                    if part.ids is not None:  # straight into wire order
                        source, order = weights[0], part.ids
                    else:
                        source, order = self._look_up(weights, part.features, dim), part.wire
                    places = arriving.split([sum(other.receive) for other in pieces.values()])
                    into = places[list(pieces).index(piece)]
                    state.incoming[piece].append(
                        exchange(
                            source, order, part.send, part.receive, self.groups.of(piece), self.timeline, kind, into
                        )
                    )

    def _look_up(self, weights: list[Tensor], features: KeyedJaggedTensor, dim: int) -> Tensor:
        """Plain reads of the tables: quicker than the kernels' forward, which is for lookups that will be updated."""
        rows = torch.empty(features.values().numel(), dim, device=self.device)
        counts = features.length_per_key()
        for table, ids, part in zip(weights, features.values().split(counts), rows.split(counts), strict=True):
            torch.index_select(table, 0, ids, out=part)
        return rows

    def join(self, state: BatchState, arrived: Any) -> EmbeddingCollectionAwaitable:
        """Requester: the module's output, once both pieces have come. ``arrived(state)`` is called with their gradient."""
        state.used, state.divide = True, get_gradient_division()
        state.learning_rates = [group["lr"] for group in self.module.fused_optimizer.param_groups]
        state.gradient = [None] * len(state.asked)
        self.steps += 1
        state.step = self.steps
        orders = []
        with self.table_stream.work():
            self.restore_steps()
            for asked, pieces in zip(state.asked, state.rows, strict=True):
                order = _inverse(torch.cat([part.positions for part in pieces.values()]))
                orders.append(order if asked.unbucketize is None else order[asked.unbucketize])
        self.await_rows(state)
        with self.timeline.span(Kind.ROW_EXCHANGE_COLLISION):  # on CUDA the compute waits here, on CPU above
            self.table_stream.join()
        outputs = []
        for index, (parts, order) in enumerate(zip(state.arriving, orders, strict=True)):
            mark_used_on(current_stream(self.device), (parts, order))
            anchor = torch.empty(0, device=self.device, requires_grad=True)
            outputs.append(NoWait(_Join.apply(anchor, state, index, order, arrived, parts)))
        state.incoming, state.arriving = {}, []
        module = self.module
        return EmbeddingCollectionAwaitable(
            awaitables_per_sharding=outputs,
            features_per_sharding=[context.features_before_input_dist for context in state.context.sharding_contexts],
            embedding_names_per_sharding=module._embedding_names_per_sharding,
            need_indices=module._need_indices,
            features_to_permute_indices=module._features_to_permute_indices,
            ctx=state.context,
            sharding_types=list(module._sharding_type_to_sharding),
            **self._output_options,
        )

    def await_rows(self, state: BatchState) -> None:
        """Let what follows on the table stream, where the rows' memory goes back to, wait for them."""
        with self.table_stream.work():
            for transfers in state.incoming.values():
                for transfer in transfers:
                    transfer.wait()

    # ---- gradients -----------------------------------------------------------------------------------------------------
    def settle_gradients(self, state: BatchState) -> None:
        """Decide how gradients go: by collisions with the batch after, all with priority if there is none."""
        state.gradients = self._divide(state, state.split_after, COLLISION)
        with self.table_stream.work():
            for asked, pieces in zip(state.asked, state.gradients, strict=True):
                for part in pieces.values():
                    part.back = _inverse(part.wire)
                    part.places = part.positions if asked.bucketize is None else asked.bucketize[part.positions]

    def send_gradients(self, state: BatchState, piece: str) -> None:
        """Requester: start sending the gradients of one piece to the owners of the rows."""
        state.outgoing[piece] = []
        mark_used_on(self.table_stream, state.gradient)
        with self.table_stream.work(compute=piece == COLLISION):  # which goes first
            for gradient, pieces in zip(state.gradient, state.gradients, strict=True):
                if piece not in pieces or gradient is None:  # no gradient: the loss does not depend on this group
                    continue
                part = pieces[piece]
                assert part.places is not None
                state.outgoing[piece].append(
                    exchange(
                        gradient,
                        part.places,
                        part.receive,
                        part.send,
                        self.groups.of(piece),
                        self.timeline,
                        Kind.GRADIENT_EXCHANGE,
                    )
                )

    def apply_gradients(self, state: BatchState, piece: str) -> None:
        """Owner: update the rows of one piece, with the learning rate and step count of the batch's own step."""
        if piece not in state.outgoing:
            return
        now = [group["lr"] for group in self.module.fused_optimizer.param_groups]
        self._set_learning_rates(state.learning_rates)
        transfers = iter(state.outgoing.pop(piece))
        with self.table_stream.work(), self.timeline.span(Kind.LOOKUP):
            for lookup, dim, gradient, pieces in zip(
                self.module._lookups, self._dims, state.gradient, state.gradients, strict=True
            ):
                if piece in pieces and gradient is not None:
                    self._update(lookup, dim, pieces[piece], next(transfers).wait(), state)
            self.restore_steps()
        self._set_learning_rates(now)

    def _update(self, lookup: Any, dim: int, part: Piece, received: Tensor, state: BatchState) -> None:
        if not received.numel():
            return
        assert part.back is not None
        gradient = received.index_select(0, part.back)  # a gather is quicker than a scatter of rows
        if state.divide:
            gradient.div_(self.world_size)
        self._set_steps(state.step - 1)  # the lookup below counts as a step
        with torch.enable_grad():
            rows = lookup(part.features).view(-1, dim)
        rows.backward(gradient)

    def _set_learning_rates(self, rates: list[float]) -> None:
        optimizer = self.module.fused_optimizer
        if rates == [group["lr"] for group in optimizer.param_groups]:
            return
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.step()  # hands the rates to the kernels, changes no weight

    def restore_steps(self) -> None:
        """Let the kernels count this module's training steps and nothing else."""
        self._set_steps(self.steps)

    def _set_steps(self, steps: int) -> None:
        for kernel in self.kernels:
            kernel.iter_cpu.fill_(steps)
            kernel.iter.fill_(steps)


def _inverse(order: Tensor) -> Tensor:
    """The permutation that undoes ``order``."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device, dtype=order.dtype)
    return inverse
