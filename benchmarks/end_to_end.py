"""End to end: an HSTU trained by TorchRec, by freescale_sync, with each technique alone and with all of them.

    python -m benchmarks.end_to_end [--quick] [--json] [--output FILE] [--ranks N] [--device cpu|cuda] [--longest 8192|21000]

All sides train the same model on the same global batches: log-normal histories drawn freely, so that ranks have unequal work; one
large table, row-wise over the ranks; 12 % of a batch's rows collide with those of the batch before. The FreeScale sides are
Lightning Trainers with the strategy, Lightning's own overhead included. The bubble of a side is its step time less the mean dense
compute time of the ranks, which is measured alone in the same run; ``bubble.py`` says what its parts are.

Between nodes of this cluster NCCL has TCP, the SM-free transport has the memory of the one host, which is faster: "+ SM-free" is
the synchronous exchange over the same link as "all". "all over NCCL" has TorchRec's link, and so has "all over TCP", where the
SM-free transport takes the ranks for hosts, too.

The ranks share a GPU, each on cores of its own (``own_cores.py``). With ``--share`` MPS alone keeps them apart, which it does not
quite: the same batch takes longer in one step than in another, whoever trains. How much of that there is, is in the result: how
much the compute of one and the same batch differs from side to side.

The script starts one GPU as a cluster of nodes (``cluster.py``). If a side fails, the others are run without it. Under another
launcher it takes its place there, and what was measured before a failure is in ``--output``. On CPU all sides run and their
losses are compared; the times are those of ranks that share cores, and say little.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # started as a file: let it find its neighbours
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report
from benchmarks.harness.gpu_cluster import launcher as cluster
from benchmarks.harness.training import bubble

TIMEOUT = 400.0  # seconds for all sides
WAIT = 60.0  # seconds that a rank waits for another


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="tiny shapes, few steps")
    cluster.add_options(parser)
    parser.add_argument("--longest", type=int, help="longest history, in events; default 8192, on cpu 512")
    parser.add_argument("--steps", type=int, help="steps of each side that count")
    parser.add_argument("--batch-size", type=int, help="samples a rank; default 128, on cpu 16")
    parser.add_argument("--rows", type=int, help="of the table; default 8,000,000, on cpu 200,000")
    parser.add_argument("--dim", type=int, help="of the table and the layers; default 128, on cpu 32")
    parser.add_argument("--layers", type=int, help="default 4, on cpu 2")
    parser.add_argument("--heads", type=int, help="default 4, on cpu 2")
    parser.add_argument("--share", type=int, help="percent of the GPU's cores a rank, not its own; default: own ones")
    parser.add_argument("--sides", nargs="+", metavar="SIDE", help="only these")
    parser.add_argument(
        "--options", type=json.loads, default={}, help="more of the strategy's, for the side 'all', as JSON"
    )
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="also trace three steps of each side, on rank 0")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)  # where the launcher looks for the ranks' figures
    arguments = parser.parse_args(argv)
    cluster.settle(arguments)
    if unknown := sorted(set(arguments.sides or ()) - set(bubble.SIDES)):
        parser.error(f"--sides: no side {unknown[0]!r}; there are {', '.join(map(repr, bubble.SIDES))}")
    if arguments.ranks < 2:
        parser.error("--ranks: one rank exchanges nothing; use two or more")
    return arguments


# ---- the launcher ------------------------------------------------------------------------------------------------------------
def launch(arguments: argparse.Namespace) -> int:
    """Start this script once more on every rank, and again without a side that failed."""
    env = {"OMP_NUM_THREADS": cluster.threads(arguments)}
    with tempfile.TemporaryDirectory(prefix="end-to-end-") as folder:
        # Beside the output, if there is one: should everything be killed, what was measured by then is there.
        part = arguments.output.with_suffix(".part") if arguments.output else Path(folder) / "part"
        part.unlink(missing_ok=True)
        argv = ["-m", "benchmarks.end_to_end", *sys.argv[1:], "--part", str(part)]
        while True:
            try:
                gpu, share = arguments.device == "cuda", arguments.share
                own = gpu and share is None
                cluster.run(arguments.ranks, argv, TIMEOUT, gpu=gpu, share=share, own_cores=own, env=env, echo=True)
                break
            except cluster.ClusterFailed as failure:
                if not _note_failure(part, failure):
                    print(failure, file=sys.stderr)
                    return failure.status
        figures = finish(json.loads(part.read_text()))
        part.unlink()
    tell(figures, arguments)
    return _status(figures)


def _note_failure(part: Path, failure: cluster.ClusterFailed) -> bool:
    """Whether it was a side that failed, and not what comes before or after all sides."""
    figures = json.loads(part.read_text()) if part.exists() else {}
    side = figures.get("under_way")
    if side is None:
        return False
    print(f"{side}: {failure}", file=sys.stderr)
    figures["failed"][side] = str(failure).strip().splitlines()[-1]
    figures["under_way"] = None
    part.write_text(json.dumps(figures))
    return True


# ---- on every rank -----------------------------------------------------------------------------------------------------------
def take_part(arguments: argparse.Namespace) -> int:
    """Be one of the ranks; rank 0 keeps the figures of the sides that are done."""
    # The streams of all sides share the hardware's queues; four ranks with 32 each are more than MPS has.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    os.environ.setdefault("OMP_NUM_THREADS", cluster.threads(arguments))
    rank = int(os.environ["RANK"])  # Lightning takes the variables away
    part = arguments.part or arguments.output
    from benchmarks import all_sides  # heavy, and of no use to the launcher

    known = json.loads(part.read_text()) if arguments.part and arguments.part.exists() else None
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print is not part of the result
        figures = finish(all_sides.run(arguments, keep=part if rank == 0 else None, known=known, wait=WAIT))
    if rank == 0 and arguments.part is None:
        tell(figures, arguments)
    all_sides.leave()
    return 0 if arguments.part else _status(figures)


def finish(figures: dict[str, Any]) -> dict[str, Any]:
    """What was measured, with what follows from it."""
    figures.pop("under_way", None)
    return bubble.summarise(figures)


def tell(figures: dict[str, Any], arguments: argparse.Namespace) -> None:
    text = json.dumps(report.head("end_to_end") | figures, indent=1)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    print(text if arguments.json else bubble.describe(figures), flush=True)


def _status(figures: dict[str, Any]) -> int:
    """Fails if a side did, or if the sides did not train alike."""
    return int(bool(figures["failed"]) or not figures.get("losses", {}).get("equal", False))


def main() -> int:
    arguments = parse()
    return take_part(arguments) if "RANK" in os.environ else launch(arguments)


if __name__ == "__main__":
    sys.exit(main())
