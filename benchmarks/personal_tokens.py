"""Personal tokens: how much of a long history they keep, what they cost, and how a stored state ages.

    python -m benchmarks.personal_tokens [FILE ...] [--quick] [--json] [--output FILE] [--device cpu|cuda] [--seeds 0 1 2]

Every variant is trained from every seed on each of the given files of events, or on generated histories. ``recent events only``
sees the recent events, ``full history`` all events, and the others see tokens and recent events. Generated users show their
tastes in early events and come back to them after unrelated events (``EarlyTastes``). Of the users of a file with 20 events or
more, the last events are held out, at most 10 and at most a fifth. Targets are ranked among all items. Only cases with a history
that is not empty count. ``recovered`` is the share of the difference in HR@10 between recent events only and the full history.
The default on a CPU is a smaller model with shorter histories.

The age of a state is the number of events by which it is older than it has to be. ``kept``: the model gets all events since the
state. ``dropped``: it gets only as many as in training. All ages have the same cases, those whose history is long enough.

Serving FLOPs are those of the layers for one prediction with a stored state. Training time is measured apart, for histories of
1,024 events and 256 recent ones: forward and backward of a batch, without the optimizer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report
from benchmarks.harness.long_history.data import EarlyTastes, LongHistories, read_histories

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(tempfile.gettempdir()) / "freescale-long-history"
SYNTHETIC = "synthetic"
RECENT_ONLY, FULL = "recent events only", "full history"
VARIANTS: dict[str, dict[str, Any]] = {
    RECENT_ONLY: {"kind": "recent"},
    "1 token": {"kind": "tokens", "tokens": 1},
    "4 tokens": {"kind": "tokens", "tokens": 4},
    "16 tokens": {"kind": "tokens", "tokens": 16},
    "4 segments of 4 tokens": {"kind": "tokens", "tokens": 4, "segments": 4},
    "4 segments of 16 tokens": {"kind": "tokens", "tokens": 16, "segments": 4},
    "4 tokens, fixed cut": {"kind": "tokens", "tokens": 4, "random_cut": False},
    FULL: {"kind": "full"},
}
AGED = "4 tokens"
AGES = (0, 0.5, 1, 2, 4)  # in units of refresh
Rows = list[dict[str, Any]]


class QualityPreset(NamedTuple):
    """Data, models and trainings of a kind of device.

    Attributes:
        tastes: the generated histories.
        recent: the least number of recent events and ``refresh``: for generated histories, and for files.
        longest: the latest events of the histories of files that are used.
        steps: training steps.
        training: further options of a training.
        width: of the model.
        layers: of the model.
    """

    tastes: EarlyTastes
    recent: tuple[int, int]
    longest: int
    steps: int
    training: dict[str, Any]
    width: int
    layers: int

    def model(self) -> dict[str, Any]:
        dropout = {"dropout": 0.0, "input_dropout": 0.0}
        return {"embedding_dim": self.width, "num_layers": self.layers, "num_heads": 2} | dropout


SMALL = EarlyTastes(users=3000, contexts=1, tastes=8, filler=40, early=8, visits=4, gap=8, evaluated=1500)
SMALL_TRAINING = {"samples": 32, "negatives": 64, "lr": 4e-3}
PRESETS = {
    "cpu": QualityPreset(SMALL, (4, 2), 64, 350, SMALL_TRAINING, 32, 2),
    "cuda": QualityPreset(EarlyTastes(), (16, 2), 512, 2000, {}, 64, 4),
    "quick": QualityPreset(replace(SMALL, users=40), (4, 2), 16, 4, SMALL_TRAINING, 16, 1),
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="a tiny model, few users, few steps")
    parser.add_argument(
        "data", nargs="*", metavar="FILE", help="Parquet, CSV or text file of events, or 'synthetic', the default"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default 0 1 2")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, help="training steps; default 350 on a CPU, 2000 on CUDA")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at the same time; default 1")
    parser.add_argument("--limit", type=float, default=36_000, help="seconds after which trainings are stopped")
    parser.add_argument("--only", nargs=3, metavar=("DATA", "VARIANT", "SEED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    arguments.data = arguments.data or [SYNTHETIC]
    arguments.preset = "quick" if arguments.quick else arguments.device
    arguments.steps = arguments.steps or PRESETS[arguments.preset].steps
    if arguments.quick:
        arguments.seeds, arguments.variants = arguments.seeds[:1], [RECENT_ONLY, AGED, FULL]
    return arguments


# ---- one training ------------------------------------------------------------------------------------------------------------
def data_file(name: str, preset: str) -> Path:
    """The prepared histories of a data set; made if they are not there."""
    path = CACHE / f"{Path(name).stem}-{preset}.npz"
    if not path.exists():
        chosen = PRESETS[preset]
        if name == SYNTHETIC:
            chosen.tastes.generate().save(path)
        else:
            evaluated = chosen.tastes.evaluated
            read_histories(Path(name), least=20, held_out=10, longest=chosen.longest, evaluated=evaluated).save(path)
    return path


def run_trial(arguments: argparse.Namespace, name: str, variant: str, seed: int) -> dict[str, Any]:
    """Train and evaluate one variant in this process."""
    import torch

    from benchmarks.harness.long_history import trial
    from lightning_freescale.models import PersonalTokens

    torch.set_num_threads(1)
    preset = PRESETS[arguments.preset]
    data = LongHistories.load(data_file(name, arguments.preset))
    recent = preset.recent[name != SYNTHETIC]
    options = dict(VARIANTS[variant])
    kind = options.pop("kind")
    cut = PersonalTokens(**({"tokens": 1} | options), recent=recent, refresh=recent)
    chosen = trial.TrialOptions(kind, cut, arguments.steps, model=preset.model(), **preset.training)
    device = torch.device(arguments.device)
    begin = time.perf_counter()
    model, _ = trial.train(data, chosen, seed, device)
    found: dict[str, Any] = {"data": Path(name).stem, "variant": variant, "seed": seed, "recent": recent}
    found |= trial.evaluate(model, data, chosen, device)
    found["serving MFLOP"] = trial.serving_flops(model, data, chosen) / 1e6
    found["ages"] = []
    for age in AGES if variant == AGED else ():
        for dropped in (False, True):
            at: dict[str, Any] = {"age": int(age * recent), "dropped": dropped, "least": AGES[-1] * recent}
            quality = trial.evaluate(model, data, chosen, device, **at)
            found["ages"].append({"age": at["age"], "dropped": dropped} | quality)
    return found | {"seconds": time.perf_counter() - begin}


# ---- all trainings -----------------------------------------------------------------------------------------------------------
def train_all(arguments: argparse.Namespace) -> Rows:
    """Train every variant from every seed on every data set, ``--jobs`` at a time."""
    for name in arguments.data:
        data_file(name, arguments.preset)
    deadline = time.monotonic() + arguments.limit
    tasks = [
        (name, variant, str(seed))
        for seed in arguments.seeds
        for name in arguments.data
        for variant in arguments.variants
    ]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        found = list(pool.map(lambda task: _run_in_a_process(arguments, task, deadline), tasks))
    order = {variant: number for number, variant in enumerate(VARIANTS)}
    return sorted((row for row in found if row is not None), key=lambda row: order[row["variant"]])


def _run_in_a_process(arguments: argparse.Namespace, task: tuple[str, str, str], deadline: float) -> Any:
    command = [sys.executable, "-m", "benchmarks.personal_tokens"]
    command += ["--device", arguments.device, "--steps", str(arguments.steps)]
    command += ["--quick"] if arguments.quick else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    left = deadline - time.monotonic()
    if left <= 0:
        return None
    try:
        done = subprocess.run(
            [*command, "--only", *task], cwd=ROOT, env=environment, stdout=subprocess.PIPE, timeout=left, check=True
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as failed:
        print(f"{' '.join(task)}: {failed}", file=sys.stderr, flush=True)
        return None
    found = json.loads(done.stdout.decode().splitlines()[-1])
    print(f"{' '.join(task)}: HR@10 {found['HR@10']:.4f}, {found['seconds']:.0f} s", file=sys.stderr, flush=True)
    return found


def quality_rows(rows: Rows) -> Rows:
    """One row for each data set and variant: means over the seeds, and their standard errors."""
    table = []
    for data in dict.fromkeys(row["data"] for row in rows):
        own = [row for row in rows if row["data"] == data]
        full_flops = _mean(own, FULL, "serving MFLOP")
        for variant in dict.fromkeys(row["variant"] for row in own):
            values = [row["HR@10"] for row in own if row["variant"] == variant]
            table.append(
                {
                    "data": data,
                    "variant": variant,
                    "HR@10": _mean(own, variant, "HR@10"),
                    "noise": statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None,
                    "NDCG@10": _mean(own, variant, "NDCG@10"),
                    "recovered %": _recovered(own, variant),
                    "serving FLOPs, % of full": 100 * _mean(own, variant, "serving MFLOP") / full_flops,
                    "seeds": len(values),
                    "cases": own[0]["cases"],
                }
            )
    return table


def _recovered(rows: Rows, variant: str) -> float | None:
    """The share of the difference between recent events only and the full history, from the seeds that all three have."""
    seeds = [{row["seed"] for row in rows if row["variant"] == name} for name in (variant, RECENT_ONLY, FULL)]
    common = [row for row in rows if row["seed"] in set.intersection(*seeds)]
    own, recent, full = (_mean(common, name, "HR@10") for name in (variant, RECENT_ONLY, FULL))
    return 100 * (own - recent) / (full - recent) if full > recent else None


def _mean(rows: Rows, variant: str, name: str) -> float:
    values = [row[name] for row in rows if row["variant"] == variant]
    return float(np.mean(values)) if values else float("nan")


def age_rows(rows: Rows) -> Rows:
    """HR@10 by the age of the state: means over the seeds."""
    table = []
    for data in dict.fromkeys(row["data"] for row in rows):
        found = [age for row in rows if row["data"] == data for age in row["ages"]]
        for age in dict.fromkeys(entry["age"] for entry in found):
            row: dict[str, Any] = {"data": data, "age": age}
            for name, dropped in (("kept", False), ("dropped", True)):
                values = [entry["HR@10"] for entry in found if entry["age"] == age and entry["dropped"] == dropped]
                row[f"HR@10, {name}"] = float(np.mean(values))
            table.append(row)
    return table


def main() -> int:
    arguments = parse()
    if arguments.only:
        name, variant, seed = arguments.only
        with contextlib.redirect_stdout(sys.stderr):
            found = run_trial(arguments, name, variant, int(seed))
        print(json.dumps(found))
        return 0
    arguments.data = [name if name == SYNTHETIC else str(Path(name).resolve()) for name in arguments.data]
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result only
        from benchmarks.harness.long_history.step_time import step_rows

        trained = train_all(arguments)
        steps = step_rows(arguments.device, arguments.quick)
    machine = f"{os.cpu_count()} cores ({platform.machine()})"
    if arguments.device == "cuda":
        import torch

        machine = torch.cuda.get_device_name()
    quality, ages = quality_rows(trained), age_rows(trained)
    preset = PRESETS[arguments.preset]._replace(steps=arguments.steps)
    parameters = preset._asdict() | {"tastes": asdict(preset.tastes), "seeds": arguments.seeds, "jobs": arguments.jobs}
    results = {"parameters": parameters, "quality": quality, "ages": ages, "training": steps, "trained": trained}
    tables = {"Quality": quality, f"HR@10 by the age of the state, {AGED}": ages, "Training": steps}
    tables = {title: rows for title, rows in tables.items() if rows}
    report.publish(arguments, report.head("personal_tokens", machine) | results, tables)
    return 0 if trained else 1


if __name__ == "__main__":
    sys.exit(main())
