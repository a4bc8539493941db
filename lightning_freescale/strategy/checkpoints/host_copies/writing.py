"""Writes a copy of the training state to the memory of two hosts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_freescale.runtime.log import log_once
from lightning_freescale.strategy.checkpoints import folder, storage
from lightning_freescale.strategy.checkpoints.device_copy import device_bytes
from lightning_freescale.strategy.checkpoints.folder import raise_together, run_together
from lightning_freescale.strategy.checkpoints.host_copies.file_exchange import FileTransfer, exchange_files
from lightning_freescale.strategy.checkpoints.host_copies.host_folder import HostFolder
from lightning_freescale.strategy.checkpoints.host_copies.hosts import Hosts
from lightning_freescale.strategy.control import Control

MIB = 1 << 20


def write(
    place: HostFolder, step: int, sharded: Mapping[str, Any], meta: Mapping[str, Any], hosts: Hosts, control: Control
) -> None:
    """Write the copy of ``step``. A collective of the ranks of ``control``.

    A rank that dies meanwhile leaves the copy before this one complete on all other hosts.

    Args:
        sharded: the shards of this rank in host memory, by part and name.
        meta: Lightning's entries and the weights that are not sharded; rank 0 writes them.
    """
    where = f"copying step {step} to {place.path}"
    partial = run_together(control, lambda: place.prepare(step) if hosts.leads else "", where)
    partial = control.gather(partial)[hosts.leader]
    sizes = control.gather(device_bytes((sharded, meta), "cpu"))
    needed = bytes_on_hosts(sizes, hosts)
    run_together(control, lambda: place.check_space(needed[hosts.leader]), where)
    if not place.described:
        place.described = True
        log_once(describe(place, sizes, needed))
    folder.write_tensors(partial, sharded, control, where)
    own = run_together(control, lambda: _finish_own(partial, meta, control.rank), where)
    gathered = control.gather(own)
    files = {name: entry for part in gathered for name, entry in part.items()}
    transfers = [
        FileTransfer(source, target, name)
        for source, target in hosts.peers().items()
        for name in sorted(gathered[source])
    ]
    raise_together(control, exchange_files(transfers, partial, files, control), where)
    run_together(control, lambda: place.commit(step, files) if hosts.leads else None, where)


def _finish_own(partial: str, meta: Mapping[str, Any], rank: int) -> storage.Checksums:
    """Write what belongs to this rank beside its shards. Return its files."""
    names = [path.name for path in Path(partial).glob(f"__{rank}_*")]
    if rank == 0:
        torch.save(dict(meta), Path(partial) / storage.META)
        names += [storage.META, storage.METADATA]
    return {name: storage.checksum(storage.join(partial, name)) for name in names}


def bytes_on_hosts(sizes: list[int], hosts: Hosts) -> dict[int, int]:
    """How many bytes a copy takes on each host, by the first rank of the host.

    Args:
        sizes: the bytes of each rank's own part.
    """
    peers = hosts.peers()
    return {
        ranks[0]: sum(sizes[rank] for rank in ranks)
        + sum(sizes[source] for source, target in peers.items() if target in ranks)
        for ranks in hosts.all
    }


def describe(place: HostFolder, sizes: list[int], needed: Mapping[int, int]) -> str:
    """What copies take, for the log."""
    total, most = (f"{2 * size / MIB:,.1f} MiB" for size in (sum(needed.values()), max(needed.values())))
    where = f"on {len(needed)} hosts, each part on two of them" if len(needed) > 1 else "on one host"
    alone = "" if len(needed) > 1 else ". All ranks share this host, so its loss is the loss of the copies"
    return (
        f"copies in host memory: a copy of the training state has {sum(sizes) / MIB:,.1f} MiB. It lies {where}, in "
        f"{place.path}. Two copies take {total} in total, and at most {most} of a host{alone}"
    )
