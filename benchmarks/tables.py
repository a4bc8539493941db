"""Write the tables of README.md, benchmarks/README.md and docs/paper.md from ``benchmarks/results``: figures are never typed.

    python -m benchmarks.tables [--check]

README.md keeps its text; what stands between the two marks is replaced. The other two are made whole.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # started as a file: let it find its neighbours
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.__main__ import TOOLS, scripts
from benchmarks.harness.tables import paper_page as paper
from benchmarks.harness.tables.claims import claims, command, kept

Row = Mapping[str, Any]

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- results: made by `python -m benchmarks.tables` -->"
END = "<!-- end of results -->"
SIDE_COLUMNS = {"bubble": "bubble_ms", "samples/s": "samples_per_second", "straggler %": "straggler_percent"}
EXPOSED = ("TrainPipelineBase", "TrainPipelineSparseDist", "freescale_sync", "prioritized")
ALL_OF_THEM = (
    "All results: [`benchmarks/README.md`](benchmarks/README.md). Beside the paper's: [`docs/paper.md`](docs/paper.md)."
)
NOT_ON_GPU = "The exposed exchange has not been measured on a GPU with this version yet."


def pages() -> dict[Path, str]:
    """What the generated files should hold."""
    readme = ROOT / "README.md"
    return {
        readme: between_marks(readme.read_text(), results_table()),
        ROOT / "benchmarks" / "README.md": benchmarks_page(),
        ROOT / "docs" / "paper.md": paper.page(kept()),
    }


# ---- markdown ---------------------------------------------------------------------------------------------------------
def markdown(rows: Sequence[Row]) -> str:
    """A table; columns in order of first appearance, a dash where a row has none."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(name, "-")) for name in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "\\|")


def between_marks(text: str, new: str) -> str:
    """``text`` with ``new`` between the marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md: has no {BEGIN if not begin else END}")
    return f"{before}{BEGIN}\n{new}\n{END}{after}"


# ---- README.md --------------------------------------------------------------------------------------------------------
def results_table() -> str:
    results = kept()
    table = markdown([claim._asdict() | {"command": f"`{claim.command}`"} for claim in claims(results)])
    on_gpu = any(
        found["benchmark"] == "exposed" and found["parameters"]["device"] != "cpu" for found in results.values()
    )
    notes = ALL_OF_THEM if on_gpu else f"{NOT_ON_GPU}\n{ALL_OF_THEM}"
    return f"{table}\n\n{notes}"


# ---- benchmarks/README.md ---------------------------------------------------------------------------------------------
def benchmarks_page() -> str:
    lines = ["<!-- made by `python -m benchmarks.tables` -->", "# Benchmarks", ""]
    lines += ["`python -m benchmarks` lists them. Each prints a table; `--json` prints JSON, `--output FILE` keeps it,"]
    lines += ["`--quick` takes seconds rather than minutes.", ""]
    for script in scripts():
        if script.name not in TOOLS:
            lines += [f"**{script.name}**: {script.claim}", "", "```bash", *script.commands, "```", ""]
    lines += ["# Results that are kept", ""]
    for name, found in kept().items():
        lines += [f"## [{name}](results/{name}.json)", "", *_head(found), ""]
        for title, rows in views(found):
            lines += [f"{title}:", "", markdown(rows), ""]
    return "\n".join(lines)


def _head(found: dict[str, Any]) -> Iterator[str]:
    machine = found["machine"]
    if isinstance(machine, dict):
        machine = ", ".join(f"{name.replace('_', ' ')} {_cell(value)}" for name, value in machine.items())
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    yield f"`{command(found)}`  "
    yield f"{found['date'][:10]}; {machine}; {versions}"


def views(found: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The tables of a result; what is shown elsewhere as a picture is left to it."""
    if found["benchmark"] == "quality":
        yield (
            "At the end of training",
            [row for name, part in found["data"].items() for row in _quality_rows(name, part)],
        )
        return
    if found["benchmark"] == "end_to_end":
        yield "Sides, ms a step", [_side_row(name, side) for name, side in found["sides"].items()]
        return
    if found["benchmark"] == "figures":
        yield "Collisions", found["collisions"]
        return
    if found["benchmark"] == "exposed":
        yield "Exposed ms a step, and what is gone of TorchRec's", [_exposed_row(row) for row in found["results"]]
        return
    for name, value in found.items():
        rows = [value] if name == "exchange" else value
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            flat = [{key: cell for key, cell in row.items() if not isinstance(cell, (dict, list))} for row in rows]
            yield name.capitalize(), flat


def _quality_rows(data: str, part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    values = {"last loss": part["loss"]["last"]} | {name: metric["last"] for name, metric in part["metrics"].items()}
    for name, sides in values.items():
        yield {"data": data, "figure": name, **{side: f"{value:.4f}" for side, value in sides.items()}}


def _side_row(name: str, side: dict[str, Any]) -> dict[str, Any]:
    row = {"side": name, "step": side["step_ms"]["mean"]}
    row |= {column: side[key] for column, key in SIDE_COLUMNS.items() if key in side}
    row |= side.get("parts_ms", {})
    return row | {f"of {baseline} gone": f"{share:.1%}" for baseline, share in side.get("gone", {}).items()}


def _exposed_row(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "collisions": f"{row['collisions']:.0%}",
        **{f"{name} ms": ms for name, ms in row["step_ms"].items() if name not in EXPOSED},
        **{side: row["exposed_ms"][side] for side in EXPOSED},
        "gone": f"{row['gone']['TrainPipelineBase']:.1%}",
    }


# ---- the command ------------------------------------------------------------------------------------------------------
def stale() -> list[Path]:
    """Generated files that are not what they should be."""
    return [path for path, text in pages().items() if not path.exists() or path.read_text() != text]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file would change")
    arguments = parser.parse_args()
    changed = stale()
    for path in changed:
        print(f"{path.relative_to(ROOT)}: {'is not what the results say' if arguments.check else 'written'}")
        if not arguments.check:
            path.write_text(pages()[path])
    return int(arguments.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
