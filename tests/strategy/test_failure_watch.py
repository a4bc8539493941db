"""A rank that dies is named by every other one, whatever their training threads do; and the waits of a GPU for it end."""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.runtime import last_resort, nccl_groups
from lightning_freescale.runtime.errors import FreeScaleError
from lightning_freescale.runtime.process_groups import own_store
from lightning_freescale.strategy import control as control_module
from lightning_freescale.strategy import failure_watch
from lightning_freescale.strategy.control import Control
from lightning_freescale.strategy.failure_watch import FailureWatch
from lightning_freescale.strategy.peer_connections import PeerConnections
from tests import toy
from tests.ranks import RankFailed, run_ranks

PATIENCE = 20.0  # seconds; a loaded machine may be slow
TIMEOUT = 30.0  # seconds, of the strategy


def become(condition: Callable[[], Any]) -> bool:
    """Whether ``condition`` becomes true. This thread sleeps meanwhile, as one that waits for a GPU does."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def meet(name: str, rank: int, ranks: list[int]) -> None:
    store = own_store()
    store.set(f"{name}/{rank}", "here")
    store.wait([f"{name}/{other}" for other in ranks], timedelta(seconds=PATIENCE))


def connected(watch: FailureWatch, name: str, rank: int, ranks: list[int]) -> None:
    """Wait until the watches of ``ranks`` have their connections."""
    expected = len(ranks) - 1 if rank == 0 else 1
    assert become(lambda: len(watch._peers._welcome) == expected)
    meet(name, rank, ranks)


# ---- ranks that die ----------------------------------------------------------------------------------------------
def _die_one_after_another(rank: int, order: list[int]) -> None:
    dist.init_process_group("gloo")
    living = list(range(dist.get_world_size()))
    for victim in order:
        watch = FailureWatch(f"round {victim}", rank, TIMEOUT)
        if victim == 0:  # The others cannot meet: the store dies with rank 0, which has a connection to each of them.
            assert rank != 0 or become(lambda: len(watch._peers._welcome) == len(living) - 1)  # noqa: B023
        else:
            connected(watch, f"begin {victim}", rank, living)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        assert become(lambda: watch.explanation is not None)  # noqa: B023
        assert watch.explanation == f"rank {victim} has died"
        assert not watch.aborted
        living.remove(victim)
        if victim != 0:  # The store has died with rank 0.
            meet(f"end {victim}", rank, living)
        watch.close()


def test_every_rank_learns_which_one_has_died() -> None:
    order = [1, 3, 0]  # of 4, 3 and 2 ranks
    with pytest.raises(RankFailed) as failure:
        run_ranks(_die_one_after_another, world=4, args=(order,), every_error=True)
    assert failure.value.errors == dict.fromkeys(order, "died with exit code -9")


CONSEQUENCE = "rank 1 ended with AcceleratorError: CUDA error: an illegal memory access was encountered"


def _report_a_consequence_first(rank: int) -> None:
    dist.init_process_group("gloo")
    watch = FailureWatch("consequence", rank, TIMEOUT)
    connected(watch, "begin", rank, [0, 1, 2])
    if rank == 1:
        watch.publish(CONSEQUENCE)
    assert become(lambda: watch.explanation == CONSEQUENCE)  # The negative control: no other cause is known yet.
    assert watch.wait_for_explanation(0.1) == CONSEQUENCE
    assert not watch.misses_a_rank
    meet("known", rank, [0, 1, 2])
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    assert watch.wait_for_explanation(PATIENCE) == f"rank 2 has died; {CONSEQUENCE}"
    assert watch.misses_a_rank
    meet("end", rank, [0, 1])
    watch.close()
    assert watch.wait_for_explanation(PATIENCE) == f"rank 2 has died; {CONSEQUENCE}"  # Errors after the end need it.


def test_the_death_of_a_rank_explains_an_error_of_cuda_that_was_reported_before_it() -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(_report_a_consequence_first, world=3, every_error=True)
    assert failure.value.errors == {2: "died with exit code -9"}


def _end_in_order(rank: int, world: int) -> list[str | None]:
    dist.init_process_group("gloo")
    found: list[str | None] = []
    for name, pauses in (("rank 0 first", [0.0, 0.2, 0.4]), ("rank 0 last", [0.4, 0.2, 0.0])):
        watch = FailureWatch(name, rank, TIMEOUT)
        connected(watch, f"begin {name}", rank, list(range(world)))
        time.sleep(pauses[rank])
        watch.close()
        meet(f"end {name}", rank, list(range(world)))
        found.append(watch.explanation)
    short = FailureWatch("short", rank, TIMEOUT)  # It ends while the ranks connect.
    short.close()
    found.append(short.explanation)
    rude = FailureWatch("rude", rank, TIMEOUT)
    connected(rude, "begin rude", rank, list(range(world)))
    if rank == 1:
        rude._explain = lambda text: None  # type: ignore[method-assign] # A process that has ended explains nothing.
        rude._peers.forget()  # The connection ends as if the process had.
    else:
        assert become(lambda: rude.explanation is not None)
    found.append(rude.explanation)
    meet("end rude", rank, list(range(world)))
    return found


def test_ranks_that_end_at_different_times_give_no_alarm() -> None:
    for rank, found in enumerate(run_ranks(_end_in_order, world=3, args=(3,))):
        assert found[:3] == [None, None, None]
        assert rank == 1 or found[3] == "rank 1 has died"  # the negative control: without a goodbye there is an alarm


def _keep_a_fork(rank: int) -> None:
    dist.init_process_group("gloo")
    watch = FailureWatch("fork", rank, TIMEOUT)
    connected(watch, "begin", rank, [0, 1])
    if rank == 1:
        if (worker := os.fork()) == 0:  # As a worker of a DataLoader, it lives longer than its parent.
            time.sleep(2 * PATIENCE)
            os._exit(0)
        own_store().set("worker", str(worker))
        os.kill(os.getpid(), signal.SIGKILL)
    assert become(lambda: watch.explanation is not None)
    assert watch.explanation == "rank 1 has died"
    os.kill(int(own_store().get("worker")), signal.SIGKILL)  # Raises an error if the worker has ended.


def test_forked_processes_do_not_hide_a_death() -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(_keep_a_fork, every_error=True)
    assert list(failure.value.errors) == [1]


def test_strangers_are_not_taken_for_ranks() -> None:
    peers = PeerConnections(0, TIMEOUT)
    port = peers._listen()
    for data in (b"", b"short", b"x" * 40):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(data)
            assert become(lambda: peers.lost(0.0) == [] and peers._ranks)
    assert become(lambda: peers.lost(0.0) == [] and not peers._ranks)
    peers.close()


# ---- the waits of a GPU ------------------------------------------------------------------------------------------
class FakeBackend:
    """NCCL's part of a group, as far as the watch uses it."""

    def __init__(self, error: str = "SUCCESS"):
        self.error, self.aborted = error, threading.Event()

    def get_error(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.error)

    def abort(self) -> None:
        self.aborted.set()


class GoingWatch(FailureWatch):
    """The watch of a training thread that makes progress all the time, however busy the machine is."""

    steps = itertools.count()

    @property
    def progress(self) -> int:
        return next(self.steps)

    @progress.setter
    def progress(self, value: int) -> None:
        pass


def _watch_with(device: str, backend: FakeBackend, key: str, kind: type[FailureWatch] = FailureWatch) -> FailureWatch:
    failure_watch.GRACE_SECONDS, failure_watch.NAMING_SECONDS, failure_watch.WATCH_SECONDS = 1.0, 0.2, 0.1
    return kind(key, 0, TIMEOUT, torch.device(device), lambda: [backend])  # It is the only one with this key.


def _abort_after_the_grace_period(rank: int) -> None:
    dist.init_process_group("gloo")
    cpu, going, stuck, late = (FakeBackend() for _ in range(4))
    watches = [
        _watch_with("cpu", cpu, f"{rank}/cpu"),
        _watch_with("cuda", going, f"{rank}/going", GoingWatch),
        _watch_with("cuda", stuck, f"{rank}/stuck"),
        _watch_with("cuda", late, f"{rank}/late"),
    ]
    control = Control(timedelta(seconds=TIMEOUT))
    control._watch = watches[2]
    assert control.gather(rank) == [0, 1]
    for watch in watches[:3]:
        watch.publish("rank 7 has died")
    late.error = "TIMEOUT"
    begin = time.monotonic()
    while not (stuck.aborted.is_set() and late.aborted.is_set()) and time.monotonic() < begin + PATIENCE:
        time.sleep(0.05)
    assert time.monotonic() - begin >= 1.0
    assert [cpu.aborted.is_set(), going.aborted.is_set(), stuck.aborted.is_set()] == [False, False, True]
    assert watches[2].aborted
    assert late.aborted.is_set()
    assert watches[3].explanation == "a transfer of NCCL took longer than the timeout on rank 0"
    meet("aborted", rank, [0, 1])
    for way_on in (lambda: control.gather(rank), lambda: control.agree(None), control.open, control.check_losses):
        with pytest.raises(FreeScaleError, match=r"waited for .*; rank 7 has died"):
            way_on()
    control.close()  # Does not wait for anything.
    with pytest.raises(FreeScaleError, match="rank 7 has died"):
        control.gather(rank)  # The weights stay invalid after the end of the run.
    meet("end", rank, [0, 1])
    for watch in watches[:2]:
        watch.close(abort=True)  # A rank is missing at the end.
    assert become(going.aborted.is_set)
    assert not cpu.aborted.is_set()


def test_nccl_is_aborted_after_the_grace_period_and_only_on_cuda() -> None:
    run_ranks(_abort_after_the_grace_period)


def _stay_stuck(rank: int) -> None:
    dist.init_process_group("gloo")
    failure_watch.LEAST_EXIT_SECONDS, failure_watch.EXIT_FACTOR = 0.5, 0.0
    watch = _watch_with("cuda", FakeBackend(), "stuck")
    watch.publish("rank 7 has died")
    time.sleep(PATIENCE)
    watch.close()


def test_a_process_that_stays_stuck_ends_itself(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(_stay_stuck, world=1)
    assert failure.value.errors == {0: "died with exit code 1"}
    assert "rank 0: rank 7 has died\nThe process ends itself" in capfd.readouterr().err


class AbortInStep(L.Callback):
    """Calls ``action`` in the third step."""

    def __init__(self, action: Callable[[Control], None]):
        self.action = action

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        if trainer.global_step == 2:
            self.action(trainer.strategy.control)


def _fit_with_abort(folder: str, checkpoint: str, action: Callable[[Control], None]) -> str:
    """Train and save every step, until the abort ends it. Returns the error and its notes."""
    saves = L.pytorch.callbacks.ModelCheckpoint(
        dirpath=folder, every_n_train_steps=1, save_top_k=-1, save_on_exception=True
    )
    strategy = FreeScaleStrategy(timeout=TIMEOUT, checkpoint=checkpoint)  # type: ignore[arg-type]
    trainer = toy.trainer(strategy, 2, enable_checkpointing=True, callbacks=[AbortInStep(action), saves])
    with pytest.raises(RuntimeError) as failure:
        trainer.fit(toy.Model(), toy.loader())
    trainer.save_checkpoint(f"{folder}/afterwards.ckpt")  # Only logs why nothing is written.
    return "\n".join([str(failure.value), *getattr(failure.value, "__notes__", [])])


def _fit_and_abort(rank: int, folder: str) -> str:
    def abort(control: Control) -> None:  # What the watch does.
        assert control._watch is not None
        control._watch.explanation, control._watch.aborted = "rank 7 has died", True

    return _fit_with_abort(folder, "file", abort)


def _fit_and_wait_for_the_device(rank: int, folder: str) -> None:
    backend = FakeBackend()

    def watch_as_on_cuda(key: str, rank: int, timeout: float, device: Any) -> FailureWatch:
        return FailureWatch(key, rank, timeout, torch.device("cuda"), lambda: [backend])

    def wait(control: Control) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        assert backend.aborted.wait(PATIENCE)  # The training thread waits as for a kernel of NCCL.

    control_module.FailureWatch = watch_as_on_cuda  # type: ignore[assignment,misc]
    assert "rank 1 has died" in _fit_with_abort(folder, "sharded", wait)


def test_no_checkpoint_is_written_after_the_abort(tmp_path: Path) -> None:
    for error in run_ranks(_fit_and_abort, args=(str(tmp_path),)):
        assert "rank 7 has died" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=0-step=1.ckpt", "epoch=0-step=2.ckpt"]


def test_a_training_thread_that_waits_for_the_device_comes_out(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(_fit_and_wait_for_the_device, args=(str(tmp_path),), every_error=True)
    assert failure.value.errors == {1: "died with exit code -9"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=0-step=1.ckpt", "epoch=0-step=2.ckpt"]


# ---- NCCL's groups ----------------------------------------------------------------------------------------------
def test_all_communicators_are_aborted_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_groups, "_aborted", threading.Event())
    at_exit: list[Any] = []
    monkeypatch.setattr(nccl_groups.atexit, "register", at_exit.append)
    both = threading.Barrier(2, timeout=PATIENCE)  # Each abort waits for the kernels of the other communicator.
    done: list[int] = []
    backends = [SimpleNamespace(abort=lambda: done.append(both.wait())) for _ in range(2)]
    nccl_groups.abort_all(backends)
    assert become(lambda: sorted(done) == [0, 1])
    assert at_exit == [nccl_groups._limit_the_end]


def test_the_end_of_the_interpreter_has_a_limit_after_an_abort(capfd: pytest.CaptureFixture[str]) -> None:
    if (child := os.fork()) == 0:
        nccl_groups.END_SECONDS = 0.2
        atexit._clear()  # what belongs to the process of the test
        atexit.register(
            time.sleep, PATIENCE
        )  # It is called after what the abort registers, as the end of the groups is.
        last_resort.name_crashes("rank 1: rank 0 has died")
        nccl_groups.abort_all([FakeBackend()])
        atexit._run_exitfuncs()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    message = capfd.readouterr().err
    assert "Timeout (0:00:00.18" in message  # It is followed by the positions of the threads.
    assert message.endswith(
        "rank 1: rank 0 has died\nThe end of the process takes longer than 0.2 s. The process ends itself.\n"
    )


def test_errors_that_nobody_handles_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(nccl_groups, "_aborted", threading.Event())
    monkeypatch.setattr(nccl_groups, "_limits", [0.05])
    monkeypatch.setattr(nccl_groups, "GUARD_SECONDS", 0.01)
    monkeypatch.setattr(nccl_groups, "end_process", ended.append)
    monkeypatch.setattr(nccl_groups, "nccl_backends", lambda: [FakeBackend(), FakeBackend("COMM_ERROR")])
    nccl_groups._guard()
    assert ended == ["NCCL reports COMM_ERROR, and nothing has ended the wait within 0 s"]


def test_the_users_variables_of_nccl_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    names = list(nccl_groups.FAILURE_DEFAULTS)
    started: list[float] = []
    monkeypatch.setattr(nccl_groups, "_start_guard", started.append)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", object, raising=False)

    def values(handling: str | None, torchrun: bool) -> list[str | None]:
        for name in names:
            monkeypatch.delenv(name, raising=False)
        if handling is not None:
            monkeypatch.setenv(names[0], handling)
        monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: torchrun)
        nccl_groups.leave_failures_to_us(5.0)
        return [os.environ.get(name) for name in names]

    assert values(None, torchrun=False) == [None] * len(names)  # This torch has not what the watch needs.
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeBackend)
    assert values(None, torchrun=False) == ["0", "100", "0", "0"]
    assert values("1", torchrun=True) == ["0", "100", "0", "0"]  # torchrun has set it, not the user
    assert started == [5.0, 5.0]
    assert values("1", torchrun=False)[0] == "1"
    assert values("3", torchrun=True)[0] == "3"
    assert started == [5.0, 5.0]
    for name in names:
        monkeypatch.delenv(name)
