"""The table "what is prioritized, what is synchronous, what is refused, and why" of ``docs/exchange.md``.

The rows follow from the constants with which the code decides. ``python -m lightning_freescale.strategy.exchange_table`` writes
the table into the page, and a test compares the two.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from torchrec.distributed.types import ShardingType

from lightning_freescale.embedding import support, table_optimizer
from lightning_freescale.embedding.plan import CPU_TABLE_TYPES
from lightning_freescale.strategy.refusals import PRECISIONS, WEIGHT_AVERAGING

BEGIN, END = (
    "<!-- exchange: made by `python -m lightning_freescale.strategy.exchange_table` -->",
    "<!-- end of exchange -->",
)


class Treatment(StrEnum):
    """How a kind of table or a setting is treated."""

    PRIORITIZED = "prioritized"
    SYNCHRONOUS = "synchronous"
    REFUSED = "refused"


class ExchangeDecision(NamedTuple):
    """One row of the table."""

    subject: str
    treatment: Treatment
    reason: str


def decisions() -> list[ExchangeDecision]:
    """All rows, in the order of the page."""
    return [*_collections(), *_modules(), *_tables(), *_settings()]


def _names(kinds: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in kinds)


def _collections() -> list[ExchangeDecision]:
    every = [kind.value for kind in ShardingType]
    prioritized = support.PRIORITIZED_SHARDINGS
    others = _names([kind for kind in every if kind not in prioritized])
    kernels = _names(support.PRIORITIZED_KERNELS)
    return [
        ExchangeDecision(f"`EmbeddingCollection`: {_names(prioritized)}", Treatment.PRIORITIZED, "exact row by row"),
        ExchangeDecision(f"`EmbeddingBagCollection`: {_names(prioritized)}", Treatment.PRIORITIZED, "exact bag by bag"),
        ExchangeDecision(
            f"`EmbeddingCollection`: {others}",
            Treatment.SYNCHRONOUS,
            "the prioritized exchange does not know these shardings, or TorchRec has none of them for sequences",
        ),
        ExchangeDecision(
            f"`EmbeddingBagCollection`: {others}",
            Treatment.SYNCHRONOUS,
            "the prioritized exchange does not know these shardings; data-parallel tables are not exchanged",
        ),
        ExchangeDecision("weighted bags with mean pooling", Treatment.SYNCHRONOUS, support.WEIGHTED_MEANS),
        ExchangeDecision(f"compute kernels {kernels}", Treatment.PRIORITIZED, "rows are read where they are"),
        ExchangeDecision(
            f"compute kernels {_names(support.NOT_COMPARED_KERNELS)}, and on CUDA bags with the sharding "
            f"{_names(support.NOT_COMPARED_BAGS)}",
            Treatment.SYNCHRONOUS,
            "no run on a GPU has compared the two exchanges",
        ),
        ExchangeDecision(
            "tables with another compute kernel",
            Treatment.SYNCHRONOUS,
            "the prioritized exchange does not know how their rows are read",
        ),
        ExchangeDecision(
            "collections with zero-collision ids",
            Treatment.PRIORITIZED,
            "ids are inserted in the order of the synchronous run",
        ),
    ]


def _modules() -> list[ExchangeDecision]:
    found = [
        ExchangeDecision(
            f"a module that is {reason}", Treatment.SYNCHRONOUS, "rows that were sent in advance could be out of date"
        )
        for reason in support.FOUND_IN_TRAINING
    ]
    return [*found, ExchangeDecision('one rank, with `prioritize="auto"`', Treatment.SYNCHRONOUS, support.SINGLE_RANK)]


def _tables() -> list[ExchangeDecision]:
    compared, moments = table_optimizer.compared_optimizers(), table_optimizer.MOMENT_OPTIMIZERS
    optimizers = [name for name in compared if name not in moments]
    cuda_only = _names([name for name in compared if name in moments])
    types = [kind.name for kind in CPU_TABLE_TYPES if kind.name != "FP32"]
    return [
        ExchangeDecision(
            f"optimizers {_names(optimizers)}, and on CUDA {cuda_only}",
            Treatment.PRIORITIZED,
            "the update of a row depends on that row alone",
        ),
        ExchangeDecision(f"optimizers {cuda_only} on CPU", Treatment.REFUSED, "FBGEMM has no CPU kernel for them"),
        ExchangeDecision(
            f"optimizers {_names(table_optimizer.NOT_COMPARED_OPTIMIZERS)}",
            Treatment.REFUSED,
            "FBGEMM has them on CUDA only, and no run on a GPU has compared them",
        ),
        ExchangeDecision(
            f"`weight_decay` with optimizers other than {_names(table_optimizer.MOMENT_OPTIMIZERS)}",
            Treatment.REFUSED,
            "FBGEMM ignores it",
        ),
        ExchangeDecision("`max_gradient`", Treatment.PRIORITIZED, "it limits each gradient before they are summed"),
        ExchangeDecision(f"tables of type {_names(types)}", Treatment.SYNCHRONOUS, "their updates round"),
        ExchangeDecision(
            f"tables of types other than {_names([kind.name for kind in CPU_TABLE_TYPES])} on CPU",
            Treatment.REFUSED,
            "FBGEMM has no training kernel for them",
        ),
        ExchangeDecision("frozen tables", Treatment.PRIORITIZED, "their learning rate is 0"),
    ]


def _settings() -> list[ExchangeDecision]:
    return [
        ExchangeDecision(support.ACCUMULATION, Treatment.SYNCHRONOUS, support.ACCUMULATION_REASON),
        ExchangeDecision(
            "gradient accumulation with zero-collision ids, or with a batch size that varies by feature",
            Treatment.REFUSED,
            "the gradients of the tables cannot be held",
        ),
        ExchangeDecision(
            "`plan`, `constraints`, `topology` with zero-collision ids",
            Treatment.REFUSED,
            "their rows are placed by bucket",
        ),
        ExchangeDecision(
            "`data_parallel` tables of an `EmbeddingCollection` on CPU",
            Treatment.REFUSED,
            "FBGEMM's kernel would pool the rows",
        ),
        ExchangeDecision(
            f"`precision` other than {_names(PRECISIONS)}",
            Treatment.REFUSED,
            "loss scaling cannot reach the tables, or the tables would not follow the precision",
        ),
        ExchangeDecision(_names(WEIGHT_AVERAGING), Treatment.REFUSED, "they would have to average sharded tables"),
        ExchangeDecision(
            "a layer that shares its weights with a table", Treatment.REFUSED, "sharding would separate the two"
        ),
    ]


def markdown() -> str:
    """The table, with its marks."""
    rows = [f"| {row.subject} | {row.treatment} | {row.reason} |" for row in decisions()]
    return "\n".join([BEGIN, "", "| what | treatment | why |", "| --- | --- | --- |", *rows, "", END])


def with_table(page: str) -> str:
    """The text of a page with the table of today between the marks."""
    before, rest = page.split(BEGIN)
    return before + markdown() + rest.split(END)[1]


if __name__ == "__main__":
    path = Path(__file__).resolve().parents[2] / "docs" / "exchange.md"
    path.write_text(with_table(path.read_text()))
