"""Generates README tables, ``docs/results.md``, ``docs/paper.md``, ``benchmarks/README.md`` and more from ``benchmarks/results``.

    python -m benchmarks.tables [--check]

No figure in these tables is typed by hand. README.md and the other pages of docs/ keep their
text: only the blocks between ``<!-- results: ... -->`` and ``<!-- end of results -->`` are replaced. The other two pages are
generated completely.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.results import load_results
from benchmarks.harness.tables import (
    benchmarks_page,
    failures_block,
    paper_page,
    personal_tokens_block,
    readme_block,
    results_blocks,
    versions_block,
    zero_collision_block,
)
from benchmarks.harness.tables.markdown import fill_block

ROOT = Path(__file__).resolve().parents[1]


def pages() -> dict[Path, str]:
    """The text that each generated file should have."""
    stored = load_results()
    readme, results = ROOT / "README.md", ROOT / "docs" / "results.md"
    text = results.read_text()
    for name, block in results_blocks.blocks(stored).items():
        text = fill_block(results.name, text, name, block)
    ids = ROOT / "docs" / "zero_collision.md"
    ids_text = ids.read_text()
    for name, block in zero_collision_block.blocks(stored).items():
        ids_text = fill_block(ids.name, ids_text, name, block)
    failures, checkpoints = ROOT / "docs" / "failures.md", ROOT / "docs" / "checkpoints.md"
    filled = {failures: failures.read_text(), checkpoints: checkpoints.read_text()}
    for page, blocks in (
        (failures, failures_block.failures(stored)),
        (checkpoints, failures_block.checkpoints(stored)),
    ):
        for name, block in blocks.items():
            filled[page] = fill_block(page.name, filled[page], name, block)
    models = ROOT / "docs" / "models.md"
    models_text = models.read_text()
    for name, make in (
        ("personal tokens, quality", personal_tokens_block.quality),
        ("personal tokens, serving", personal_tokens_block.serving),
    ):
        models_text = fill_block(models.name, models_text, name, make(stored))
    install = ROOT / "docs" / "install.md"
    return {
        **filled,
        install: fill_block(install.name, install.read_text(), "versions", versions_block.block(stored)),
        models: models_text,
        ids: ids_text,
        readme: fill_block(readme.name, readme.read_text(), "", readme_block.block(stored)),
        results: text,
        ROOT / "benchmarks" / "README.md": benchmarks_page.page(stored),
        ROOT / "docs" / "paper.md": paper_page.page(stored),
    }


def stale() -> dict[Path, str]:
    """The generated files that differ from the results, and what they should contain."""
    return {path: text for path, text in pages().items() if not path.exists() or path.read_text() != text}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file would change")
    arguments = parser.parse_args()
    changed = stale()
    for path, text in changed.items():
        if arguments.check:
            print(f"{path.relative_to(ROOT)} differs from the stored results; run python -m benchmarks.tables")
        else:
            path.write_text(text)
            print(f"{path.relative_to(ROOT)}: written")
    return int(arguments.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
