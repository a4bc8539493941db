"""Histories whose next event depends on events long ago: generated ones, and those of a file."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class LongHistories:
    """Histories for training, and events to predict.

    Attributes:
        items: the events of each user in training, ``[L]`` int64 each.
        num_items: size of the catalogue.
        cases: for evaluation, the events before a target, ``[L]`` int64 each.
        targets: ``[len(cases)]``, the next event of each case.
    """

    items: list[Ints]
    num_items: int
    cases: list[Ints]
    targets: Ints

    def save(self, path: Path) -> None:
        """Write a NumPy file. It appears complete or not at all."""
        parts = {"targets": self.targets, "num_items": np.array(self.num_items)}
        for name, lists in (("items", self.items), ("cases", self.cases)):
            parts |= {name: np.concatenate(lists), f"{name}_lengths": np.array([len(own) for own in lists])}
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npz", delete=False) as file:
            np.savez_compressed(file, **parts)  # type: ignore[arg-type]
        Path(file.name).replace(path)

    @staticmethod
    def load(path: Path) -> LongHistories:
        with np.load(path) as parts:
            items, cases = (
                np.split(parts[name], np.cumsum(parts[f"{name}_lengths"])[:-1]) for name in ("items", "cases")
            )
            return LongHistories(items, int(parts["num_items"]), cases, parts["targets"])


@dataclass(frozen=True)
class EarlyTastes:
    """Users who show their tastes early and come back to them after many unrelated events.

    There are ``contexts``. In each, a user has one of ``tastes`` tastes, which is a group of ``group`` items. The first ``early``
    events of a user are items of the user's tastes, in random contexts. Then follow unrelated events: each is the successor of
    the event before with probability ``follow``, else a random one of the ``filler`` items. Between these are visits: the cue of
    a context, which is an item of its own, and then an item of the user's taste in this context. From one visit to the next are
    at least ``gap`` events. Training ends before the last visit. Evaluation ranks the item after the cue of the last visit,
    for the first ``evaluated`` users.

    With ``recent + refresh <= gap`` the recent events show the user's taste in no context, so a model that does not know the
    early events can only guess the taste.
    """

    users: int = 6000
    contexts: int = 4
    tastes: int = 16
    group: int = 8
    filler: int = 200
    follow: float = 0.5
    early: int = 24
    visits: int = 6
    gap: int = 32
    evaluated: int = 6000
    seed: int = 0

    @property
    def num_items(self) -> int:
        return self.contexts * (self.tastes * self.group + 1) + self.filler

    def generate(self) -> LongHistories:
        chance = np.random.default_rng(self.seed)
        successor = chance.permutation(self.filler)
        histories = [self._user(chance, successor) for _ in range(self.users)]
        chosen = histories[: self.evaluated]
        return LongHistories(
            [items[:-2] for items in histories],
            self.num_items,
            [items[:-1] for items in chosen],
            np.array([items[-1] for items in chosen]),
        )

    def _user(self, chance: np.random.Generator, successor: Ints) -> Ints:
        cues = self.contexts * self.tastes * self.group  # items: those of tastes, the cues, the filler
        taste = chance.integers(self.tastes, size=self.contexts)

        def liked(contexts: Ints) -> Ints:
            groups = contexts * self.tastes + taste[contexts]
            return groups * self.group + chance.integers(self.group, size=len(contexts))

        parts = [liked(chance.integers(self.contexts, size=self.early))]
        for context in chance.integers(self.contexts, size=chance.integers(2, self.visits + 1)):
            unrelated = chance.integers(self.filler, size=self.gap + chance.integers(self.gap // 2))
            for at in np.flatnonzero(chance.random(len(unrelated)) < self.follow):
                unrelated[at] = successor[unrelated[at - 1]] if at else unrelated[at]
            parts += [cues + self.contexts + unrelated, np.array([cues + context]), liked(np.array([context]))]
        return np.concatenate(parts)


def read_histories(path: Path, least: int, held_out: int, longest: int, evaluated: int) -> LongHistories:
    """The histories of a file of events. The last events of long histories are held out.

    Args:
        path: file of events.
        least: users with at least so many events are evaluated.
        held_out: the number of events that are held out of these users, at most a fifth of their events.
        longest: only the latest events of each sample are used, at most so many.
        evaluated: about the number of cases that are kept, every second one, or every third, and so on.
    """
    from lightning_freescale.data.histories import Histories  # they need the package's C++ core
    from lightning_freescale.data.preprocess import preprocess
    from lightning_freescale.data.sources import open_source

    with tempfile.TemporaryDirectory() as folder:
        preprocess(open_source(path), Path(folder))
        mapped = Histories.load(Path(folder))
        items, offsets, count = np.array(mapped.items), np.array(mapped.offsets), len(mapped.item_ids)
    train, cases, targets = [], [], []
    for start, end in itertools.pairwise(offsets):
        own = items[start:end]
        out = min(held_out, len(own) // 5) if len(own) >= least else 0
        train.append(own[: len(own) - out][-longest:])
        for at in range(len(own) - out, len(own)):
            cases.append(own[:at][-longest:])
            targets.append(own[at])
    step = max(1, len(cases) // evaluated)
    return LongHistories([own for own in train if len(own) > 1], count, cases[::step], np.array(targets)[::step])
