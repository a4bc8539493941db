"""Types of the C++ core (csrc). The Python modules that are named below wrap it and document each function."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Reals = NDArray[np.float64]
Marks = NDArray[np.uint8]
Floats = NDArray[np.float32]

# lightning_freescale/runtime/jagged.py
def lengths_to_offsets(lengths: Ints) -> Ints: ...
def gather(values: NDArray, starts: Ints, lengths: Ints) -> NDArray: ...
def permute(values: NDArray, lengths: Ints, order: Ints) -> tuple[NDArray, Ints]: ...
def combine(values: NDArray, lengths: Ints, order: Ints) -> tuple[NDArray, Ints]: ...
def dispatch(values: NDArray, lengths: Ints, ranks: Ints, world: int) -> tuple[NDArray, Ints, Ints, Ints, Ints]: ...
def pack(
    tensors: Sequence[NDArray], columns: Sequence[tuple[int, ...]], lengths: Ints, order: Ints, size: int
) -> NDArray[np.uint8]: ...
def unpack(
    packed: NDArray[np.uint8],
    starts: Ints,
    lengths: Ints,
    columns: Sequence[tuple[int, ...]],
    tensors: Sequence[NDArray],
) -> None: ...

# lightning_freescale/balance/partition.py
def zigzag(costs: Reals, ranks: int) -> Ints: ...
def fixed(costs: Reals, ranks: int) -> Ints: ...
def variable(costs: Reals, ranks: int, tokens: Ints | None, max_tokens: int, shares: Reals | None) -> Ints: ...

# lightning_freescale/runtime/last_resort.py
def arm_last_resort(seconds: float, message: str, connections: list[tuple[int, int]]) -> None: ...
def disarm_last_resort() -> None: ...
def name_crashes(message: str) -> None: ...

# lightning_freescale/embedding/moment_kernel.py
def update_moments(
    values: Floats,
    source: Ints,
    scale: Floats | None,
    rows: Ints,
    order: Ints,
    weights: Floats,
    first: Floats,
    second: Floats,
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    lamb: bool,
) -> None: ...

# lightning_freescale/embedding/owner_counts.py
def count_owners(ids: NDArray[np.integer], block: int, ranks: int) -> list[int]: ...

# lightning_freescale/embedding/cpp_index.py
def exchange_place(
    values: Ints,
    offsets: Ints,
    sample_bounds: Ints,
    first_key: Ints,
    by_owner: Ints,
    unbucketize: Ints | None,
    rank: int,
) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]: ...
def exchange_note(keys: Ints, stamp: int, stamps: Marks) -> None: ...
def exchange_look(
    keys: Ints,
    lookup: Ints,
    wire: Ints,
    shifts: Ints,
    stamps: Marks,
    stamp: int,
    rank: int,
    marks: Marks,
    first: int,
    sent: Marks,
    kept_from: int,
) -> None: ...
def exchange_count(
    marks: Marks,
    first: int,
    received_from: int,
    lookup: Ints,
    receive_start: Ints,
    receive_end: Ints,
    receive_shift: Ints,
    features: int,
    rank: int,
) -> Ints: ...
def exchange_divide(
    marks: Marks,
    first: int,
    received_from: int,
    values: Ints,
    offsets: Ints,
    lookup: Ints,
    counts: Ints,
    unbucketize: Ints | None,
    receive_start: Ints,
    receive_end: Ints,
    receive_shift: Ints,
    features: int,
    rank: int,
) -> tuple[Ints, ...]: ...

# lightning_freescale/embedding/zero_collision/remap.py
def zero_collision_insert(
    identities: Ints, seen: NDArray[np.int32], ids: Ints, layout: tuple[int, ...], policy: int, ttl: int, step: int
) -> tuple[Ints, Ints, Ints, NDArray[np.int32], int, Ints]: ...
def zero_collision_find(identities: Ints, ids: Ints, layout: tuple[int, ...]) -> tuple[Ints, int]: ...

# lightning_freescale/transport/host_staged.py
class TransportDevice:
    @property
    def name(self) -> str: ...

class TransportExchange:
    @property
    def name(self) -> str: ...
    def done(self) -> bool: ...
    def block_stream(self, stream: int) -> None: ...
    def wait(self, seconds: float) -> None: ...

class TransportQueue:
    def __init__(
        self,
        *,
        device: TransportDevice,
        rank: int,
        hosts: list[str],
        high_priority: bool,
        chunk_bytes: int,
        buffer_bytes: int,
        timeout: float,
        bind_to: str,
        secret: str,
        network_threads: int,
        device_rings: bool = False,
        nixl_library: str = "",
        early_flag: bool = False,
    ) -> None: ...
    def address(self) -> str: ...
    def map_device_rings(self, addresses: list[str]) -> str: ...
    def drop_device_rings(self) -> None: ...
    def connect(self, addresses: list[str], check: Callable[[], None]) -> None: ...
    def unlink_segment(self) -> None: ...
    def exchange(
        self,
        kind: str,
        send: list[int],
        send_bytes: list[int],
        receive: list[int],
        receive_bytes: list[int],
        stream: int,
    ) -> TransportExchange: ...
    def failure(self) -> str | None: ...
    def report(self) -> dict[str, int]: ...
    def streams(self) -> tuple[int, int]: ...
    def close(self, seconds: float) -> None: ...

def cuda_device(ordinal: int) -> TransportDevice: ...
def host_device() -> TransportDevice: ...
def cuda_facts() -> tuple[str, int, int]: ...
def shared_memory_free() -> int: ...
def close_sockets_after_fork() -> None: ...
def hmac_sha256(key: bytes, message: bytes) -> bytes: ...
