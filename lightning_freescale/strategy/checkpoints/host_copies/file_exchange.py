"""Files on their way between the hosts, in parts, so that few of their bytes are in flight at a time."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.runtime.errors import CheckpointError
from lightning_freescale.strategy.checkpoints.storage import Checksums
from lightning_freescale.strategy.control import Control

PART_BYTES = 4 << 20  # A rank has one part in flight for each rank with which it exchanges files.


class FileTransfer(NamedTuple):
    """A file that one rank sends to another one."""

    source: int
    target: int
    name: str


def exchange_files(
    transfers: Sequence[FileTransfer], folder: str, files: Checksums, control: Control
) -> Exception | None:
    """Send and receive the files in ``folder`` of this rank's host. A collective.

    In each round, every rank sends and receives one part on each of its connections, and then waits for them. Both ends of a
    connection count the same rounds, so no rank waits for one that waits for it.

    Args:
        transfers: of all ranks, in the same order on all ranks.
        files: size and CRC-32 of each file.

    Returns:
        The first error that concerns the files of this rank. The transfers go on after it, because other ranks take part in them.
    """
    problems: list[Exception] = []
    streams: dict[tuple[int, int], Iterator[Tensor]] = {}
    for source, target in dict.fromkeys((transfer.source, transfer.target) for transfer in transfers):
        names = [transfer.name for transfer in transfers if (transfer.source, transfer.target) == (source, target)]
        if control.rank == source:
            streams[source, target] = _outgoing(folder, names, files, problems)
        elif control.rank == target:
            streams[source, target] = _incoming(folder, names, files, problems)
    while streams:
        parts = {ends: part for ends, stream in streams.items() if (part := next(stream, None)) is not None}
        streams = {ends: streams[ends] for ends in parts}
        try:
            started = [
                dist.isend(part, dst=target, group=control.group)
                if control.rank == source
                else dist.irecv(part, src=source, group=control.group)
                for (source, target), part in parts.items()
            ]
            for work in started:
                assert work is not None
                work.wait()
        except RuntimeError as error:
            raise control.missing_ranks("the files of a copy in host memory", error) from error
    return problems[0] if problems else None


def _sizes(files: Checksums, name: str) -> Iterator[int]:
    """The sizes of the parts of a file."""
    size = files[name][0]
    for begin in range(0, size, PART_BYTES):
        yield min(PART_BYTES, size - begin)


def _outgoing(folder: str, names: Sequence[str], files: Checksums, problems: list[Exception]) -> Iterator[Tensor]:
    """The parts of files that this rank sends. In place of bytes that cannot be read, zeros are sent."""
    for name in names:
        stream = _open(Path(folder) / name, "rb", problems)
        for size in _sizes(files, name):
            content = b""
            try:
                content = stream.read(size) if stream is not None else b""
            except OSError as error:
                problems.append(error)
            yield torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)
        if stream is not None:
            stream.close()


def _incoming(folder: str, names: Sequence[str], files: Checksums, problems: list[Exception]) -> Iterator[Tensor]:
    """Buffers for the parts of files that this rank receives. A part is written when the next buffer is asked for."""
    for name in names:
        stream, crc = _open(Path(folder) / name, "wb", problems), 0
        for size in _sizes(files, name):
            part = torch.empty(size, dtype=torch.uint8)
            yield part
            crc = zlib.crc32(part.numpy(), crc)
            try:
                if stream is not None:
                    stream.write(part.numpy())
            except OSError as error:
                problems.append(error)
        if stream is not None:
            stream.close()
        if crc != files[name][1]:
            problems.append(
                CheckpointError(f"{folder}/{name} has arrived with CRC {crc:08x}, not {files[name][1]:08x}")
            )


def _open(path: Path, mode: str, problems: list[Exception]) -> IO[bytes] | None:
    try:
        return path.open(mode)
    except OSError as error:
        problems.append(error)
        return None
