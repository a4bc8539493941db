"""``freescale doctor``: what is installed, what fits, which transport would be used on this machine, and what to fix.

``freescale doctor --time`` also starts two ranks on this machine, or one for each GPU, and times every engine that can run.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import resource
from collections.abc import Sequence
from importlib import metadata
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.requirements import FBGEMM_FOR_TORCH, TORCHREC_PROBLEM
from lightning_freescale.transport import capabilities
from lightning_freescale.transport.addresses import shared_secret
from lightning_freescale.transport.choice import Capabilities, decide
from lightning_freescale.transport.choice_table import choice_rows
from lightning_freescale.transport.engine_timing import EngineTime, time_engines
from lightning_freescale.transport.nixl import nixl_library, rdma_devices

ENOUGH_SHARED_MEMORY = 1 << 30  # bytes; with less, the buffers of several groups are small
ENOUGH_DESCRIPTORS = 1024
OLDEST = {"Python": "3.11", "torchrec": "1.6.1", "lightning": "2.5"}  # releases that the tests cover


class Finding(NamedTuple):
    """One line of the answer."""

    name: str
    value: str
    fix: str = ""  # what to do; empty if it is fine
    fits: str = ""  # which values would be fine


def inspect() -> list[Finding]:
    """Look at this machine. It starts the CUDA driver, if there is one."""
    found = capabilities()
    return [*_packages(), *_devices(found), *_system(found), *_transports(found)]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _at_least(version: str, oldest: str) -> bool:
    """Whether a release is not older than another one, by the numbers in their names."""
    return [int(part) for part in re.findall(r"\d+", version)[:3]] >= [int(part) for part in oldest.split(".")]


def _recent_enough(name: str, version: str | None) -> Finding:
    oldest = OLDEST[name]
    how = (
        f"pip install {'--no-deps ' if name == 'torchrec' else ''}{name}"
        if name != "Python"
        else f"use Python {oldest}"
    )
    fine = version is not None and _at_least(version, oldest)
    return Finding(name, version or "missing", "" if fine else how, f"{oldest} or later")


def _packages() -> list[Finding]:
    release = ".".join(torch.__version__.split(".")[:2])
    wanted = FBGEMM_FOR_TORCH.get(release)
    advice = f"use one of {', '.join(FBGEMM_FOR_TORCH)}: FBGEMM is built for one release of torch"
    package = "fbgemm-gpu" if torch.version.cuda and torch.cuda.is_available() else "fbgemm-gpu-cpu"
    found = {name: version for name in ("fbgemm-gpu", "fbgemm-gpu-cpu") if (version := _version(name))}
    # With a GPU, the CPU build cannot train: its kernels do not take CUDA tensors.
    usable = found.get("fbgemm-gpu") or (found.get("fbgemm-gpu-cpu") if package == "fbgemm-gpu-cpu" else None)
    fits = usable is not None and (wanted is None or usable.split("+")[0] == wanted)
    return [
        _recent_enough("Python", platform.python_version()),
        Finding("torch", torch.__version__, "" if wanted else advice, ", ".join(FBGEMM_FOR_TORCH)),
        Finding(
            "FBGEMM",
            ", ".join(f"{version} ({name})" for name, version in found.items()) or "missing",
            ""
            if fits
            else f"pip install {package}" + (f"=={wanted}" if wanted else ", the release made for your torch"),
            f"{wanted} for torch {release}" if wanted else "",
        ),
        _recent_enough("torchrec", _version("torchrec")),
        _recent_enough("lightning", _version("lightning")),
        Finding("lightning-freescale", _version("lightning-freescale") or "imported from its sources"),
        Finding("training", "packages are missing" if TORCHREC_PROBLEM else "can start", TORCHREC_PROBLEM or ""),
    ]


def _devices(found: Capabilities) -> list[Finding]:
    nccl = "not in this torch"
    if found.nccl:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    reachable = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    cards = rdma_devices()
    built = torch.version.cuda
    return [
        Finding(
            "CUDA driver",
            f"for CUDA up to {found.driver}" if found.driver else "none",
            driver_advice(found, built, torch.cuda.is_available()),
            f"torch is built for CUDA {built}" if built else "torch is built without CUDA",
        ),
        Finding("CUDA devices", str(found.devices)),
        Finding("peer access", f"{reachable} of {len(pairs)} pairs of devices" if pairs else "no pairs of devices"),
        Finding("NCCL", nccl),
        Finding("RDMA", ", ".join(cards) if cards else "no device"),
        Finding("NIXL", nixl_library() or "not installed; it is needed for RDMA without NCCL"),
    ]


def driver_advice(found: Capabilities, built: str | None, works: bool) -> str:
    """What to do about the driver, if there are GPUs that torch cannot use.

    Args:
        built: CUDA version that torch is built for, if any.
        works: whether torch can use a GPU.
    """
    if works or not found.devices:
        return ""
    if built is None:
        return f"this machine has {found.devices} GPUs, but torch is built without CUDA: install a torch with CUDA"
    if found.driver and not _at_least(found.driver, built.split(".")[0]):
        return f"the driver is too old for CUDA {built}: update it, or install a torch for CUDA {found.driver.split('.')[0]}"
    return "torch finds no GPU: look at CUDA_VISIBLE_DEVICES and at the output of nvidia-smi"


def _system(found: Capabilities) -> list[Finding]:
    free, (descriptors, _) = found.shared_memory_bytes, resource.getrlimit(resource.RLIMIT_NOFILE)
    secret = "set" if os.environ.get("FREESCALE_SECRET") else "not set"
    problem = ""
    try:
        shared_secret()
    except ConfigurationError as error:
        problem = str(error)
    return [
        Finding(
            "shared memory",
            f"{free >> 20} MiB free in /dev/shm",
            "" if free >= ENOUGH_SHARED_MEMORY else "enlarge it (docker run --shm-size=2g)",
        ),
        Finding(
            "open files",
            f"at most {descriptors}",
            "" if descriptors >= ENOUGH_DESCRIPTORS else f"ulimit -n {ENOUGH_DESCRIPTORS}",
        ),
        Finding("FREESCALE_SECRET", f"{secret}; transport='host' between several hosts needs it", problem),
    ]


def _transports(found: Capabilities) -> list[Finding]:
    device = torch.device("cuda" if torch.cuda.is_available() and dist.is_available() else "cpu")
    findings = [Finding("SM-free transport", found.reason)]
    for one_host in (True, False):
        choice = decide("auto", device, True, one_host, found)
        where = "one host" if one_host else "several hosts"
        findings.append(Finding(f"transport='auto', {where}", f"{choice.engine}: {choice.reason}"))
    return findings


def timing_lines(times: Sequence[EngineTime]) -> list[str]:
    """One line for each engine."""
    width = max(len(time.engine) for time in times)
    return [
        f"  {time.engine:<{width}}  "
        + (
            f"cannot run: {time.problem}"
            if time.gb_per_second is None
            else f"{time.gb_per_second:7.2f} GB/s that leave a rank, {time.microseconds:8.0f} us for a small exchange"
        )
        for time in times
    ]


def _print_times() -> None:
    device, count = ("cuda", torch.cuda.device_count()) if torch.cuda.is_available() else ("cpu", 0)
    ranks = max(2, count)
    where = f"{count} GPUs" if count else "the CPU, where threads stand for copy engines"
    print(f"\n{ranks} ranks on {where}, 64 MiB that leave each rank:", flush=True)
    for line in timing_lines(time_engines(device, ranks)):
        print(line)


def main(argv: Sequence[str] | None = None, prog: str = "freescale doctor") -> int:
    """Print the findings. The exit code is 1 if something has to be fixed."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--table", action="store_true", help="also show what transport='auto' chooses elsewhere")
    parser.add_argument("--time", action="store_true", help="also time each engine that can run, a few seconds each")
    options = parser.parse_args(argv)
    findings = inspect()
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.name:<{width}}  {finding.value}" + (f"  [{finding.fits}]" if finding.fits else ""))
    if options.table:
        print("\ntransport='auto' chooses:")
        for row in choice_rows():
            print(f"  {', '.join(row[:-2])}: {row[-2]}, {row[-1]}")
    if options.time:
        _print_times()
    to_fix = [finding for finding in findings if finding.fix]
    print("\nTo fix:" if to_fix else "\nNothing to fix.")
    for finding in to_fix:
        print(f"  {finding.name}: {finding.fix}")
    return 1 if to_fix else 0
