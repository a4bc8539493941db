"""``freescale doctor``: what is installed, what fits, which transport would be used on this machine, and what to fix."""

from __future__ import annotations

import argparse
import os
import resource
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.requirements import FBGEMM_FOR_TORCH
from lightning_freescale.transport import capabilities
from lightning_freescale.transport.addresses import shared_secret
from lightning_freescale.transport.choice import Capabilities, decide
from lightning_freescale.transport.choice_table import choice_rows

ENOUGH_SHARED_MEMORY = 1 << 30  # bytes; with less, the buffers of several groups are small
ENOUGH_DESCRIPTORS = 1024


class Finding(NamedTuple):
    """One line of the answer."""

    name: str
    value: str
    fix: str = ""  # what to do; empty if it is fine


def inspect() -> list[Finding]:
    """Look at this machine. It starts the CUDA driver, if there is one."""
    found = capabilities()
    return [*_packages(), *_devices(found), *_system(found), *_transports(found)]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _packages() -> list[Finding]:
    release = ".".join(torch.__version__.split(".")[:2])
    wanted = FBGEMM_FOR_TORCH.get(release)
    findings = [
        Finding(
            "torch",
            torch.__version__,
            "" if wanted else f"use one of {', '.join(FBGEMM_FOR_TORCH)}: FBGEMM is built for one release of torch",
        )
    ]
    package = "fbgemm-gpu" if torch.version.cuda else "fbgemm-gpu-cpu"
    fbgemm = _version("fbgemm-gpu") or _version("fbgemm-gpu-cpu")
    fits = fbgemm is not None and (wanted is None or fbgemm.split("+")[0] == wanted)
    findings.append(Finding("FBGEMM", fbgemm or "missing", "" if fits else f"pip install {package}=={wanted}"))
    for name in ("torchrec", "lightning", "lightning-freescale"):
        version = _version(name)
        findings.append(Finding(name, version or "missing", "" if version else f"pip install {name}"))
    return findings


def _devices(found: Capabilities) -> list[Finding]:
    nccl = "not in this torch"
    if found.nccl and torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    reachable = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    rdma = Path("/sys/class/infiniband")
    cards = sorted(card.name for card in rdma.iterdir()) if rdma.is_dir() else []
    return [
        Finding("CUDA driver", found.driver or "none"),
        Finding("CUDA devices", str(found.devices)),
        Finding("peer access", f"{reachable} of {len(pairs)} pairs of devices" if pairs else "no pairs of devices"),
        Finding("NCCL", nccl),
        Finding("RDMA", ", ".join(cards) if cards else "no device"),
    ]


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
        findings.append(Finding(f"transport='auto', {where}", f"{choice.backend}: {choice.reason}"))
    return findings


def main(argv: Sequence[str] | None = None, prog: str = "freescale doctor") -> int:
    """Print the findings. The exit code is 1 if something has to be fixed."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--table", action="store_true", help="also show what transport='auto' chooses elsewhere")
    options = parser.parse_args(argv)
    findings = inspect()
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.name:<{width}}  {finding.value}")
    if options.table:
        print("\ntransport='auto' chooses:")
        for row in choice_rows():
            print(f"  {', '.join(row[:5])}: {row[5]}, {row[6]}")
    to_fix = [finding for finding in findings if finding.fix]
    print("\nTo fix:" if to_fix else "\nNothing to fix.")
    for finding in to_fix:
        print(f"  {finding.name}: {finding.fix}")
    return 1 if to_fix else 0
