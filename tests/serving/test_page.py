"""The pages of the documentation from a file of events to served recommendations: their code and commands run as written."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from lightning_freescale.cli import serve
from lightning_freescale.cli.main import main
from tests.ranks import run_ranks
from tests.serving.client import serving

DOCS = Path(__file__).resolve().parents[2] / "docs"
USERS = 21


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def write_events(path: Path) -> None:
    """The lines that the page shows, and more users. Each goes around a circle of items, from a start of its own."""
    rows = blocks("recommendations.md", "")[0].splitlines()
    for user in range(USERS):
        rows += [f"user-{user},film-{(user * 7 + at) % 30},{1000 * user + 60 * at}" for at in range(4 + user % 5)]
    path.write_text("\n".join(rows) + "\n")


def follow_the_page(rank: int, folder: str, code: str, commands: list[list[str]], own_program: str) -> list[int]:
    os.chdir(folder)
    os.environ["FREESCALE_CACHE"] = folder
    exec(compile(code, "docs/recommendations.md", "exec"), {})
    codes = [main(command) for command in commands]
    exec(compile(own_program, "docs/serving.md", "exec"), {})
    return codes


def test_from_a_file_of_events_to_served_recommendations(tmp_path: Path) -> None:
    """The code with fewer epochs, on one process; then the commands, in the order of the page."""
    pytest.importorskip("fastapi")
    code = "\n".join(blocks("recommendations.md", "python"))
    (own_program,) = blocks("serving.md", "python")
    code = code.replace("max_epochs=20", "max_epochs=1, accelerator='cpu', logger=False, enable_progress_bar=False")
    lines = [shlex.split(line) for block in blocks("recommendations.md", "bash") for line in block.splitlines()]
    commands = [words[1:] for words in lines if words[0] == "freescale"]
    assert [command[0] for command in commands] == ["recommend", "evaluate", "export", "recommend", "serve"]
    write_events(tmp_path / "events.csv")
    assert run_ranks(follow_the_page, 1, (str(tmp_path), code, commands[:-1], own_program)) == [[0, 0, 0, 0]]
    table = pyarrow.parquet.read_table(tmp_path / "recommendations.parquet")
    assert table.num_rows == 10 * (USERS + 2)
    with (tmp_path / "recommendations.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["item"] for row in rows] == table["item"].to_pylist()  # the exported model and the checkpoint agree
    wanted = [(row["item"], float(row["score"])) for row in rows if row["user"] == "ann"][:3]
    asked = [words for words in lines if words[0] == "curl"]
    model, *options = (
        str(tmp_path / word) if word in ("model.pt", "events.csv") else word for word in commands[-1][1:]
    )
    with serving(Path(model), tmp_path, *options) as client:
        for words in asked:
            assert words[1] == "http://127.0.0.1:8000/recommend"
            status, answer = client.post(json.loads(words[words.index("-d") + 1]))
            assert status == 200
            found = [(one["item"], one["score"]) for one in answer["recommendations"]]
            assert [item for item, _ in found] == [item for item, _ in wanted]
            assert [score for _, score in found] == pytest.approx([score for _, score in wanted], abs=1e-6)
        documented = re.findall(r"^\| `(freescale_\w+)` \|", (DOCS / "serving.md").read_text(), re.MULTILINE)
        assert documented == re.findall(r"^# HELP (\w+)", client.get("/metrics")[1], re.MULTILINE)
    assert len(asked) == 2


def test_every_option_of_the_server_is_documented() -> None:
    section = (DOCS / "serving.md").read_text().split("## Options")[1].split("\n## ")[0]
    documented = [name for row in re.findall(r"^\| (`--.*?) \|", section, re.MULTILINE) for name in row.split(", ")]
    actions: list[Any] = serve._parser("freescale serve")._actions
    options = [action.option_strings[-1] for action in actions if action.option_strings]
    assert [name.strip("`") for name in documented] == [name for name in options if name != "--help"]
