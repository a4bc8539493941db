"""Copies in host memory: a restart resumes from them, bit for bit, also after the loss of a host.

Folders are the memories of hosts. A training crashes after step 5, with copies of steps 2 and 4.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_freescale import CheckpointError, ConfigurationError, FreeScaleStrategy, HostCopies
from lightning_freescale.runtime.log import logger
from lightning_freescale.strategy.checkpoints import device_copy, storage
from lightning_freescale.strategy.checkpoints.host_copies import file_exchange, finding, writing
from lightning_freescale.strategy.checkpoints.host_copies.host_folder import HostFolder
from lightning_freescale.strategy.checkpoints.host_copies.hosts import Hosts
from lightning_freescale.strategy.control import Control
from tests import toy
from tests.ranks import RankFailed, run_ranks

EVERY, CRASH_STEP, STEPS = 2, 5, 8
RUN = "a training"


class Crash(Exception):
    """Ends the training after a step."""


class Record(pl.Callback):
    """Notes the step and the weights with which the training begins, and raises :class:`Crash` after a step.

    Args:
        waits: wait after every step until the copy is complete. Without it, the short steps of this test may leave one out.
    """

    def __init__(self, crash: int | None, waits: bool):
        self.crash, self.waits = crash, waits
        self.begin: tuple[int, dict[str, Tensor]] = (-1, {})

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.begin = trainer.global_step, toy.weights(module)

    def on_train_batch_start(self, trainer: pl.Trainer, *batch: Any) -> None:
        if self.waits:
            trainer.strategy.finish_saves()  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: pl.Trainer, *batch: Any) -> None:
        if trainer.global_step == self.crash:
            raise Crash


class Messages(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def train(
    rank: int,
    world: int,
    host: Path,
    crash: int | None = None,
    run: str = RUN,
    resume: Path | None = None,
    saves: Path | None = None,
    waits: bool = True,
) -> dict[str, Any]:
    """Train, and return where the training began, its final weights, which files have come from other hosts, and the log."""
    host.mkdir(parents=True, exist_ok=True)
    file_exchange.PART_BYTES = 1000  # Each file travels in many parts.
    device_copy.SMALL_BYTES = 0  # The tables are copied beside the training, as large ones are.
    fetched: list[str] = []
    exchange = finding.exchange_files

    def noted(transfers: Any, *rest: Any) -> Any:
        fetched.extend(transfer.name for transfer in transfers)
        return exchange(transfers, *rest)

    finding.exchange_files = noted
    log = Messages()
    logger.addHandler(log)
    pl.seed_everything(1, verbose=False)
    record = Record(crash, waits)
    callbacks: list[pl.Callback] = [record]
    if saves is not None:
        callbacks.append(pl.callbacks.ModelCheckpoint(saves, every_n_train_steps=3, save_top_k=-1))
    strategy = FreeScaleStrategy(
        host_copies=HostCopies(every_n_steps=EVERY, folder=str(host), run=run),
        balance="off",
        prioritize=True,
        timeout=20,
        embedding_optimizer={"optimizer": "adagrad"},
    )
    trainer = toy.trainer(strategy, world, max_steps=STEPS, callbacks=callbacks, enable_checkpointing=saves is not None)
    model = toy.Model()
    try:
        trainer.fit(model, toy.loader(), ckpt_path=resume)
    except Crash:
        return {}
    finally:
        finding.exchange_files = exchange
        logger.removeHandler(log)
    return {"begin": record.begin, "end": toy.weights(model), "fetched": fetched, "log": "\n".join(log.messages)}


def copies(host: Path, run: str = RUN) -> HostFolder:
    return HostFolder(str(host), run)


# ---- a training that comes to its end, and one that crashes, on two hosts -------------------------------------------------
def first_trainings(rank: int, root: Path) -> dict[str, Any]:
    undisturbed = train(rank, 2, root / "undisturbed" / f"host{rank}", saves=root / "saves")
    train(rank, 2, root / "crashed" / f"host{rank}", crash=CRASH_STEP)
    return undisturbed


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("first")
    return root, run_ranks(first_trainings, args=(root,))[0]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_each_part_is_on_two_hosts(first: tuple[Path, dict[str, Any]]) -> None:
    root, _ = first
    for rank in range(2):
        place = copies(root / "crashed" / f"host{rank}")
        assert list(place.listing()) == [2, 4]
        for step, files in place.listing().items():
            assert sorted(files) == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
            assert place.undamaged(step, files, sorted(files)) == sorted(files)
        assert not list((root / "undisturbed" / f"host{rank}").iterdir())  # It has come to its end.


# ---- two ranks go on -------------------------------------------------------------------------------------------------
def several_resumes(rank: int, root: Path) -> dict[str, dict[str, Any]]:
    """Resume from the copies in the folders of ``root``, one after the other."""
    saves = {3: root / "saves" / "epoch=0-step=3.ckpt", 6: root / "saves" / "epoch=0-step=6.ckpt"}
    options: dict[str, dict[str, Any]] = {
        "older checkpoint": {"resume": saves[3]},
        "newer checkpoint": {"resume": saves[6]},
        "other run": {"run": "another training"},
    }
    cases = ["same", "lost host", "one damaged", "both damaged", *options]
    results = {case: train(rank, 2, root / case / f"host{rank}", **options.get(case, {})) for case in cases}
    FreeScaleStrategy._load_table_optimizer = lambda self, entry: None  # type: ignore[method-assign]
    return results | {"control": train(rank, 2, root / "control" / f"host{rank}")}


CASES = ("same", "lost host", "one damaged", "both damaged", "older checkpoint", "newer checkpoint", "other run")


@pytest.fixture(scope="module")
def resumed(
    first: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, dict[str, Any]]]]:
    """The folder of the resumed trainings, and for each rank and case what :func:`train` has returned."""
    folder = tmp_path_factory.mktemp("resumed")
    shutil.copytree(first[0] / "saves", folder / "saves")
    for case in (*CASES, "control"):
        shutil.copytree(first[0] / "crashed", folder / case)
    shutil.rmtree(folder / "lost host" / "host1")
    for host in (
        folder / "one damaged" / "host1",
        folder / "both damaged" / "host0",
        folder / "both damaged" / "host1",
    ):
        flip_a_bit(Path(copies(host).of_step(4)) / "__1_0.distcp")
    return folder, run_ranks(several_resumes, args=(folder,), timeout=120)


def test_two_ranks_resume(first: tuple[Path, dict[str, Any]], resumed: tuple[Path, list[Any]]) -> None:
    folder, (found, _) = resumed
    begins = {case: result["begin"][0] for case, result in found.items()}
    assert begins == dict.fromkeys(("same", "lost host", "one damaged", "older checkpoint", "control"), 4) | {
        "both damaged": 2,
        "newer checkpoint": 6,
        "other run": 0,
    }
    for case in CASES:
        assert toy.same(found[case]["end"], first[1]["end"]), case
        assert copies(folder / case / "host0").listing().keys() == ({2, 4} if case == "other run" else set()), case
    assert not toy.same(found["control"]["end"], first[1]["end"])  # The state of the tables' optimizer counts.


def test_only_files_that_a_host_lacks_are_fetched(resumed: tuple[Path, list[Any]]) -> None:
    _, (found, _) = resumed
    assert found["same"]["fetched"] == []
    assert sorted(found["lost host"]["fetched"]) == [".metadata", "__1_0.distcp", "meta.pt"]
    assert found["one damaged"]["fetched"] == ["__1_0.distcp"]


def test_the_log_says_what_was_chosen_and_why(resumed: tuple[Path, list[Any]]) -> None:
    folder, (found, of_rank_1) = resumed
    log = {case: result["log"] for case, result in found.items()}
    assert "the training resumes from that of step 4, because there is no checkpoint" in log["same"]
    assert "Two copies take" in log["same"]
    damaged = copies(folder / "one damaged" / "host1").of_step(4)
    assert f"{damaged} is damaged: __1_0.distcp has" in of_rank_1["one damaged"]["log"]
    assert "that of step 4 cannot be used. No host has an undamaged __1_0.distcp" in log["both damaged"]
    assert f"because {folder}/saves/epoch=0-step=3.ckpt has step 3" in log["older checkpoint"]
    assert "epoch=0-step=6.ckpt has step 6, so the training resumes from it" in log["newer checkpoint"]
    assert "The training starts anew" in log["other run"]


# ---- another number of ranks -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("world", [1, 3])
def test_another_number_of_ranks(
    first: tuple[Path, dict[str, Any]], resumed: tuple[Path, list[Any]], tmp_path: Path, world: int
) -> None:
    shutil.copytree(first[0] / "crashed", tmp_path / "crashed")
    if world == 1:
        shutil.rmtree(tmp_path / "crashed" / "host1")
    results = run_ranks(resume_on, world=world, args=(world, tmp_path / "crashed"))
    for result in results:
        assert result["begin"][0] == 4
        assert toy.same(result["begin"][1], resumed[1][0]["same"]["begin"][1])
    # Of three ranks, the third one has an empty memory. It needs the rows at the end, which rank 1 of two had.
    assert sorted(results[0]["fetched"]) == ([] if world == 1 else [".metadata", "__1_0.distcp", "meta.pt"])


def resume_on(rank: int, world: int, root: Path) -> dict[str, Any]:
    return train(rank, world, root / f"host{rank}")


# ---- copies that fail or take long -----------------------------------------------------------------------------------
def dies_while_copying(rank: int, root: Path) -> None:
    exchange, calls = writing.exchange_files, []

    def exchange_or_die(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 and rank == 1:
            os._exit(9)
        return exchange(*args)

    writing.exchange_files = exchange_or_die
    train(rank, 2, root / f"host{rank}")


def too_large(rank: int, root: Path) -> None:
    shutil.disk_usage = lambda path: SimpleNamespace(free=1000)  # type: ignore[assignment]
    train(rank, 2, root / f"host{rank}")


def test_a_rank_that_dies_leaves_the_copy_before(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 failed:\ndied with exit code 9"):
        run_ranks(dies_while_copying, args=(tmp_path,))  # Rank 0 is killed, too.
    results = run_ranks(resume_on, args=(2, tmp_path))
    assert [result["begin"][0] for result in results] == [EVERY, EVERY]


def test_a_copy_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(too_large, args=(tmp_path,), every_error=True)
    for text in failure.value.errors.values():
        assert CheckpointError.__name__ in text
        assert f"{tmp_path}/host" in text
        assert "has 1,000 bytes free, and the next copy needs" in text


def slow_copies(rank: int, root: Path) -> list[int]:
    """Train while the first copy waits until step 5 is done. Return the steps of the copies."""
    write, go, steps = writing.write, threading.Event(), []

    def write_late(place: Any, step: int, *args: Any, **named: Any) -> None:
        assert go.wait(30)
        steps.append(step)
        write(place, step, *args, **named)

    end = Record.on_train_batch_end

    def release(self: Record, trainer: pl.Trainer, *batch: Any) -> None:
        end(self, trainer, *batch)
        if trainer.global_step == 5:
            go.set()
            trainer.strategy.finish_saves()  # type: ignore[attr-defined]

    Record.on_train_batch_end = release  # type: ignore[method-assign]
    writing.write = write_late
    train(rank, 2, root / f"host{rank}", waits=False)
    return steps


def test_training_does_not_wait_for_a_slow_copy(tmp_path: Path) -> None:
    for steps in run_ranks(slow_copies, args=(tmp_path,)):
        assert steps[:2] == [2, 6]


def exchanges(rank: int, root: Path) -> list[str]:
    """Send two files to rank 1: as they are, after a change, and to a folder that does not exist. Return the errors."""
    torch.distributed.init_process_group("gloo")
    control = Control(timedelta(seconds=20))
    file_exchange.PART_BYTES = 1000
    files = {name: storage.checksum(str(root / "host0" / name)) for name in ("a", "b")}
    transfers = [file_exchange.FileTransfer(0, 1, name) for name in files]
    errors = []
    for folder in ("host1", "host1", "nowhere"):
        error = file_exchange.exchange_files(transfers, str(root / ("host0" if rank == 0 else folder)), files, control)
        errors.append("" if error is None else f"{type(error).__name__}: {error}")
        control.gather(None)  # Before it, rank 1 has not compared.
        if rank == 0:
            flip_a_bit(root / "host0" / "b")
    return errors


def test_errors_of_files_do_not_hold_other_ranks_up(tmp_path: Path) -> None:
    for host in ("host0", "host1"):
        (tmp_path / host).mkdir()
    for name, size in (("a", 0), ("b", 3500)):
        (tmp_path / "host0" / name).write_bytes(os.urandom(size))
    before = (tmp_path / "host0" / "b").read_bytes()
    of_sender, of_receiver = run_ranks(exchanges, args=(tmp_path,))
    assert of_sender == ["", "", ""]
    assert of_receiver[0] == ""
    assert "host1/b has arrived with CRC" in of_receiver[1]
    assert of_receiver[2].startswith("FileNotFoundError")
    assert (tmp_path / "host1" / "a").read_bytes() == b""
    assert len((tmp_path / "host1" / "b").read_bytes()) == len(before)


# ---- parts without ranks ---------------------------------------------------------------------------------------------
def test_the_peer_of_a_rank_is_on_another_host() -> None:
    assert Hosts("aaabb", 3).peers() == {0: 3, 1: 4, 2: 3, 3: 0, 4: 1}
    assert Hosts("abc", 0).peers() == {0: 1, 1: 2, 2: 0}
    assert Hosts("aa", 0).peers() == {}
    assert writing.bytes_on_hosts([1, 2, 4, 8, 16], Hosts("aaabb", 0)) == {0: 7 + 24, 3: 24 + 7}


def test_each_host_gets_each_file_once() -> None:
    files = {"x": [10, 0], "y": [10, 0]}
    held = [{"x", "y"}, {"x", "y"}, set(), set()]
    transfers = finding.plan_transfers([[], [], ["x", "y"], ["x"]], held, files, Hosts("aabb", 0))
    assert transfers == [(0, 2, "x"), (1, 2, "y")]


def test_the_name_of_a_training() -> None:
    assert HostCopies(run="mine").name_of_run({"TORCHELASTIC_RUN_ID": "x"}) == "mine"
    assert HostCopies().name_of_run({"TORCHELASTIC_RUN_ID": "x", "SLURM_JOB_ID": "7"}) == "x"
    assert (
        HostCopies().name_of_run({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"})
        == "slurm 7.0"
    )
    with pytest.raises(ConfigurationError, match="run=None"):
        HostCopies().name_of_run({"TORCHELASTIC_RUN_ID": "none"})
    with pytest.raises(ConfigurationError, match="every_n_steps=0"):
        HostCopies(every_n_steps=0)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere'\\): there is no such folder"):
        HostFolder(str(tmp_path / "nowhere"), RUN).open()
