"""``python -m tests.faults --kills 100 --seed 0``: kill ranks at random moments and check what is left."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.report import head
from tests.faults.attempt import START
from tests.faults.campaign import MOMENTS, TIMEOUTS, WORLDS, TrainingResult, campaign
from tests.faults.failures import FAILURES, NEEDS_CUDA


def show(result: TrainingResult) -> None:
    kills = ", ".join(f"rank {kill['rank']} at {kill['kind']} {kill['count']}" for kill in result.kills)
    seconds = ", ".join(f"{seconds:.0f}" for seconds in result.attempt_seconds)
    found = "; ".join(result.problems) or f"ok, {result.difference}"
    print(f"{result.seed}: ranks {result.worlds}, failed: {kills}, seconds {seconds}: {found}")
    print("".join(f"{line}\n" for line in result.output), end="", flush=True)


def device_name(device: str) -> str | None:
    """The name of the GPU. Asking torch would initialize CUDA here, and the ranks are forked from this process."""
    if device == "cpu":
        return None
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    name = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0]
    return f"{name}, all ranks on one GPU"


def write(path: Path, result: dict[str, Any], machine: str | None) -> None:
    """Write the result to a file. Results of other seeds in the file stay."""
    runs = json.loads(path.read_text())["rows"] if path.exists() else []
    stored = head("faults", machine, "-m tests.faults")
    result = {"date": stored["date"], "command": stored["command"], **result}
    runs = [*(run for run in runs if run["seed"] != result["seed"]), result]
    path.write_text(json.dumps(stored | {"rows": runs}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="how many ranks are killed")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same settings and moments")
    parser.add_argument("--device", choices=sorted(TIMEOUTS), default="cpu", help="cuda: all ranks share one GPU")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(WORLDS), help="numbers of ranks that are used")
    parser.add_argument("--parallel", type=int, default=1, help="trainings at the same time")
    parser.add_argument("--kills-each", type=int, help="kills of each training; default: a random number up to 3")
    parser.add_argument(
        "--failures",
        nargs="+",
        choices=sorted(FAILURES),
        default=[],
        help="also let a rank hang, let it use up its memory, or kill the MPS server through which the ranks use the GPU",
    )
    parser.add_argument(
        "--moments", nargs="+", choices=MOMENTS, default=MOMENTS, help="what ranks do when they are killed"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="no rank is killed after this time")
    parser.add_argument("--timeout", type=float, help="timeout of the strategy in seconds")
    parser.add_argument("--start-method", choices=["fork", "spawn"], default="fork", help="how ranks are started")
    parser.add_argument(
        "--shared-gpu",
        action="store_true",
        help="other programs use the GPU, too: do not look at what stays in use on it",
    )
    parser.add_argument("--output", type=Path, help="add the result to this JSON file")
    options = parser.parse_args()
    if options.device == "cpu" and (needs := sorted(NEEDS_CUDA & set(options.failures))):
        parser.error(f"--failures {' '.join(needs)}: this failure needs a GPU; add --device cuda")
    START["method"] = options.start_method
    found = campaign(
        options.kills,
        options.seed,
        show,
        options.ranks,
        options.device,
        options.timeout,
        parallel=options.parallel,
        kills_each=options.kills_each,
        failures=options.failures,
        seconds=options.seconds,
        moments=options.moments,
        shared_gpu=options.shared_gpu,
    )
    result = {"seed": options.seed, **found}
    print(json.dumps(result, indent=2))
    if options.output:
        write(options.output, result, device_name(options.device))
    return 1 if result["problems"] or result["left_behind"] else 0


if __name__ == "__main__":
    sys.exit(main())
