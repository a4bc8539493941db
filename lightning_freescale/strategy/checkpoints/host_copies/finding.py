"""Finds the newest copy whose files all exist on some host, and fetches the files that this host lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from lightning_freescale.runtime.log import log_once
from lightning_freescale.strategy.checkpoints.folder import raise_together, run_together
from lightning_freescale.strategy.checkpoints.host_copies.file_exchange import FileTransfer, exchange_files
from lightning_freescale.strategy.checkpoints.host_copies.host_folder import HostFolder
from lightning_freescale.strategy.checkpoints.host_copies.hosts import Hosts
from lightning_freescale.strategy.checkpoints.storage import Checksums
from lightning_freescale.strategy.control import Control

FETCHING = "fetching a copy from host memory"


@dataclass
class FoundCopy:
    """A copy whose files all exist undamaged.

    Attributes:
        path: its folder on this host.
        files: size and CRC-32 of the files on all hosts.
        held: for each rank, the files that its host holds.
    """

    step: int
    path: str
    files: Checksums
    held: list[set[str]]


def newest(place: HostFolder, hosts: Hosts, control: Control) -> FoundCopy | None:
    """The newest complete copy; ``None`` if there is none. The log names copies that cannot be used. A collective."""
    listings = control.gather(place.listing() if hosts.leads else {})
    candidates: list[tuple[int, Checksums]] = []
    for listing in listings:
        candidates += [entry for entry in listing.items() if entry not in candidates]
    for step, files in sorted(candidates, key=lambda entry: entry[0], reverse=True):
        own: list[str] = []
        if listings[hosts.leader].get(step) == files:
            own = place.undamaged(step, files, sorted(files)[hosts.place :: len(hosts.own)])
        gathered = control.gather(own)
        held = [{name for rank in ranks for name in gathered[rank]} for ranks in hosts.of_rank]
        missing = files.keys() - set().union(*held)
        if not missing:
            return FoundCopy(step, place.of_step(step), files, held)
        log_once(
            f"copies in host memory: that of step {step} cannot be used. No host has an undamaged {', '.join(sorted(missing))}"
        )
    return None


def fetch(copy: FoundCopy, needed: Iterable[str], place: HostFolder, hosts: Hosts, control: Control) -> None:
    """Bring the files that this rank needs to its host, if the host does not hold them. A collective."""
    run_together(control, lambda: place.adopt(copy.step, copy.files) if hosts.leads else None, FETCHING)
    needs = control.gather(sorted(set(needed) - copy.held[control.rank]))
    transfers = plan_transfers(needs, copy.held, copy.files, hosts)
    raise_together(control, exchange_files(transfers, copy.path, copy.files, control), FETCHING)
    for transfer in transfers:
        for rank in hosts.of_rank[transfer.target]:
            copy.held[rank].add(transfer.name)


def plan_transfers(
    needs: Sequence[Sequence[str]], held: Sequence[set[str]], files: Checksums, hosts: Hosts
) -> list[FileTransfer]:
    """Which rank sends which file, so that each host gets each file once, and the senders share the work.

    Args:
        needs: for each rank, the files that its host lacks.
        held: for each rank, the files that its host holds.
    """
    sent = [0] * len(needs)  # bytes
    transfers = []
    for ranks in hosts.all:
        receivers: dict[str, int] = {}
        for rank in ranks:
            for name in needs[rank]:
                receivers.setdefault(name, rank)
        for name, target in sorted(receivers.items()):
            source = min((rank for rank in range(len(held)) if name in held[rank]), key=lambda rank: sent[rank])
            sent[source] += files[name][0]
            transfers.append(FileTransfer(source, target, name))
    return transfers


def needed_files(metadata: Metadata, state: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """The files that hold a part of this rank's shards.

    Args:
        metadata: of the copy.
        state: the sharded tensors that are to be filled, by part and name.
    """
    found = set()
    for part, tensors in state.items():
        for name, value in tensors.items():
            key = f"{part}.{name}"
            stored = metadata.state_dict_metadata.get(key)
            if not isinstance(stored, TensorStorageMetadata):
                continue  # The copy is of another model. The load says so.
            for chunk in stored.chunks:
                if any(_overlap(chunk, shard.metadata) for shard in value.local_shards()):
                    found.add(metadata.storage_data[MetadataIndex(key, chunk.offsets)].relative_path)
    return found


def _overlap(chunk: Any, shard: Any) -> bool:
    ends = zip(chunk.offsets, chunk.sizes, shard.shard_offsets, shard.shard_sizes, strict=True)
    return all(a < b + length and b < a + size for a, size, b, length in ends)
