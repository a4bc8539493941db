"""``freescale plan``: lengths from every kind of file, and known figures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_freescale.balance import CostModel
from lightning_freescale.cli.balance_outcomes import evaluate, global_batches
from lightning_freescale.cli.history_lengths import read_lengths
from lightning_freescale.cli.plan import main
from lightning_freescale.data.sources import open_source
from lightning_freescale.models.personal_tokens import PersonalTokens, attention_work
from lightning_freescale.runtime.errors import FreeScaleError, InputError
from tests.conftest import SHARED_DATA

EVENTS = {"ann": 5, "bob": 3, "cy": 9, "di": 1}


def write_csv(path: Path, events: dict[str, int]) -> Path:
    rows = [f"{user},{at},{at}" for user, count in events.items() for at in range(count)]
    path.write_text("user_id,item_id,timestamp\n" + "\n".join(rows) + "\n")
    return path


def write_text(path: Path, events: dict[str, int]) -> Path:
    path.write_text("".join(f"{user} {at}\n" for user, count in events.items() for at in range(count)))
    return path


def write_events(path: Path, events: dict[str, int]) -> Path:
    users = [user for user, count in events.items() for _ in range(count)]
    pq.write_table(pa.table({"user": users, "item": range(len(users)), "time": range(len(users))}), path)
    return path


def write_users(path: Path, events: dict[str, int]) -> Path:
    lists = [list(range(count)) for count in events.values()]
    pq.write_table(pa.table({"user": list(events), "item": lists, "time": lists}), path)
    return path


def write_nameless(path: Path, events: dict[str, int]) -> Path:
    lists = [list(range(count)) for count in events.values()]
    pq.write_table(pa.table({"item": lists, "time": lists}), path)
    return path


def write_folder(path: Path, events: dict[str, int]) -> Path:
    """Several files. A user's events may be in more than one of them."""
    folder = path.with_suffix("")
    folder.mkdir()
    write_events(folder / "a.parquet", {user: count // 2 for user, count in events.items() if count > 1})
    write_events(folder / "b.parquet", {user: count - count // 2 for user, count in events.items()})
    return folder


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("d.csv", write_csv),
        ("d.txt", write_text),
        ("events.parquet", write_events),
        ("users.parquet", write_users),
        ("nameless.parquet", write_nameless),
        ("folder.parquet", write_folder),
    ],
)
def test_lengths_of_every_kind_of_file(tmp_path: Path, name: str, write) -> None:
    assert sorted(read_lengths(open_source(write(tmp_path / name, EVENTS)))) == sorted(EVENTS.values())


def test_the_figures_of_a_known_batch() -> None:
    """Two ranks with two samples each. The first two samples are long."""
    lengths = np.array([8, 6, 2, 4])
    outcomes = {outcome.mode: outcome for outcome in evaluate(lengths, 2, 2, CostModel(1.0), batches=1)}
    (batch,) = global_batches(lengths, 4, 1, seed=0)
    heavy = max(batch[:2].sum(), batch[2:].sum())
    assert outcomes["random"].straggler == pytest.approx(1 - 10 / heavy)
    assert outcomes["random"].above_bound == pytest.approx(heavy / 10 - 1)
    assert outcomes["random"].speedup == 1
    fixed = outcomes["fixed"]  # 8 + 2 and 6 + 4
    assert (fixed.straggler, fixed.above_bound, fixed.tokens_mean, fixed.tokens_max) == (0, 0, 10, 10)
    assert fixed.sparsity == pytest.approx(1 - 20 / (2 * 8 + 2 * 6))
    assert fixed.speedup == pytest.approx(heavy / 10)


def test_batches_repeat_samples_only_if_there_are_too_few() -> None:
    lengths = np.arange(1000)
    drawn = np.concatenate(global_batches(lengths, 64, 20, seed=1))
    assert len(drawn) == len(set(drawn.tolist())) == 1000 // 64 * 64
    assert len(global_batches(lengths, 64, 3, seed=1)) == 3
    assert len(np.concatenate(global_batches(lengths, 4000, 2, seed=1))) == 8000


def test_the_straggler_shares_of_log_normal_lengths() -> None:
    """On 8 ranks with 32 samples each: about 42% with random, about 12% with zigzag, at most 0.10% with fixed."""
    lengths = np.minimum(np.random.default_rng(0).lognormal(7.3, 1.2, 2560), 21_000).astype(np.int64)
    outcomes = {o.mode: o for o in evaluate(lengths, 8, 32, CostModel(1.0, 1 / 2048), batches=10)}
    assert outcomes["random"].straggler == pytest.approx(0.42, abs=0.06)
    assert outcomes["zigzag"].straggler == pytest.approx(0.12, abs=0.05)
    assert outcomes["fixed"].straggler <= 0.001
    assert outcomes["variable"].above_bound <= 0.001
    assert outcomes["fixed"].speedup > 1.5


def test_the_command_prints_a_table_or_json_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    options = ["synthetic", "--ranks", "2,4", "--batch-size", "16", "--synthetic", "users=300", "--max-history", "100"]
    assert main([*options, "--plot", str(tmp_path / "out.png")]) == 0
    table = capsys.readouterr().out
    assert "300 histories of" in table
    assert "maximum 100" in table
    assert [line.split()[0] for line in table.splitlines() if " random " in line] == ["2", "4"]
    assert (tmp_path / "out.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert main([*options, "--json"]) == 0
    outcomes = json.loads(capsys.readouterr().out)
    assert [(o["ranks"], o["mode"]) for o in outcomes[:4]] == [
        (2, "random"),
        (2, "zigzag"),
        (2, "fixed"),
        (2, "variable"),
    ]
    assert f"{outcomes[0]['straggler']:.2%}" in table


def test_a_note_says_that_samples_are_repeated(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([str(write_csv(tmp_path / "d.csv", EVENTS)), "--ranks", "8", "--batch-size", "4"]) == 0
    captured = capsys.readouterr()
    assert "3 histories of" in captured.out  # one user has too few events to train on
    assert "3 users do not fill a global batch of 8 x 4 samples, so samples are drawn with repetition" in captured.err


@pytest.mark.parametrize("name", ["ml-latest-small.ratings.csv", "wikipedia-edits.txt"])
def test_real_files(name: str, capsys: pytest.CaptureFixture) -> None:
    path = SHARED_DATA / name
    if not path.exists():
        pytest.skip(f"{name} is not part of the package")
    assert main([str(path), "--ranks", "8", "--batch-size", "32", "--json"]) == 0
    outcomes = {o["mode"]: o for o in json.loads(capsys.readouterr().out)}
    assert outcomes["random"]["straggler"] > 0.3
    for mode in ("fixed", "variable"):
        assert outcomes[mode]["above_bound"] < 0.005
        assert outcomes[mode]["speedup"] > 1.4


def test_error_messages(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        main([str(tmp_path / "no.csv")])
    with pytest.raises(InputError, match="none of 2 users has 3 events or more"):
        main([str(write_csv(tmp_path / "d.csv", {"ann": 1, "bob": 2}))])
    with pytest.raises(FreeScaleError, match=r"--synthetic: .*'user'"):
        main(["synthetic", "--synthetic", "user=3"])
    with pytest.raises(FreeScaleError, match="'users': must be KEY=VALUE"):
        main(["synthetic", "--synthetic", "users"])
    with pytest.raises(FreeScaleError, match="--synthetic: Expecting value"):
        main(["synthetic", "--synthetic", "users=many"])
    with pytest.raises(SystemExit):
        main(["synthetic", "--ranks", "0"])


def test_the_costs_follow_personal_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With few recent events and many segments the cost is nearly linear, so that stragglers cost less."""
    data = str(write_csv(tmp_path / "events.csv", {f"user{n}": 3 + 40 * (n % 7) for n in range(64)}))
    options = [data, "--ranks", "4", "--batch-size", "4", "--batches", "4", "--crossover", "10"]
    tokens = "tokens=2,recent=8,refresh=4,segments=3"
    assert main([*options, "--json"]) == main([*options, "--json", "--personal-tokens", tokens]) == 0
    text = capsys.readouterr().out
    plain, cut = json.loads(text[: text.index("]") + 1]), json.loads(text[text.index("]") + 1 :])
    lengths = np.minimum(np.array([2 + 40 * (n % 7) for n in range(64)]), 21_000)
    squares = attention_work(PersonalTokens(2, 8, 4, 3))
    expected = evaluate(lengths, 4, 4, CostModel(linear=1.0, quadratic=0.1, squares=squares), 4)
    assert [row["straggler"] for row in cut if row["mode"] != "random"] == [
        found.straggler for found in expected if found.mode != "random"
    ]
    assert cut[0]["straggler"] < plain[0]["straggler"]
    assert main([*options, "--personal-tokens", tokens, "--link-gbps", "100", "--gpus", "4"]) == 0
    assert "PersonalTokens(tokens=2, recent=8, refresh=4, segments=3, random_cut=True)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*options, "--personal-tokens", "tokens=0"])
    assert "tokens must be at least 1, not 0" in capsys.readouterr().err
