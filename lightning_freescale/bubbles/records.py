"""Steps on disk: ``RUN_DIR/freescale/rank_00000.jsonl``, one file per rank, one line per step.

The first line of a file, and one more for every resume, is a header. Times are microseconds from the start of the step, which
itself is in seconds on rank 0's clock, so that the files of all ranks fit together as they are.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from lightning_freescale.bubbles.timeline import Kind, Span, Step
from lightning_freescale.runtime.errors import InputError
from lightning_freescale.runtime.log import log_once

FOLDER = "freescale"
FORMAT = 1
_FLUSH = 64  # lines


def histogram(values: ArrayLike) -> list[int]:
    """Counts by power of two: element ``i`` counts the values from ``2**i`` up to ``2**(i + 1)``, the first also 0."""
    exponents = np.floor(np.log2(np.maximum(np.asarray(values, dtype=np.float64), 1.0))).astype(np.int64)
    return np.bincount(exponents).tolist() if exponents.size else []


def to_record(step: Step, offset: float = 0.0) -> dict[str, Any]:
    """A step as plain data; ``offset`` brings its rank's clock to rank 0's."""

    def micros(moment: float) -> float | None:
        return None if np.isnan(moment) else round(1e6 * (moment - step.start), 1)

    return {
        "step": step.index,
        "start": round(step.start + offset, 7),
        "wall": micros(step.end),
        "spans": [
            [span.kind.value, span.track, micros(span.start), micros(span.end), micros(span.arrived)]
            for span in step.spans
        ],
        "counts": {name: round(value, 6) for name, value in step.counts.items()},
        "histograms": {name: histogram(values) for name, values in step.arrays.items()},
    }


def from_record(record: Mapping[str, Any]) -> Step:
    """The step, on rank 0's clock, without the arrays of which only histograms were kept."""
    start = record["start"]

    def moment(micros: float | None) -> float:
        return np.nan if micros is None else start + micros / 1e6

    spans = tuple(Span(Kind(kind), track, *map(moment, times)) for kind, track, *times in record["spans"])
    return Step(record["step"], start, moment(record["wall"]), spans, dict(record["counts"]))


class RecordWriter:
    """Appends lines to one rank's file. Any thread may write; a run that dies loses the last few lines at most."""

    def __init__(self, path: Path, header: Mapping[str, Any]):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._file = path.open("a")
        self.write({"freescale": FORMAT, **header})
        self.flush()

    def write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, separators=(",", ":"))
        with self._lock:
            self._lines.append(line)
            full = len(self._lines) >= _FLUSH
        if full:
            self.flush()

    def flush(self) -> None:
        with self._lock:
            lines, self._lines = self._lines, []
            if lines and not self._file.closed:
                self._file.write("\n".join(lines) + "\n")
                self._file.flush()

    def close(self) -> None:
        self.flush()
        self._file.close()


@dataclass
class Run:
    """What a run has left: for each rank its header and its records by step, for the steps that all ranks have."""

    path: Path
    headers: list[dict[str, Any]]
    records: list[dict[int, dict[str, Any]]]

    @property
    def ranks(self) -> int:
        return len(self.records)

    @property
    def indices(self) -> list[int]:
        return sorted(self.records[0])

    def step(self, index: int) -> list[Step]:
        """One step on all ranks, on one clock."""
        return [from_record(records[index]) for records in self.records]

    def only(self, indices: Sequence[int]) -> Run:
        """The same run, of which these steps are known."""
        return replace(self, records=[{index: records[index] for index in indices} for records in self.records])


def rank_file(run_dir: Path, rank: int) -> Path:
    return run_dir / FOLDER / f"rank_{rank:05d}.jsonl"


def read_run(run_dir: Path) -> Run:
    """Read the records below ``run_dir``.

    Raises:
        InputError: if there are none, or a rank's are missing.
    """
    files = sorted((run_dir / FOLDER).glob("rank_*.jsonl"))
    if not files:
        found = (
            sorted({file.parents[1] for file in run_dir.glob(f"**/{FOLDER}/rank_*.jsonl")}) if run_dir.is_dir() else []
        )
        hint = f"; did you mean {', '.join(map(str, found[:3]))}?" if found else "; was the monitor on, with a logger?"
        raise InputError(f"{run_dir}: no {FOLDER}/rank_*.jsonl in it{hint}")
    headers, records = zip(*(_read(file) for file in files), strict=True)
    world = headers[0].get("world", len(files))
    if len(files) != world:
        raise InputError(
            f"{run_dir}: files of {len(files)} ranks where the run had {world}; copy {FOLDER}/ of every node here"
        )
    common = set.intersection(*(set(found) for found in records))
    if not common:
        raise InputError(f"{run_dir}: no step was recorded on all ranks; train for more steps")
    return Run(run_dir, list(headers), [{index: found[index] for index in common} for found in records])


def _read(file: Path) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    header: dict[str, Any] = {}
    records: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        try:
            record = json.loads(line)
        except ValueError:  # cut off by a crash, or by two runs in one folder
            log_once(f"{file}: line {number} is damaged and left out")
            continue
        if "freescale" in record:
            if record["freescale"] != FORMAT:
                raise InputError(f"{file}: format {record['freescale']}, this version reads {FORMAT}")
            header = record
        else:
            records[record["step"]] = record  # a step trained again after a resume counts as it was the last time
    return header, records


def add_histograms(histograms: Sequence[Sequence[int]]) -> list[int]:
    """Sum of histograms of different lengths."""
    total = [0] * max((len(counts) for counts in histograms), default=0)
    for counts in histograms:
        for index, count in enumerate(counts):
            total[index] += count
    return total
