"""The C++ functions on jagged arrays, compared with slow references that move one sample at a time."""

from __future__ import annotations

import doctest
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_freescale.runtime import jagged

DTYPES = [np.int8, np.int32, np.int64, np.float16, np.float32, np.float64, np.complex128, np.bool_, np.dtype("S3")]


def split(values: NDArray, lengths: NDArray) -> list[NDArray]:
    return np.split(values, np.cumsum(lengths))[:-1]


def join(samples: list[NDArray], like: NDArray) -> NDArray:
    return np.concatenate([like[:0], *samples])


def reference_permute(values: NDArray, lengths: NDArray, order: NDArray) -> tuple[NDArray, NDArray]:
    samples = split(values, lengths)
    return join([samples[i] for i in order], values), lengths[order]


def reference_combine(values: NDArray, lengths: NDArray, order: NDArray) -> tuple[NDArray, NDArray]:
    placed: list[Any] = [None] * len(lengths)
    for sample, position in zip(split(values, lengths), order, strict=True):
        placed[position] = sample
    return join(placed, values), np.array([len(sample) for sample in placed], dtype=np.int64)


def reference_dispatch(values: NDArray, lengths: NDArray, ranks: NDArray, world: int) -> jagged.Dispatch:
    order = np.array([i for rank in range(world) for i in range(len(ranks)) if ranks[i] == rank], dtype=np.int64)
    moved, new_lengths = reference_permute(values, lengths, order)
    samples = np.array([(ranks == rank).sum() for rank in range(world)])
    rows = np.array([lengths[ranks == rank].sum() for rank in range(world)])
    return jagged.Dispatch(moved, new_lengths, order, samples, rows)


@st.composite
def jagged_arrays(draw: st.DrawFn) -> tuple[NDArray, NDArray]:
    """``(values [T] or [T, k], lengths [n])`` of any dtype, with empty samples and empty batches."""
    lengths = np.array(draw(st.lists(st.integers(0, 6), max_size=12)), dtype=np.int64)
    shape = (int(lengths.sum()), *draw(st.sampled_from([(), (1,), (3,), (2, 2), (0,)])))
    numbers = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 100, size=shape)
    return numbers.astype(draw(st.sampled_from(DTYPES))), lengths


def assert_same(actual: NDArray, expected: NDArray) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.tobytes() == expected.tobytes()


@given(jagged_arrays(), st.randoms(use_true_random=False))
def test_permute_and_combine_equal_their_references(batch: tuple[NDArray, NDArray], random: Any) -> None:
    values, lengths = batch
    order = np.array(random.sample(range(len(lengths)), len(lengths)), dtype=np.int64)
    for kernel, reference in [(jagged.permute, reference_permute), (jagged.combine, reference_combine)]:
        for actual, expected in zip(kernel(values, lengths, order), reference(values, lengths, order), strict=True):
            assert_same(actual, expected)
    restored = jagged.combine(*jagged.permute(values, lengths, order), order)
    assert_same(restored[0], values)
    assert_same(restored[1], lengths)


@given(jagged_arrays(), st.integers(1, 5), st.integers(0, 99))
def test_dispatch_equals_its_reference_and_combine_undoes_it(
    batch: tuple[NDArray, NDArray], world: int, seed: int
) -> None:
    values, lengths = batch
    ranks = np.random.default_rng(seed).integers(0, world, size=len(lengths))
    moved = jagged.dispatch(values, lengths, ranks, world)
    for actual, expected in zip(moved, reference_dispatch(values, lengths, ranks, world), strict=True):
        assert_same(actual, expected)
    restored = jagged.combine(moved.values, moved.lengths, moved.order)
    assert_same(restored[0], values)
    assert_same(restored[1], lengths)


@given(jagged_arrays(), st.data())
def test_gather_equals_slices_that_may_overlap(batch: tuple[NDArray, NDArray], data: st.DataObject) -> None:
    values, _ = batch
    rows = len(values)
    slices = data.draw(
        st.lists(st.integers(0, rows).flatmap(lambda s: st.tuples(st.just(s), st.integers(0, rows - s))))
    )
    starts, lengths = [s for s, _ in slices], [n for _, n in slices]
    expected = join([values[s : s + n] for s, n in slices], values)
    assert_same(jagged.gather(values, starts, lengths), expected)


@given(st.lists(st.integers(0, 2**40), max_size=20))
def test_offsets_equal_cumsum(lengths: list[int]) -> None:
    assert jagged.lengths_to_offsets(lengths).tolist() == [0, *np.cumsum(lengths, dtype=np.int64)]


def test_the_comparison_can_fail() -> None:
    values, lengths, order = np.arange(3), np.array([1, 2]), np.array([1, 0])
    with pytest.raises(AssertionError):
        assert_same(jagged.permute(values, lengths, order)[0], values)


def test_gather_reads_a_read_only_memory_map_in_place(tmp_path: Path) -> None:
    rows, row_bytes = 2**28, 16  # 4 GiB, sparse on disk: a copy of all of it would show in the resident memory
    path = tmp_path / "histories.bin"
    with path.open("wb") as file:
        file.truncate(rows * row_bytes)
        file.seek((rows - 2) * row_bytes)
        file.write(np.arange(4, dtype=np.int64).tobytes())
    histories = np.memmap(path, dtype=np.int64, mode="r", shape=(rows, 2))
    before = _resident_pages()
    out = jagged.gather(histories, [rows - 2, 0], [2, 1])
    assert out.tolist() == [[0, 1], [2, 3], [0, 0]]
    assert type(out) is np.ndarray
    assert _resident_pages() - before < 2**14


def _resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def _another_thread_ran_during(work: Callable[[], object]) -> bool:
    """Whether another thread that waits for the GIL gets it before ``work`` ends."""
    ran: list[bool] = []
    gate = threading.Lock()
    gate.acquire()
    waiter = threading.Thread(target=lambda: ran.append(gate.acquire()))
    waiter.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # from now on a thread keeps the GIL until it releases it itself
    try:
        gate.release()
        work()
        return bool(ran)
    finally:
        sys.setswitchinterval(interval)
        waiter.join()


def test_the_gil_is_free_during_a_copy() -> None:
    values = np.zeros(2**27, dtype=np.int8)
    assert not _another_thread_ran_during(lambda: sum(range(10**6)))  # the check can fail
    assert any(_another_thread_ran_during(lambda: jagged.gather(values, [0], [len(values)])) for _ in range(10))


def test_indices_may_have_any_integer_dtype() -> None:
    values = np.arange(3)
    for dtype in (np.int32, np.uint8, np.int64):
        moved, lengths = jagged.permute(values, np.array([1, 2], dtype=dtype), np.array([1, 0], dtype=dtype))
        assert moved.tolist() == [1, 2, 0]
        assert lengths.dtype == np.int64


def reference_pack(tensors: list[NDArray], columns: list, lengths: NDArray, order: NDArray) -> bytes:
    parts = []  # for each key of each tensor, the rows of each sample
    for tensor, own in zip(tensors, columns, strict=True):
        by_key = np.split(tensor, np.cumsum(lengths[:, list(own)].sum(axis=0))[:-1])
        parts += [split(rows, lengths[:, column]) for rows, column in zip(by_key, own, strict=True)]
    return b"".join(part[sample].tobytes() for sample in order for part in parts)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.just(1)), max_size=6),
    kinds=st.lists(
        st.tuples(
            st.sampled_from([(0,), (1,), (-1,), (2,), (0, 1), (1, 0, 2)]),
            st.sampled_from([(), (3,), (2, 2), (0,)]),
            st.sampled_from(DTYPES),
        ),
        max_size=4,
    ),
    random=st.randoms(use_true_random=False),
)
def test_pack_equals_its_reference_and_unpack_undoes_it(lengths: list, kinds: list, random: Any) -> None:
    table = np.array(lengths, dtype=np.int64).reshape(-1, 3)
    columns = [own for own, _, _ in kinds]
    tensors = [
        np.random.default_rng(random.randrange(99))
        .integers(0, 100, size=(table[:, list(own)].sum(), *shape))
        .astype(dtype)
        for own, shape, dtype in kinds
    ]
    order = np.array(random.sample(range(len(table)), len(table)), dtype=np.int64)
    expected = reference_pack(tensors, columns, table, order)
    packed = jagged.pack(tensors, columns, table, order, len(expected))
    assert packed.tobytes() == expected
    sizes = [len(reference_pack(tensors, columns, table, np.array([sample]))) for sample in order]
    starts = np.empty(len(table), dtype=np.int64)
    starts[order] = jagged.lengths_to_offsets(sizes)[:-1]
    copies = [np.zeros_like(tensor) for tensor in tensors]
    jagged.unpack(packed, starts, table, columns, copies)
    for copy, tensor in zip(copies, tensors, strict=True):
        assert_same(copy, tensor)
    half = order[: len(order) // 2]
    expected = reference_pack(tensors, columns, table, half)
    assert jagged.pack(tensors, columns, table, half, len(expected)).tobytes() == expected


V = np.arange(6)
TABLE = np.array([[2, 1], [4, 1]])
PAIR = np.arange(2)
BYTES = np.zeros(6, dtype=np.uint8)


def read_only() -> NDArray:
    values = np.zeros(6, dtype=np.int8)
    values.flags.writeable = False
    return values


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jagged.lengths_to_offsets([1, -2]), r"lengths\[1\] = -2 is negative"),
        (lambda: jagged.lengths_to_offsets([2**62, 2**62]), "lengths: their sum does not fit"),
        (lambda: jagged.lengths_to_offsets([1.5]), "lengths: dtype float64 is not an integer"),
        (lambda: jagged.lengths_to_offsets([[1]]), "lengths: must be 1-D, not 2-D"),
        (lambda: jagged.gather(V, [-1], [1]), r"starts\[0\] = -1 is negative"),
        (lambda: jagged.gather(V, [0], [-1]), r"lengths\[0\] = -1 is negative"),
        (lambda: jagged.gather(V, [0, 4], [1, 3]), r"starts\[1\] = 4 with lengths\[1\] = 3 ends past the 6 rows"),
        (lambda: jagged.gather(V, [7], [0]), r"starts\[0\] = 7 .* past the 6 rows"),
        (lambda: jagged.gather(V, [1], [2**63 - 1]), r"lengths\[0\] = 9223372036854775807 ends past"),
        (lambda: jagged.gather(V, [1, 2], [1]), "starts: 2 entries, but lengths has 1"),
        (lambda: jagged.gather(np.arange(6).reshape(2, 3).T, [0], [1]), "values: must be C-contiguous"),
        (lambda: jagged.gather(np.array(["a", None], dtype=object), [0], [1]), "values: dtype object"),
        (lambda: jagged.gather(np.array(3), [0], [1]), "values: must have at least one dimension"),
        (lambda: jagged.permute(V, [2, 3], [1, 0]), "lengths: they sum to 5, but values has 6 rows"),
        (lambda: jagged.permute(V, [2, 4], [0, 2]), r"order\[1\] = 2 is outside 0 .. 1"),
        (lambda: jagged.permute(V, [2, 4], [-1, 0]), r"order\[0\] = -1 is outside"),
        (lambda: jagged.permute(V, [2, 4], [1, 1]), r"order\[1\] = 1 repeats order\[0\] = 1"),
        (lambda: jagged.permute(V, [2, 4], [0]), "order: 1 entries, but lengths has 2"),
        (lambda: jagged.combine(V, [2, 4], [0, 0]), r"order\[1\] = 0 repeats"),
        (lambda: jagged.combine(V, [2, 4], [0]), "order: 1 entries, but lengths has 2"),
        (lambda: jagged.dispatch(V, [2, 4], [0, 2], 2), r"ranks\[1\] = 2 is outside 0 .. 1"),
        (lambda: jagged.dispatch(V, [2, 4], [0], 2), "ranks: 1 entries, but lengths has 2"),
        (lambda: jagged.dispatch(V, [2, 4], [0, 0], 0), "world = 0 must be at least 1"),
        (lambda: jagged.dispatch(V, [2, 5], [0, 0], 1), "lengths: they sum to 7"),
        (lambda: jagged.pack([V], [(0,)], TABLE, PAIR, 47), "packed: 47 bytes do not fit the samples"),
        (lambda: jagged.pack([V], [(0,)], TABLE, PAIR, 49), "packed: 49 bytes do not fit the samples"),
        (lambda: jagged.pack([V], [(0,)], TABLE, PAIR, -1), "size = -1 is negative"),
        (lambda: jagged.pack([V], [(0,)], TABLE, np.array([0, 2]), 48), r"order\[1\] = 2 is outside 0 .. 1"),
        (lambda: jagged.pack([V], [(1,)], TABLE, PAIR, 16), "lengths: they do not sum to the 6 rows of tensor 0"),
        (lambda: jagged.pack([V], [(0, 1)], TABLE, PAIR, 64), "lengths: they do not sum to the 6 rows of tensor 0"),
        (lambda: jagged.pack([V], [(2,)], TABLE, PAIR, 48), r"columns\[0\] = 2 is outside the 2 columns of lengths"),
        (lambda: jagged.pack([V], [], TABLE, PAIR, 48), "columns: 0 entries, but there are 1 tensors"),
        (lambda: jagged.pack([V], [(0,)], -TABLE, PAIR, 48), r"lengths\[0\] = -2 is negative"),
        (lambda: jagged.pack([V], [(0,)], TABLE[0], PAIR, 48), "lengths: must be 2-D, not 1-D"),
        (lambda: jagged.unpack(BYTES, PAIR[:1], TABLE, [(0,)], [BYTES.copy()]), "starts: 1 entries, but lengths has 2"),
        (
            lambda: jagged.unpack(BYTES, PAIR + 2, TABLE, [(0,)], [BYTES.copy()]),
            r"starts\[1\] = 3: the sample is not within the 6",
        ),
        (
            lambda: jagged.unpack(BYTES, PAIR - 1, TABLE, [(0,)], [BYTES.copy()]),
            r"starts\[0\] = -1: the sample is not within",
        ),
        (lambda: jagged.unpack(BYTES, PAIR, TABLE, [(0,)], [read_only()]), "not writeable"),
    ],
)
def test_errors_name_the_bad_argument_and_its_value(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_the_documented_example_prints_what_it_says() -> None:
    assert doctest.testmod(jagged) == (0, 11)
