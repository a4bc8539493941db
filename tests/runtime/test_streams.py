"""Copies to the host beside the work of a stream."""

from __future__ import annotations

import pytest
import torch

from lightning_freescale.runtime.streams import Readback, SideStream, copy_to_host

LONG = 200_000_000  # clock cycles of the GPU, about a tenth of a second


def launch_once() -> None:
    """Launch every kernel of the tests below. The first launch of a kernel loads it, and may wait for all streams."""
    value = torch.ones(3, device="cuda")
    torch.cuda._sleep(1)
    readback, copied = Readback(value), value.to("cpu", non_blocking=True)
    value.add_(1)
    torch.cuda.synchronize()
    assert readback.wait().tolist() == copied.tolist() == [1.0] * 3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_readback_has_the_value_of_its_moment(device: str) -> None:
    value = torch.ones(3, device=device)
    before = Readback(value)
    value.add_(1)
    after = Readback(value)
    assert before.wait().tolist() == [1.0] * 3
    assert after.wait().tolist() == [2.0] * 3
    assert before.arrived()
    assert after.wait().device.type == "cpu"


@pytest.mark.alone  # The kernel on the one stream must still run when the work on the other has ended.
@pytest.mark.gpu
def test_a_stream_goes_on_while_a_copy_of_its_value_waits() -> None:
    launch_once()
    value = torch.ones(3, device="cuda")
    _, copies = copy_to_host(value)
    with torch.cuda.stream(copies):  # The kernel stands for a transfer that the copy engine has to finish first.
        torch.cuda._sleep(LONG)
    readback = Readback(value)
    with torch.cuda.stream(copies):
        too_late = value.to("cpu", non_blocking=True)  # The comparison can fail: this copies the tensor itself.
    value.add_(1)
    computed = torch.cuda.current_stream().record_event()
    computed.synchronize()
    assert not readback.arrived()
    assert readback.wait().tolist() == [1.0] * 3
    torch.cuda.synchronize()
    assert too_late.tolist() == [2.0] * 3


@pytest.mark.alone  # The kernel on the one stream must still run when the work on the other has ended.
@pytest.mark.gpu
def test_a_value_of_a_side_stream_does_not_wait_for_the_compute() -> None:
    launch_once()
    side = SideStream(torch.device("cuda"))
    value = torch.ones(3, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    computed = Readback(value)
    with side.work():
        found = Readback(value)
    assert found.wait().tolist() == [1.0] * 3
    assert not computed.arrived()
    assert computed.wait().tolist() == [1.0] * 3
