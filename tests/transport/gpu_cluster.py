"""Runs the GPU checks with several ranks, each rank in a new process.

    python3 tests/transport/gpu_cluster.py 2 [SCENARIO ...] [--engine host] [--exchanges 10000] [--output FILE]

If there are as many GPUs as ranks, each rank has its own. Otherwise all ranks share one GPU, and if MPS is installed, it limits
each rank to its share of the SMs. A single rank runs without MPS. After a failure, the remaining scenarios run in new processes.
It needs what gpu_ranks.py needs.

The engine says how data move. With `host` they go through pinned host memory, with `ipc` through the memory of the receiving GPU.
If the driver does not share memory between the processes, `ipc` fails at set-up with the error of the driver. With `tcp` and
`nixl` the ranks treat each other as separate hosts. `nixl` uses TCP over the loopback interface unless UCX_TLS and
UCX_NET_DEVICES say otherwise, and needs NIXL (FREESCALE_NIXL_LIBRARY is the path of libnixl_capi.so).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.harness import report
from benchmarks.harness.free_ports import free_port

# All of gpu_ranks.SCENARIOS; fast and basic scenarios come first.
SCENARIOS = [
    "dtypes",
    "exact",
    "early_flag",
    "host_goes_on",
    "dropped",
    "priorities",
    "proof",
    "hosts",
    "profile",
    "timeout",
    "death",
]
# Copies between ranks that share a GPU run on its SMs, so what is left out needs copy engines, or takes a certain time.
ON_DEVICE = ["dtypes", "exact", "early_flag", "host_goes_on", "dropped", "timeout", "death"]
BETWEEN_HOSTS = ["dtypes", "exact", "host_goes_on", "dropped", "timeout", "death"]
# For each engine: its scenarios, and environment variables in which {rank} stands for the rank.
ENGINES: dict[str, tuple[list[str], dict[str, str]]] = {
    "host": (SCENARIOS, {"FREESCALE_RINGS": "host"}),
    "ipc": (ON_DEVICE, {"FREESCALE_RINGS": "device"}),
    "tcp": (BETWEEN_HOSTS, {"FREESCALE_HOST_ID": "node{rank}", "FREESCALE_NETWORK": "tcp"}),
    "nixl": (
        BETWEEN_HOSTS,
        {
            "FREESCALE_HOST_ID": "node{rank}",
            "FREESCALE_NETWORK": "nixl",
            "UCX_TLS": os.environ.get("UCX_TLS", "tcp,cuda_copy"),
            "UCX_NET_DEVICES": os.environ.get("UCX_NET_DEVICES", "lo"),
        },
    ),
}
Environment = dict[str, str]


def gpus() -> int:
    """The number of GPUs of this machine."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return len(subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines())


@contextlib.contextmanager
def shared_gpu(world: int) -> Iterator[Environment]:
    """The environment variables of ranks that use the GPU at the same time."""
    control = shutil.which("nvidia-cuda-mps-control")
    enough = gpus() >= world
    if enough or control is None:
        if not enough:
            print("MPS is not installed, so the ranks take turns on the GPU", flush=True)
        yield {}
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run([control, "-d"], env=os.environ | places, check=True, timeout=30)
        time.sleep(1)
        try:
            yield places | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // world)}
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run([control], input="quit\n", text=True, env=os.environ | places, check=False, timeout=30)


def of_rank(variables: Environment, rank: int) -> Environment:
    """The environment variables of one rank."""
    return {name: value.format(rank=rank) for name, value in variables.items()} | {"RANK": str(rank)}


def run_ranks(world: int, command: list[str], extra: Environment, seconds: float) -> tuple[bool, str]:
    """Run ``command`` on every rank and print its output as it comes. A rank that fails ends the others.

    Returns:
        whether every rank succeeded, and the whole output.
    """
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    environment |= {"PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "lo"}
    own_gpu = gpus() >= world
    output = []
    with tempfile.NamedTemporaryFile("w") as written, open(written.name) as read:
        ranks = [
            subprocess.Popen(
                [sys.executable, *command],
                env=environment | of_rank(extra, rank) | {"LOCAL_RANK": str(rank if own_gpu else 0)},
                stdout=written,
                stderr=subprocess.STDOUT,
            )
            for rank in range(world)
        ]
        deadline = time.monotonic() + seconds
        while (running := any(rank.poll() is None for rank in ranks)) and time.monotonic() < deadline:
            output.append(read.read())
            print(output[-1], end="", flush=True)
            if any(rank.poll() not in (None, 0) for rank in ranks):
                deadline = min(deadline, time.monotonic() + 3)
            time.sleep(0.05)
        for rank in ranks:
            rank.kill()
        status = [rank.wait() for rank in ranks]
        output.append(read.read() + (f"stopped, because the limit is {seconds:g} s\n" if running else ""))
        print(output[-1], end="", flush=True)
    return not any(status), "".join(output)


def run(
    world: int, scenarios: list[str] | None = None, exchanges: int = 10_000, engine: str = "host"
) -> tuple[list[str], str]:
    """Run the scenarios, or all of the engine, and print the output of the ranks.

    Returns:
        the scenarios that failed, and the whole output.
    """
    script = str(Path(__file__).with_name("gpu_ranks.py"))
    every, variables = ENGINES[engine]
    failed, left, printed = [], list(scenarios or every), ""
    with shared_gpu(world) as environment:
        environment |= variables
        while left:
            command = [script, *left, "--exchanges", str(exchanges)]
            good, output = run_ranks(world, command, environment, 60 + 60 * len(left))
            printed += output
            if good:
                break
            done = [name for name in left if output.count(f" {name}: ok") == world]
            failed.append(next(name for name in left if name not in done))
            left = left[left.index(failed[-1]) + 1 :]
    return failed, printed


def results(world: int, printed: str, engine: str) -> dict[str, object]:
    """The results that rank 0 printed for each scenario, in the form of a result file."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    machine = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    if gpus() < world:
        machine += f" as {world} ranks, MPS shares its cores out"
    lines = re.findall(r"^rank 0 (\w+): (.*)$", printed, re.MULTILINE)
    rows = [{"ranks": world, "engine": engine, "check": check, "result": result} for check, result in lines]
    return report.head("transport checks", machine, "tests/transport/gpu_cluster.py") | {"results": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", type=int)
    parser.add_argument("scenarios", nargs="*", help="default: all of the engine")
    parser.add_argument("--engine", choices=ENGINES, default="host")
    parser.add_argument("--exchanges", type=int, default=10_000)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results of rank 0 to this file, as JSON")
    args = parser.parse_args()
    failed, printed = run(args.world, args.scenarios, args.exchanges, args.engine)
    if args.output:
        args.output.write_text(json.dumps(results(args.world, printed, args.engine), indent=1) + "\n")
    print(f"{args.world} ranks, {args.engine}: {'FAILED: ' + ' '.join(failed) if failed else 'all ok'}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
