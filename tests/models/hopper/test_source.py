"""What can be checked without a GPU: that the kernels compile without spills, and the schedules."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.models.hopper.loading import EDGES, FOLDER, hopper, make
from tests.slow import slow


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(
    ("width", "bias"), [slow(32, False), slow(64, False), slow(128, False), slow(64, True), (128, True)]
)
def test_kernels_compile_without_spills(width: int, bias: bool, tmp_path: Path) -> None:
    options = hopper.config.config(width, width, False, bias).options()
    target = ["-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-Xptxas", "-v"]
    command = ["nvcc", *target, "-cubin", "-o", str(tmp_path / "kernels.cubin"), *options, str(FOLDER / "kernels.cu")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    assert "Potential Performance Loss" not in log  # register limits ignored, or products one after the other
    spills = re.findall(r"(\d+) bytes spill stores", log)
    assert len(spills) == 5
    assert set(spills) == {"0"}


def test_all_sources_are_listed() -> None:
    """The name of a compiled kernel depends on the sources listed; all of them must be."""
    found = {path.name for path in FOLDER.iterdir() if path.suffix in (".cu", ".cuh")}
    assert set(hopper.compiler.SOURCES) == found


@pytest.mark.parametrize("keys", [False, True])
def test_schedule(keys: bool) -> None:
    lengths = [0, 5, 128, 129, 0, 700, 1]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    plan = hopper.plan(offsets, sum(lengths))
    rows = plan.schedule(128, 64, keys).tolist()
    used = [row for row in rows if row[1]]
    assert all(not row[1] for row in rows[len(used) :])
    first_tiles = torch.tensor([0] + [-(-n // 64) for n in lengths]).cumsum(0).tolist()
    want = [
        [offsets[sample].item(), n, row, first_tiles[sample]]
        for sample, n in enumerate(lengths)
        for row in range(0, n, 128)
    ]
    assert sorted(used) == sorted(want)
    work = [row[1] - row[2] if keys else row[2] for row in used]
    assert work == sorted(work, reverse=True)


def test_earlier_key_tiles_come_first() -> None:
    """A block of the backward kernel waits for the key tiles before its own, so these must have smaller tickets."""
    lengths = [700, 700, 1000, 128]
    plan = hopper.plan(torch.tensor([0, *lengths]).cumsum(0), sum(lengths))
    seen: dict[int, int] = {}
    for start, length, row, _ in plan.schedule(128, 64, True).tolist():
        if length:
            assert seen.get(start, -1) < row
            seen[start] = row


def test_records() -> None:
    """Times of 64 events each; behind the end of a history its last time is repeated."""
    lengths = [0, 65, 0, 2]
    times = torch.arange(100, 167, dtype=torch.int32)
    times[3] = -7
    plan = hopper.plan(torch.tensor([0, *lengths]).cumsum(0), 67, times, EDGES)
    first, second, third = plan.records()[:3].tolist()
    assert first == [*times[:64].tolist(), 0, 0, -7, 163]
    assert second == [164] * 64 + [64, 64, 164, 164]
    assert third == [165] + [166] * 63 + [0, 0, 165, 166]
    assert len(plan.records()) >= 4  # a kernel may read one record more


def test_scale() -> None:
    plan = hopper.plan(torch.tensor([0, 0, 3, 3, 5]), 5)
    assert plan.scale().tolist() == pytest.approx([1, 1 / 2, 1 / 3, 1, 1 / 2])


def test_no_events() -> None:
    assert len(hopper.plan(torch.tensor([0, 0]), 0).schedule(128, 64, False)) == 0


def test_unsupported_inputs() -> None:
    inputs = make([3], device="cpu")
    assert hopper.supports(*inputs[:3]) is None
    assert "types" in hopper.supports(inputs.q.float(), inputs.k, inputs.v)
    assert "widths" in hopper.supports(inputs.q[..., :24], inputs.k[..., :24], inputs.v)
    with pytest.raises(ValueError, match="types"):
        hopper.attention(*(x.float() for x in inputs[:3]), inputs.offsets, 1.0)
