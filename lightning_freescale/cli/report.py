"""``freescale report RUN_DIR [RUN_B]``: shows where the time of a run went, as tables, as an HTML page and as a trace."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from lightning_freescale.bubbles.analysis import Analysis, analyse
from lightning_freescale.bubbles.attribution import PARTS, label
from lightning_freescale.bubbles.comparison import comparison_sentence
from lightning_freescale.bubbles.picture import COLORS
from lightning_freescale.bubbles.records import RECORDS_FOLDER, read_run
from lightning_freescale.bubbles.spans import ENGINE
from lightning_freescale.bubbles.trace import write_trace

MAX_DRAWN = (
    3000  # ranks times steps whose spans are in the page; if there are more, it has the slowest steps and a sample
)
_PLACEHOLDER = "/*DATA*/"


# ---- terminal ------------------------------------------------------------------------------------------------------
def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text. The first column is left-aligned, the others are right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def describe(analysis: Analysis) -> str:
    """The figures of one run, for the terminal."""
    wall, bubble = analysis.ms("wall"), analysis.ms("bubble")
    parts = [["", "ms", "of the step", "of the bubble"], ["step", f"{wall:.2f}", "", ""]]
    parts += [["useful work", f"{wall - bubble:.2f}", f"{1 - bubble / wall:.1%}", ""]]
    parts += [["bubble", f"{bubble:.2f}", f"{bubble / wall:.1%}", ""]]
    for part in PARTS:
        lost = analysis.ms(part)
        parts.append([f"  {part}", f"{lost:.2f}", f"{lost / wall:.1%}", f"{lost / bubble:.0%}" if bubble else ""])
    bubbles = analysis.bubbles
    ranks = [["rank", "useful ms", *(f"{part} ms" for part in PARTS), "tokens/step"]]
    for rank in range(analysis.run.ranks):
        means = [bubbles.useful[rank].mean(), *(bubbles.parts[part][rank].mean() for part in PARTS)]
        ranks.append(
            [str(rank), *(f"{1e3 * mean:.2f}" for mean in means), f"{bubbles.counts['tokens'][rank].mean():.0f}"]
        )
    more = [[tag, _format(tag, value)] for tag, value in analysis.summary.items() if not tag.startswith("bubble/")]
    return "\n\n".join(
        [
            f"{analysis.name}\n{analysis.title}",
            table(parts),
            table(ranks),
            table(more),
            "\n".join(f"* {advice.text}" for advice in analysis.advice),
        ]
    )


def compare(first: Analysis, second: Analysis) -> str:
    """One sentence about two runs, and their figures side by side, for the terminal."""
    rows = [["", "A", "B", "B / A"]]
    for name in ("wall", "useful", "bubble", *PARTS):
        a, b = first.ms(name), second.ms(name)
        title = {"wall": "step", "useful": "useful work"}.get(name, name if name == "bubble" else f"  {name}")
        rows.append([f"{title} ms", f"{a:.2f}", f"{b:.2f}", f"{b / a:.2f}" if a else ""])
    tags = first.summary.keys() & second.summary.keys() - {f"bubble/{name}" for name in ("total", *PARTS)}
    for tag in sorted(tags):
        a, b = first.summary[tag], second.summary[tag]
        rows.append([tag, _format(tag, a), _format(tag, b), f"{b / a:.2f}" if a else ""])
    runs = f"A  {first.name}\n   {first.title}\nB  {second.name}\n   {second.title}"
    return f"{comparison_sentence(first, second)}\n\n{runs}\n\n{table(rows)}"


def _format(tag: str, value: float) -> str:
    if tag in _SHARES or tag.startswith("bubble/"):
        return f"{value:.1%}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


_SHARES = {"balance/sparsity", "embedding/collision_rate", "comm/overlap", "throughput/mfu"}


# ---- page ----------------------------------------------------------------------------------------------------------
def page(analyses: Sequence[Analysis]) -> str:
    """A self-contained HTML page: it loads nothing from the network and no other file."""
    data = {
        "runs": [_page_data(analysis) for analysis in analyses],
        "sentence": comparison_sentence(*analyses) if len(analyses) == 2 else "",
        "colors": COLORS,
        "parts": PARTS,
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    template = resources.files("lightning_freescale.cli").joinpath("report.html").read_text()
    return template.replace(_PLACEHOLDER, text)


def _page_data(analysis: Analysis) -> dict[str, Any]:
    """The data of one run for the page's script; times are in ms."""
    bubbles = analysis.bubbles
    means = {part: (1e3 * values.mean(axis=0)).round(3).tolist() for part, values in bubbles.parts.items()}
    drawn = _drawn(analysis)
    return {
        "name": analysis.name,
        "title": analysis.title,
        "ranks": analysis.run.ranks,
        "summary": {tag: [value, _format(tag, value)] for tag, value in analysis.summary.items()},
        "headline": {name: round(analysis.ms(name), 3) for name in ("wall", "useful", "bubble", *PARTS)},
        "steps": analysis.indices,
        "wall": (1e3 * bubbles.wall.mean(axis=0)).round(3).tolist(),
        "parts": means,
        "by_rank": {
            "useful": (1e3 * bubbles.useful.mean(axis=1)).round(3).tolist(),
            **{part: (1e3 * values.mean(axis=1)).round(3).tolist() for part, values in bubbles.parts.items()},
        },
        "histograms": {name: analysis.histograms(name) for name in ("lengths", "costs")},
        "typical": analysis.typical,
        "worst": analysis.worst,
        "advice": [advice.text for advice in analysis.advice],
        "drawn": {index: _gantt(analysis, index) for index in drawn},
    }


def _drawn(analysis: Analysis) -> list[int]:
    """Indices of the steps whose spans are in the page."""
    indices, budget = analysis.indices, max(2, MAX_DRAWN // analysis.run.ranks)
    if len(indices) <= budget:
        return indices
    slowest = np.argsort(-analysis.bubbles.wall.max(axis=0), kind="stable")[: budget // 2]
    between = np.linspace(0, len(indices) - 1, budget - len(slowest) - 1).astype(int)
    return sorted({analysis.typical, *(indices[i] for i in slowest), *(indices[i] for i in between)})


def _gantt(analysis: Analysis, index: int) -> list[dict[str, Any]]:
    """One step: per rank its start, its end and its spans ``[label, start, end]``, in ms from the start of the first rank."""
    steps = analysis.run.step(index)
    origin = min(step.start for step in steps)

    def ms(moment: float) -> float:
        return round(1e3 * (moment - origin), 4)

    return [
        {
            "start": ms(step.start),
            "end": ms(step.end),
            "engine": [[name, ms(start), ms(end)] for start, end, name in labelled],
            "background": [[s.kind.value, ms(s.start), ms(s.end), s.track] for s in step.spans if s.track != ENGINE],
        }
        for step, labelled in zip(steps, label(steps), strict=True)
    ]


# ---- command -------------------------------------------------------------------------------------------------------
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``freescale report``."""
    parser.add_argument(
        "run", metavar="RUN_DIR", type=Path, help="log folder of a run; it contains the folder freescale/"
    )
    parser.add_argument(
        "other", metavar="RUN_B", type=Path, nargs="?", help="log folder of a second run to compare with"
    )
    parser.add_argument("--html", metavar="OUT", type=Path, help="write an HTML page that shows every step")
    parser.add_argument(
        "--trace",
        metavar="OUT",
        type=Path,
        help=f"where to write the trace of the first run, for Perfetto (default: RUN_DIR/{RECORDS_FOLDER}/trace.json)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report, and write the traces and, with ``--html``, the page."""
    analyses = [analyse(read_run(path)) for path in (args.run, args.other) if path is not None]
    print("\n\n".join([*map(describe, analyses), *([compare(*analyses)] if len(analyses) == 2 else [])]))
    print()
    for analysis, chosen in zip(analyses, (args.trace, None), strict=False):
        trace = chosen or analysis.run.path / RECORDS_FOLDER / "trace.json"
        write_trace(analysis.run, trace)
        print(f"trace: {trace} (open it in https://ui.perfetto.dev or chrome://tracing)")
    if args.html is not None:
        args.html.parent.mkdir(parents=True, exist_ok=True)
        args.html.write_text(page(analyses))
        print(f"page: {args.html}")
    return 0


def main(argv: Sequence[str], prog: str = "freescale report") -> int:
    """Run ``freescale report``; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=prog, description="Show where the time of a run went, and how to make it faster."
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))
