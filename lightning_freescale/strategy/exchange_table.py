"""The table "what is prioritized, what is synchronous, what is refused, and why" of ``docs/exchange.md``, and the table of
optimizers of ``docs/options.md``.

The rows follow from the constants with which the code decides. ``python -m lightning_freescale.strategy.exchange_table`` writes
the tables into the pages, and a test compares them.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from torchrec.distributed.types import ShardingType

from lightning_freescale.embedding import support, table_optimizer
from lightning_freescale.embedding.grouped_update import GROUPED_OPTIMIZER
from lightning_freescale.embedding.plan import CPU_TABLE_TYPES
from lightning_freescale.strategy.refusals import PRECISIONS, WEIGHT_AVERAGING

BEGIN, END = (
    "<!-- exchange: made by `python -m lightning_freescale.strategy.exchange_table` -->",
    "<!-- end of exchange -->",
)
OPTIMIZERS_BEGIN, OPTIMIZERS_END = BEGIN.replace("exchange:", "optimizers:"), "<!-- end of optimizers -->"


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
        ExchangeDecision(
            "`FeatureProcessedEmbeddingBagCollection`", Treatment.SYNCHRONOUS, f"it has {support.FEATURE_PROCESSORS}"
        ),
        ExchangeDecision(
            "an `EmbeddingBagCollection` whose weights of ids need gradients",
            Treatment.REFUSED,
            "these gradients do not return from the owners of the rows",
        ),
        ExchangeDecision("weighted bags with mean pooling", Treatment.SYNCHRONOUS, support.WEIGHTED_MEANS),
        ExchangeDecision(f"compute kernels {kernels}", Treatment.PRIORITIZED, "rows are read where they are"),
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


def _optimizers() -> list[ExchangeDecision]:
    every, moments = list(table_optimizer.TABLE_OPTIMIZERS), list(table_optimizer.MOMENT_OPTIMIZERS)
    with_mode = table_optimizer.DECAY_MODE_OPTIMIZER
    modes = _names(list(table_optimizer.DECAY_MODES))
    no_decay = [name for name in every if name not in (*moments, with_mode)]
    return [
        ExchangeDecision(
            f"optimizers {_names(every)}", Treatment.PRIORITIZED, "the update of a row depends on that row alone"
        ),
        ExchangeDecision("other optimizers, such as `lars_sgd`", Treatment.REFUSED, "nothing has compared them"),
        ExchangeDecision(
            f"optimizers {_names(moments)} on CPU with a batch size that varies by feature",
            Treatment.REFUSED,
            "our update does not know such batches",
        ),
        ExchangeDecision(
            f"`weight_decay` with optimizers {_names(moments)}, and with `{with_mode}` and a `weight_decay_mode` ({modes})",
            Treatment.PRIORITIZED,
            "it changes the rows that are updated, and no others",
        ),
        ExchangeDecision(
            f"`weight_decay` with optimizers {_names(no_decay)}, and with `{with_mode}` without a `weight_decay_mode`",
            Treatment.REFUSED,
            "FBGEMM ignores it",
        ),
    ]


def _tables() -> list[ExchangeDecision]:
    types = [kind.name for kind in CPU_TABLE_TYPES if kind.name != "FP32"]
    return [
        *_optimizers(),
        ExchangeDecision("`max_gradient`", Treatment.PRIORITIZED, "it limits each gradient before they are summed"),
        ExchangeDecision(
            f"tables of type {_names(types)} on CPU",
            Treatment.PRIORITIZED,
            "an update is rounded once, to the nearest number",
        ),
        ExchangeDecision("tables of types other than `FP32` on CUDA", Treatment.SYNCHRONOUS, support.ROUNDED_AT_RANDOM),
        ExchangeDecision(
            f"tables of types other than {_names([kind.name for kind in CPU_TABLE_TYPES])} on CPU",
            Treatment.REFUSED,
            "FBGEMM has no training kernel for them",
        ),
        ExchangeDecision("frozen tables", Treatment.PRIORITIZED, "their learning rate is 0"),
    ]


def _settings() -> list[ExchangeDecision]:
    return [
        ExchangeDecision(support.ACCUMULATION, Treatment.PRIORITIZED, support.ACCUMULATION_REASON),
        ExchangeDecision(
            "gradient accumulation with zero-collision ids, feature processors, or a batch size that varies by feature",
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
            "bags of row-wise tables pooled by the mean beside tables with another sharding, or beside bags pooled by the sum "
            "that share a feature",
            Treatment.REFUSED,
            "TorchRec would divide the bags of the other tables",
        ),
        ExchangeDecision(
            f"`precision` other than {_names(PRECISIONS)}",
            Treatment.REFUSED,
            "loss scaling cannot reach the tables, or FBGEMM has no tables of that type",
        ),
        ExchangeDecision(_names(WEIGHT_AVERAGING), Treatment.REFUSED, "they would have to average sharded tables"),
        ExchangeDecision(
            "`ModelPruning` of tables", Treatment.REFUSED, "it would prune the parameters that sharding has replaced"
        ),
        ExchangeDecision(
            "a layer that shares its weights with a table", Treatment.REFUSED, "sharding would separate the two"
        ),
    ]


def markdown() -> str:
    """The table, with its marks."""
    rows = [f"| {row.subject} | {row.treatment} | {row.reason} |" for row in decisions()]
    return "\n".join([BEGIN, "", "| what | treatment | why |", "| --- | --- | --- |", *rows, "", END])


def optimizer_markdown() -> str:
    """The table of optimizers, with its marks."""
    lines = ["| optimizer | on CPU | on CUDA | state of a row | further keys |", "| --- | --- | --- | --- | --- |"]
    for name in table_optimizer.TABLE_OPTIMIZERS:
        moments = name in table_optimizer.MOMENT_OPTIMIZERS
        keys = ["betas", "weight_decay"] if moments else []
        if name == table_optimizer.DECAY_MODE_OPTIMIZER:
            modes = " or ".join(f'`"{mode}"`' for mode in table_optimizer.DECAY_MODES)
            keys = ["weight_decay", f"weight_decay_mode` ({modes})"]
        further = ", ".join(f"`{key}" if key.endswith(")") else f"`{key}`" for key in keys)
        cpu = "our update" if moments else "FBGEMM's"
        cuda = (
            "our update in the prioritized exchange of rows, FBGEMM's otherwise"
            if table_optimizer.TABLE_OPTIMIZERS[name] == GROUPED_OPTIMIZER
            else "FBGEMM's"
        )
        lines.append(f"| `{name}` | {cpu} | {cuda} | {table_optimizer.STATE_OF_A_ROW[name]} | {further} |")
    return "\n".join([OPTIMIZERS_BEGIN, "", *lines, "", OPTIMIZERS_END])


def with_tables(page: str) -> str:
    """The text of a page with the tables of today between the marks."""
    for begin, end, table in (
        (BEGIN, END, markdown()),
        (OPTIMIZERS_BEGIN, OPTIMIZERS_END, optimizer_markdown()),
    ):
        if begin in page:
            before, rest = page.split(begin)
            page = before + table + rest.split(end)[1]
    return page


if __name__ == "__main__":
    for name in ("exchange.md", "options.md"):
        path = Path(__file__).resolve().parents[2] / "docs" / name
        path.write_text(with_tables(path.read_text()))
