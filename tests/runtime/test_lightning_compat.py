"""The private names of Lightning that the package uses exist and behave as described, in both namespaces."""

from __future__ import annotations

import importlib
import operator
import os
import re
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_freescale
from lightning_freescale.runtime import lightning_compat as compat
from lightning_freescale.runtime.bounded import within
from tests.ranks import run_ranks

BATCHES = 6
# An attribute of a Trainer, a loop or a connector that starts with one underscore.
PRIVATE = re.compile(r"\b(?:trainer|fit_loop|epoch_loop|loop|connector|logger_connector)\._(?!_)\w+")


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def pl(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(request.param)


class Loader:
    """Yields single numbers, and has a state."""

    def __init__(self) -> None:
        self.opened = 0
        self.loaded: list[Any] = []

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.opened += 1
        return iter(torch.arange(BATCHES, dtype=torch.float32).view(-1, 1))

    def state_dict(self) -> dict[str, int]:
        return {"opened": self.opened}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded.append(state)


def make_model(pl: Any) -> Any:
    class Model(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            compat.set_logged_batch_size(compat.train_results(self.trainer), 1 if batch_idx else 10)
            self.log("seen", batch.sum(), on_step=True, on_epoch=True, prog_bar=True)
            return self.layer(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Model()


def make_trainer(pl: Any, callback: Any, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 2,
        "callbacks": [callback],
    }
    return pl.Trainer(**(defaults | options))


def test_all_private_names_exist(pl: Any) -> None:
    class Look(pl.Callback):  # type: ignore[misc]
        found: list[str] = []  # noqa: RUF012 - one use

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            self.found += [
                name for name in compat.private_names() if operator.attrgetter(name)(trainer) is not NotImplemented
            ]

    look = Look()
    make_trainer(pl, look, limit_train_batches=1).fit(make_model(pl), Loader())
    assert look.found == list(compat.private_names())
    assert len(look.found) > 10


def test_progress_loaders_and_logged_values(pl: Any) -> None:
    loader, seen = Loader(), []

    class Follow(pl.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            opened = loader.opened
            trainer.fit_loop._combined_loader_states_to_load = [{"opened": 7}]
            trainer.fit_loop._restarting = True  # As after a checkpoint was loaded.
            compat.restore_train_loaders(trainer, opened=lambda: False)
            trainer.fit_loop._restarting = False
            assert loader.opened == opened

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            assert not compat.current_batch_is_processed(trainer)
            assert compat.batch_limit(trainer, loader) == 4
            assert compat.batch_limit(trainer, Loader()) == float("inf")
            assert not compat.takes_dataloader_iter(trainer)
            assert compat.transfer_hook_owner(trainer, "transfer_batch_to_device") is module

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert compat.current_batch_is_processed(trainer)
            assert compat.logging_step(trainer) == batch_idx
            assert compat.should_update_logs(trainer) == bool(batch_idx % 2)
            seen.append(batch.item())
            results = compat.train_results(trainer)
            (metric,) = results.values()
            assert compat.logged_name(results, metric, on_step=True) == "seen_step"
            assert compat.logged_value(results, metric, on_step=True) == batch.item()
            compat.update_progress_bar_metrics(trainer, {"more": 5.0})
            assert trainer.progress_bar_metrics["more"] == 5.0

    trainer = make_trainer(pl, Follow(), limit_train_batches=4)
    trainer.fit(make_model(pl), loader)
    assert seen == [0, 1, 2, 3]
    assert loader.loaded == [{"opened": 7}]
    # The first batch has the weight 10 and the others 1, as set_logged_batch_size says.
    assert trainer.callback_metrics["seen_epoch"].item() == pytest.approx((1 + 2 + 3) / 13)
    assert compat.timeout_of(trainer.strategy) is None
    assert compat.timeout_of(pl.strategies.DDPStrategy()).total_seconds() > 0


def test_a_logged_value_is_moved_only_to_another_device(pl: Any) -> None:
    results = importlib.import_module(f"{pl.__name__}.trainer.connectors.logger_connector.result")
    collection = results._ResultCollection(training=True)
    moved: list[Any] = []

    class Value(results._ResultMetric):  # type: ignore[misc]
        def to(self, *args: Any, **options: Any) -> Any:
            moved.append(args[0])
            return super().to(*args, **options)

    def log(value: float) -> None:
        collection.log("training_step", "loss", torch.tensor(value), on_epoch=True, batch_size=2)

    log(1.0)
    (metric,) = collection.values()
    metric.__class__ = Value
    log(2.0)
    assert len(moved) == 1  # Lightning moves it in every call
    compat.keep_logged_values_in_place(collection)
    compat.keep_logged_values_in_place(collection)
    for value in (3.0, 6.0):
        log(value)
    assert len(moved) == 2
    assert float(metric.compute()) == 3.0
    collection.to(torch.device("meta"))
    assert metric.value.is_meta
    assert len(moved) == 3


def test_loaders_that_were_opened_start_again(pl: Any) -> None:
    loader = Loader()
    counts = []

    class Restart(pl.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            counts.append(loader.opened)
            compat.restore_train_loaders(trainer, opened=lambda: True)  # There is no state, so nothing happens.
            counts.append(loader.opened)
            trainer.fit_loop._combined_loader_states_to_load = [{"opened": 7}]
            compat.restore_train_loaders(trainer, opened=lambda: True)
            counts.append(loader.opened)

    make_trainer(pl, Restart()).fit(make_model(pl), loader)
    assert counts[0] == counts[1] < counts[2]


def test_the_checkpoint_of_a_resume_can_be_chosen(pl: Any, tmp_path: Path) -> None:
    begins, asked = [], []

    class Begin(pl.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            begins.append(trainer.global_step)

    trainer = make_trainer(pl, Begin(), limit_train_batches=2)
    trainer.fit(make_model(pl), Loader())
    trainer.save_checkpoint(tmp_path / "two.ckpt")

    def choose(path: Any, weights_only: bool | None) -> Any:
        asked.append(path)
        return tmp_path / "two.ckpt"

    trainer = make_trainer(pl, Begin(), max_epochs=2, limit_train_batches=2)
    compat.choose_checkpoint(trainer, choose)
    trainer.fit(make_model(pl), Loader())
    assert (asked, begins) == ([None], [0, 2])
    trainer.fit(make_model(pl), Loader(), ckpt_path=tmp_path / "two.ckpt")  # Only one fit is asked about.
    assert (asked, begins) == ([None], [0, 2, 2])


def test_callbacks_before_and_after_all_others(pl: Any, tmp_path: Path) -> None:
    steps: list[Any] = []

    class Save(pl.callbacks.ModelCheckpoint):  # type: ignore[misc]
        def on_train_batch_end(self, *args: Any) -> None:
            steps.append("save")

    class OwnTrainer(pl.Trainer):  # type: ignore[misc]
        pass

    options = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "callbacks": [Save(tmp_path)],
    }
    trainer = OwnTrainer(accelerator="cpu", devices=1, max_epochs=1, limit_train_batches=2, **options)
    last = compat.add_callback(trainer, on_train_batch_end=lambda trainer, module, out, batch, i: steps.append(i))
    first = compat.add_callback(trainer, first=True, on_train_batch_end=lambda *_: steps.append("first"))
    trainer.fit(make_model(pl), Loader())
    assert steps == ["first", "save", 0, "first", "save", 1]
    for callback in (first, last):
        compat.remove_callback(trainer, callback)
        assert callback not in trainer.callbacks
    assert any(isinstance(other, Save) for other in trainer.callbacks)


def test_batches_that_count_as_done_are_not_trained(pl: Any) -> None:
    trained = []

    class Shift(pl.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            trained.append(batch_idx)
            if batch_idx == 0:
                compat.shift_batch_progress(trainer, 3)

    make_trainer(pl, Shift()).fit(make_model(pl), Loader())
    assert trained == [0, 4, 5]


def test_steps_that_fetch_their_batches(pl: Any) -> None:
    found = []

    class Look(pl.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            found.append(compat.takes_dataloader_iter(trainer))

    model = make_model(pl)

    class Fetching(type(model)):  # type: ignore[misc]
        def training_step(self, dataloader_iter: Any) -> torch.Tensor:
            return self.layer(next(dataloader_iter)[0]).sum()

    make_trainer(pl, Look(), limit_train_batches=2).fit(Fetching(), Loader())
    assert found == [True]


def test_the_owner_of_a_transfer_hook_can_be_the_data_module(pl: Any) -> None:
    class Data(pl.LightningDataModule):  # type: ignore[misc]
        def train_dataloader(self) -> Loader:
            return Loader()

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

    owners = []

    class Look(pl.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            owners.append(compat.transfer_hook_owner(trainer, "on_after_batch_transfer"))

    data = Data()
    make_trainer(pl, Look(), limit_train_batches=1).fit(make_model(pl), datamodule=data)
    assert owners == [data]


def test_signals_are_handled_by_the_replacement(pl: Any) -> None:
    received: list[int] = []
    trained = []
    requeue = []

    class Signal(pl.Callback):  # type: ignore[misc]
        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            requeue.append(
                compat.replace_signal_handlers(trainer, lambda number, _: received.append(number), lambda *_: None)
            )

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trained.append(batch_idx)
            os.kill(os.getpid(), signal.SIGTERM)
            assert not trainer.received_sigterm
            if batch_idx == BATCHES - 1:
                compat.mark_sigterm_received(trainer)
                assert trainer.received_sigterm
                trainer._signal_connector.received_sigterm = False

    trainer = make_trainer(pl, Signal())
    trainer.fit(make_model(pl), Loader())
    assert trained == list(range(BATCHES))
    assert received == [signal.SIGTERM] * BATCHES
    own = type(trainer._signal_connector)._slurm_sigusr_handler_fn
    assert requeue[0].__func__ is own  # Lightning's own handler, and not the replacement.


def test_signals_are_forwarded_to_the_processes_of_a_launcher() -> None:
    class Launcher:
        sent: list[signal.Signals] = []  # noqa: RUF012 - one use

        def kill(self, signum: signal.Signals) -> None:
            self.sent.append(signum)

    compat.forward_signal(None, signal.SIGTERM)
    compat.forward_signal(Launcher(), int(signal.SIGTERM))
    assert Launcher.sent == [signal.SIGTERM]


class Unmovable(torch.Tensor):
    """A value on a device that has failed."""

    def to(self, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError


@pytest.mark.parametrize("hides", [True, False])
def test_errors_while_an_exception_is_handled_do_not_hide_it(pl: Any, hides: bool) -> None:
    """With ``hides=False``, the negative control: the error of the end is what the user sees."""

    class Failing(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer._logger_connector._callback_metrics["late"] = torch.zeros(1).as_subclass(Unmovable)
            compat.log_errors_of_handling(trainer, lambda error: hides and isinstance(error, ZeroDivisionError))
            raise KeyError("the cause")

        def on_exception(self, *_: Any) -> None:
            if hides:
                raise ZeroDivisionError

    trainer = make_trainer(pl, Failing())
    with pytest.raises(KeyError if hides else ZeroDivisionError):
        trainer.fit(make_model(pl), Loader())
    owners = (trainer.fit_loop, trainer._logger_connector, *trainer.callbacks)
    assert not any({"teardown", "on_exception"} & vars(owner).keys() for owner in owners)


def prepare_data_alone(rank: int, limited: bool) -> str:
    """Rank 1 never comes to the barrier. Return what becomes of rank 0."""
    torch.distributed.init_process_group("gloo")
    pl = importlib.import_module("lightning.pytorch")
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu")
    connector = importlib.import_module(type(trainer._data_connector).__module__)
    lightnings_own = connector._InfiniteBarrier
    compat.limit_prepare_data(trainer, timedelta(seconds=0.5))
    compat.limit_prepare_data(trainer, timedelta(seconds=0.5) if limited else None)
    assert (connector._InfiniteBarrier is lightnings_own) is not limited
    if rank == 1:
        time.sleep(2)
        return "did not come"
    try:
        within(1.5, connector._InfiniteBarrier().__enter__)
    except TimeoutError:
        return "waits"
    except (RuntimeError, ConnectionError):  # the second if connecting alone takes that long
        return "failed"
    return "went on"


@pytest.mark.parametrize("limited", [True, False])
def test_the_ranks_meet_within_the_timeout_before_prepare_data(limited: bool) -> None:
    """Without the limit, which is the negative control, a rank waits without end for one that has died."""
    assert run_ranks(prepare_data_alone, args=(limited,)) == ["failed" if limited else "waits", "did not come"]


def test_no_other_file_uses_a_private_attribute_of_a_trainer() -> None:
    package = Path(lightning_freescale.__file__).parent
    uses = [
        f"{path.relative_to(package)}: {match.group()}"
        for path in sorted(package.rglob("*.py"))
        for match in PRIVATE.finditer(path.read_text())
    ]
    assert {use.split(":")[0] for use in uses} == {"runtime/lightning_compat.py"}, uses
