"""End to end: an HSTU trained by TorchRec, by freescale_sync, with each technique alone and with all of them.

    python -m benchmarks.end_to_end [--quick] [--json] [--output FILE] [--ranks N] [--device cpu|cuda] [--longest 8192|21000]

All variants train the same model on the same global batches. Histories have independent log-normal lengths, so ranks
have unequal amounts of work. One large table is sharded row-wise over the ranks. 12% of a batch's rows collide with the
previous batch. The FreeScale variants are Lightning Trainers with the strategy, so their times contain Lightning's
overhead. The bubble of a variant is its step time minus the mean dense compute time of the ranks, which is measured
alone in the same run. ``harness/training/bubble.py`` defines its parts. Every variant warms up until its steps are steady.
No bubble is given if a variant does not become steady, or if the compute of the same batches takes longer in one variant
than in another (``harness/training/steadiness.py``).

``--shapes`` measures several shapes of model and data and prints one table (``harness/training/shapes.py``). The shape "dlrm" is
a DLRM on click logs (``--clicks``, ``harness/training/clicks.py``). All of its samples cost the same, so nothing is balanced.

Between the ranks of this cluster NCCL uses TCP. The SM-free transport uses the memory of the one host, which is faster.
Three variants separate the two effects. "+ SM-free" is the synchronous exchange over the link of "all". "all over NCCL"
uses TorchRec's link. So does "all over TCP", where the SM-free transport treats the ranks as separate hosts.

The ranks share one GPU, and SMs are reserved for each rank (``harness/gpu_cluster/reserved_sms.py``). With ``--share``
MPS only limits the number of SMs per rank. Kernels of several ranks then share SMs, and the same batch takes longer in
one step than in another, for every variant. The result contains the size of this effect: how much the compute time of
the same batch varies between variants. ``--clock`` fixes the clock of the GPU, for shapes that reach its limit of power.

The script starts one GPU as a cluster of nodes. If a variant fails, the others run without it. If the script is told to end
(SIGTERM), it writes the rounds that are complete. Under another launcher
each process of the script is one of that launcher's ranks, and ``--output`` keeps what was measured before a failure.
On the CPU all variants run and their losses are compared, but the ranks share cores, so their times mean little.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report
from benchmarks.harness.gpu_cluster import launcher
from benchmarks.harness.gpu_cluster.fixed_clock import fixed_clock
from benchmarks.harness.gpu_cluster.rank_process import ClusterFailed
from benchmarks.harness.training import bubble, bubble_report, rounds, shapes
from benchmarks.harness.training.shapes import SHAPES, shape_options, without_shapes
from benchmarks.harness.training.steadiness import STEADY_STEPS, WARM_UP_STEPS
from benchmarks.harness.variant_names import TRAINING_VARIANTS

TIMEOUT = 400.0  # seconds for all variants
WAIT = 60.0  # longest wait of a rank for another, seconds


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="tiny shapes, few steps")
    launcher.add_options(parser)
    parser.add_argument("--longest", type=int, help="longest history in events; default 8192, on cpu 512")
    parser.add_argument("--steps", type=int, help="counted steps of each variant; default 24, with --quick fewer")
    parser.add_argument("--batch-size", type=int, help="samples per rank; default 128, on cpu 16")
    parser.add_argument("--rows", type=int, help="rows of the table; default 8,000,000, on cpu 200,000")
    parser.add_argument("--dim", type=int, help="width of the table and the layers; default 128, on cpu 32")
    parser.add_argument("--layers", type=int, help="default 4, on cpu 2")
    parser.add_argument("--heads", type=int, help="default 4, on cpu 2")
    parser.add_argument(
        "--share", type=int, help="limit each rank to this percentage of the GPU's SMs instead of reserving SMs for it"
    )
    parser.add_argument("--clock", type=int, metavar="MHZ", help="fix the clock of the GPU's SMs, for example at 1500")
    parser.add_argument("--negatives", type=int, help="sampled negatives per sample; default 32, on cpu 8")
    parser.add_argument("--context", type=int, default=0, help="pooled context features of a sample; default 0")
    parser.add_argument("--clicks", type=int, default=0, help="train a DLRM with this many bags; default 0: an HSTU")
    parser.add_argument("--sides", nargs="+", metavar="VARIANT", help="train only these variants")
    parser.add_argument(
        "--options",
        type=json.loads,
        default={},
        help="further options of the strategy for the variants 'all ...', as JSON",
    )
    parser.add_argument("--model", type=json.loads, default={}, help="further arguments of HSTU, as JSON")
    parser.add_argument("--rounds", type=int, default=1, help="train every variant this often; default 1")
    parser.add_argument(
        "--warm-up", type=int, metavar="STEPS", help="first steps of a variant, which do not count; default 10 or more"
    )
    parser.add_argument(
        "--strict",
        action=argparse.BooleanOptionalAction,
        help="give no bubble if steps are not steady or if the compute of the same batches differs; default: only on cuda",
    )
    parser.add_argument(
        "--shapes",
        nargs="*",
        metavar="SHAPE",
        help=f"train each of these shapes, by default all, and print one table: {', '.join(SHAPES)}",
    )
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="also trace three further steps of each variant")
    parser.add_argument(
        "--part", type=Path, help=argparse.SUPPRESS
    )  # file through which the ranks pass their figures on
    arguments = parser.parse_args(argv)
    launcher.resolve_options(arguments)
    if unknown := sorted(set(arguments.sides or ()) - set(TRAINING_VARIANTS)):
        known = ", ".join(map(repr, TRAINING_VARIANTS))
        parser.error(f"--sides: there is no variant {unknown[0]!r}; choose from {known}")
    if unknown := sorted(set(arguments.shapes or ()) - set(SHAPES)):
        parser.error(f"--shapes: there is no shape {unknown[0]!r}; choose from {', '.join(SHAPES)}")
    if arguments.rounds < 1:
        parser.error(f"--rounds: {arguments.rounds} is less than 1")
    if arguments.strict is None:
        arguments.strict = arguments.device == "cuda"
    if arguments.strict and (arguments.warm_up or WARM_UP_STEPS) <= STEADY_STEPS:
        parser.error(f"--warm-up: --strict needs more than {STEADY_STEPS} steps")
    if arguments.ranks < 2:
        parser.error("--ranks: a single rank exchanges nothing; use two or more")
    return arguments


# ---- the launcher ------------------------------------------------------------------------------------------------------------
class Stopped(SystemExit):
    """The process was told to end (SIGTERM), for example by ``timeout``.

    Attributes:
        figures: those of the complete rounds; ``None`` if there is none.
    """

    def __init__(self, figures: dict[str, Any] | None):
        super().__init__(128 + signal.SIGTERM)
        self.figures = figures


def launch(arguments: argparse.Namespace) -> int:
    """Measure one shape."""
    try:
        figures = measure(arguments, sys.argv[1:])
    except Stopped as stop:
        if stop.figures is not None:
            publish(stop.figures, arguments)
        raise
    if figures is None:
        return 1
    publish(figures, arguments)
    return _status(figures)


def launch_shapes(arguments: argparse.Namespace) -> int:
    """Measure the shapes, one after the other. What is measured is written to ``--output`` after each shape."""
    words = without_shapes(sys.argv[1:])
    found: dict[str, Any] = {}
    names = arguments.shapes or list(SHAPES)
    for name in names:
        argv = [*words, *shape_options(name, arguments.device, arguments.quick)]
        stopped: Stopped | None = None
        try:
            figures = measure(parse(argv), argv)
        except Stopped as stop:
            figures, stopped = stop.figures, stop
        if figures is not None:
            found[name] = figures
            publish(
                {"title": "End to end, by shape", "shapes": found},
                arguments,
                printed=name == names[-1] or bool(stopped),
            )
        if stopped is not None:
            raise stopped
        if figures is None:
            return 1
    return max(map(_status, found.values()))


def complete_rounds(figures: dict[str, Any]) -> dict[str, Any] | None:
    """The figures of the rounds in which all variants were measured; ``None`` if there is none.

    >>> known = {"sides": {"a": 1, "b": 2}, "later_rounds": [{"a": 3}, {}], "failed": {"c": ""}, "wanted": ["a", "b", "c"]}
    >>> complete_rounds(known)["later_rounds"], complete_rounds(known)["stopped"]
    ([], 'after 1 of 3 rounds')
    """
    wanted = {*figures["wanted"]} - figures["failed"].keys()
    rounds_so_far = [figures["sides"], *figures["later_rounds"]]
    done = [sides for sides in rounds_so_far if wanted <= sides.keys()]
    if not done:
        return None
    stopped = f"after {len(done)} of {len(rounds_so_far)} rounds"
    return figures | {"sides": done[0], "later_rounds": done[1:], "stopped": stopped}


def measure(arguments: argparse.Namespace, words: Sequence[str]) -> dict[str, Any] | None:
    """Start this script on every rank; if a variant fails, start again without it. ``None`` if nothing could be measured.

    Args:
        words: the options of the script, from which ``arguments`` were parsed.
    """
    gpu, share = arguments.device == "cuda", arguments.share
    with tempfile.TemporaryDirectory(prefix="end-to-end-") as folder, fixed_clock(arguments.clock if gpu else None):
        # Next to the output file, if there is one: if this process is killed, the figures so far remain.
        part = arguments.output.with_suffix(".part") if arguments.output else Path(folder) / "part"
        part.unlink(missing_ok=True)
        argv = ["-m", "benchmarks.end_to_end", *words, "--part", str(part)]
        while True:
            try:
                launcher.run(arguments.ranks, argv, TIMEOUT, gpu=gpu, share=share, echo=True)
                break
            except ClusterFailed as failure:
                if not _note_failure(part, failure):
                    print(failure, file=sys.stderr)
                    return None
            except SystemExit:
                known = complete_rounds(json.loads(part.read_text())) if part.exists() else None
                raise Stopped(None if known is None else finish(known)) from None
        figures = finish(json.loads(part.read_text()))
        part.unlink()
    return figures


def _note_failure(part: Path, failure: ClusterFailed) -> bool:
    """Record the failed variant. Returns whether a variant failed, rather than something before or after all variants."""
    figures = json.loads(part.read_text()) if part.exists() else {}
    variant = figures.get("under_way")
    if variant is None:
        return False
    print(f"{variant}: {failure}", file=sys.stderr)
    figures["failed"][variant] = str(failure).strip().splitlines()[-1]
    figures["under_way"] = None
    part.write_text(json.dumps(figures))
    return True


# ---- on every rank -----------------------------------------------------------------------------------------------------------
def run_rank(arguments: argparse.Namespace) -> int:
    """Measure as one of the ranks; rank 0 keeps the figures of the variants that are done."""
    # The streams of all variants share the hardware queues. Four ranks with 32 queues each are more than MPS has.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun sets it, if another launcher does not
    rank = int(os.environ["RANK"])  # read now: Lightning deletes the variables
    part = arguments.part or arguments.output
    from benchmarks.harness import rank_setup  # imported late: the launcher does not need torch
    from benchmarks.harness.training import all_variants

    known = json.loads(part.read_text()) if arguments.part and arguments.part.exists() else None
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result only
        figures = finish(all_variants.run(arguments, keep=part if rank == 0 else None, known=known, wait=WAIT))
    if rank == 0 and arguments.part is None:
        publish(figures, arguments)
    rank_setup.leave_group()
    return 0 if arguments.part else _status(figures)


def finish(figures: dict[str, Any]) -> dict[str, Any]:
    """The measured figures, and what follows from them."""
    for name in ("under_way", "wanted"):
        figures.pop(name, None)
    later = [bubble.summarise({**figures, "sides": sides}) for sides in figures.pop("later_rounds", [])]
    figures = bubble.summarise(figures)
    return figures | {"rounds": rounds.collect([figures, *later])}


def publish(figures: dict[str, Any], arguments: argparse.Namespace, printed: bool = True) -> None:
    """Print the result, unless ``printed`` is false; write it to ``--output``."""
    machines = [found["machine"] for found in figures.get("shapes", {}).values()]  # a single measurement has its own
    text = json.dumps(report.head("end_to_end", *machines[:1]) | figures, indent=1)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    if printed:
        describe = shapes.describe if "shapes" in figures else bubble_report.describe
        print(text if arguments.json else describe(figures), flush=True)


def _status(figures: dict[str, Any]) -> int:
    """Exit status: 1 if a variant failed, if the losses of the variants differ, or if the bubbles are doubtful."""
    doubtful = figures["parameters"]["strict"] and figures["doubts"]
    return int(bool(figures["failed"] or doubtful) or not figures.get("losses", {}).get("equal", False))


def main() -> int:
    arguments = parse()
    if "RANK" in os.environ:
        return run_rank(arguments)
    # An exception, so that the ranks are ended, the clock of the GPU is reset, and complete rounds are written.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return launch(arguments) if arguments.shapes is None else launch_shapes(arguments)


if __name__ == "__main__":
    sys.exit(main())
