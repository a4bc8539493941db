"""Recorded steps on disk: ``RUN_DIR/freescale/rank_00000.jsonl``, one file per rank, one line per step.

The first line of a file is a header; every resume adds another header. The start of a step is in seconds on rank 0's clock, so
that the files of all ranks can be compared. The other times of a step are in microseconds from its start.
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

from lightning_freescale.bubbles.record_checks import problem_of
from lightning_freescale.bubbles.spans import Kind, Span, Step
from lightning_freescale.runtime.errors import InputError
from lightning_freescale.runtime.log import log_once

RECORDS_FOLDER = "freescale"
RECORDS_FORMAT = 1
_LINES_PER_FLUSH = 64


def histogram(values: ArrayLike) -> list[int]:
    """Counts by power of two: element ``i`` counts the values in ``[2**i, 2**(i + 1))``. Element 0 also counts values below 1."""
    exponents = np.floor(np.log2(np.maximum(np.asarray(values, dtype=np.float64), 1.0))).astype(np.int64)
    return np.bincount(exponents).tolist() if exponents.size else []


def to_record(step: Step, offset: float = 0.0) -> dict[str, Any]:
    """A step as JSON data. ``offset`` is the seconds to add to its rank's clock to get rank 0's time."""

    def micros(moment: float) -> float | None:
        return None if np.isnan(moment) else round(1e6 * (moment - step.start), 1)

    return {
        "step": step.index,
        "start": round(step.start + offset, 7),
        "wall": micros(step.end),
        "spans": [
            [span.kind.value, span.track, micros(span.start), micros(span.end), micros(span.joined)]
            for span in step.spans
        ],
        "counts": {name: round(value, 6) for name, value in step.counts.items()},
        "histograms": {name: histogram(values) for name, values in step.arrays.items()},
    }


def from_record(record: Mapping[str, Any]) -> Step:
    """The step, on rank 0's clock. Its arrays are lost: a record keeps only their histograms."""
    start = record["start"]

    def moment(micros: float | None) -> float:
        return np.nan if micros is None else start + micros / 1e6

    spans = tuple(Span(Kind(kind), track, *map(moment, times)) for kind, track, *times in record["spans"])
    return Step(record["step"], start, moment(record["wall"]), spans, dict(record["counts"]))


class RecordWriter:
    """Appends lines to one rank's file. Any thread may write. A run that crashes loses at most the last lines."""

    def __init__(self, path: Path, header: Mapping[str, Any]):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._file = path.open("a")
        self.write({"freescale": RECORDS_FORMAT, **header})
        self.flush()

    def write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, separators=(",", ":"))
        with self._lock:
            self._lines.append(line)
            full = len(self._lines) >= _LINES_PER_FLUSH
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
class RecordedRun:
    """The records of a run: a header per rank, and per rank the records by step index, of the steps that all ranks have."""

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
        """One step of all ranks, on rank 0's clock."""
        return [from_record(records[index]) for records in self.records]

    def only(self, indices: Sequence[int]) -> RecordedRun:
        """The same run with only these steps."""
        return replace(self, records=[{index: records[index] for index in indices} for records in self.records])


def rank_file(run_dir: Path, rank: int) -> Path:
    return run_dir / RECORDS_FOLDER / f"rank_{rank:05d}.jsonl"


def read_run(run_dir: Path) -> RecordedRun:
    """Read the records of a run from ``run_dir/freescale``.

    Raises:
        InputError: if there are no records, if the file of a rank is missing, or if no step was recorded on all ranks.
    """
    files = sorted((run_dir / RECORDS_FOLDER).glob("rank_*.jsonl"))
    if not files:
        found = (
            sorted({file.parents[1] for file in run_dir.glob(f"**/{RECORDS_FOLDER}/rank_*.jsonl")})
            if run_dir.is_dir()
            else []
        )
        hint = "The monitor records only if the Trainer has a logger and the strategy does not set monitor=False."
        if found:
            hint = f"Did you mean {', '.join(map(str, found[:3]))}?"
        raise InputError(f"{run_dir}: the folder has no {RECORDS_FOLDER}/rank_*.jsonl. {hint}")
    headers, records = zip(*(_read(file) for file in files), strict=True)
    world = headers[0].get("world", len(files))
    if len(files) != world:
        raise InputError(
            f"{run_dir}: {RECORDS_FOLDER}/ has the files of {len(files)} ranks, but the run had {world} ranks. "
            f"Copy the {RECORDS_FOLDER}/ folders of all nodes into this one."
        )
    common = set.intersection(*(set(found) for found in records))
    if not common:
        raise InputError(f"{run_dir}: no step was recorded on all ranks. Train for more steps.")
    return RecordedRun(run_dir, list(headers), [{index: found[index] for index in common} for found in records])


def _read(file: Path) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    header: dict[str, Any] = {}
    records: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(file.read_text(errors="replace").splitlines(), start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # a crash, or two runs in one folder, can cut a line
            log_once(f"{file}: line {number} is damaged and is ignored.")
            continue
        if (problem := problem_of(record)) is not None:
            raise InputError(f"{file}: line {number}: {problem}.")
        if "freescale" in record:
            if record["freescale"] != RECORDS_FORMAT:
                raise InputError(
                    f"{file}: the file has format {record['freescale']}, but this version reads only format {RECORDS_FORMAT}."
                )
            header = record
        else:
            records[record["step"]] = record  # a step that was trained again after a resume: the last record counts
    return header, records


def add_histograms(histograms: Sequence[Sequence[int]]) -> list[int]:
    """Sum of histograms that may differ in length."""
    total = [0] * max((len(counts) for counts in histograms), default=0)
    for counts in histograms:
        for index, count in enumerate(counts):
            total[index] += count
    return total
