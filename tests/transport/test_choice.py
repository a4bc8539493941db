"""What the transport reports about a machine, and which backend it chooses. These tests need no GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_freescale import ConfigurationError
from lightning_freescale.transport import Capabilities, capabilities, choose
from lightning_freescale.transport.addresses import host_id
from lightning_freescale.transport.groups import NCCL_CTAS, chosen_ctas, fitting_ctas, nccl_options
from tests.ranks import run_ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def _inspect(rank: int) -> Capabilities:
    return capabilities()


def test_capabilities_say_why_a_machine_is_not_sm_free() -> None:
    if torch.cuda.is_available():
        pytest.skip("for machines without CUDA")
    (found,) = run_ranks(_inspect, 1)  # in a separate process, because it looks for a driver and remembers the result
    assert not found.sm_free
    assert "libcuda.so.1" in found.reason or "CUDA" in found.reason
    assert found.shared_memory_bytes > 0
    assert found.host == host_id()


def test_the_host_id_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREESCALE_HOST_ID", "node7")
    assert host_id() == "node7"


@pytest.mark.parametrize(
    ("transport", "device", "overlapped", "sm_free_here", "expected"),
    [
        ("auto", CPU, True, False, ("gloo", False)),
        ("host", CPU, True, False, ("freescale", False)),
        ("gloo", CUDA, True, True, ("gloo", False)),
        ("nccl", CUDA, True, True, ("nccl", False)),
        ("host", CUDA, False, True, ("freescale", True)),
        ("auto", CUDA, True, True, ("freescale", True)),
        ("auto", CUDA, False, True, ("nccl", False)),
        ("auto", CUDA, True, False, ("nccl", False)),
    ],
)
def test_the_backend_that_is_chosen(
    transport: str,
    device: torch.device,
    overlapped: bool,
    sm_free_here: bool,
    expected: tuple[str, bool],
) -> None:
    found = Capabilities(sm_free_here, "no driver", None, 1, 1 << 30, "host", nccl=True)
    choice = choose(transport, device, overlapped=overlapped, found=found)  # type: ignore[arg-type]
    assert (choice.backend, choice.sm_free) == expected
    assert choice.reason
    if transport == "auto" and device == CUDA and not sm_free_here:
        assert "no driver" in choice.reason  # the reason of a fallback is given


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="transport='nccl'"):
        choose("nccl", CPU, overlapped=True)
    with pytest.raises(ConfigurationError, match="transport='pigeon'"):
        choose("pigeon", CPU, overlapped=True)  # type: ignore[arg-type]
    found = Capabilities(False, "no driver", None, 0, 0, "host", nccl=True)
    with pytest.raises(ConfigurationError, match="transport='host' cannot run here: no driver"):
        choose("host", CUDA, overlapped=True, found=found)


def test_auto_is_nccl_on_several_hosts() -> None:
    found = Capabilities(True, "", "13.0", 1, 1 << 30, "host", nccl=True)
    choice = choose("auto", CUDA, overlapped=True, one_host=False, found=found)
    assert (choice.backend, choice.sm_free) == ("nccl", False)
    assert "several hosts" in choice.reason
    assert "not looked for" in choice.reason  # it says why there is no RDMA


@pytest.mark.parametrize(
    ("one_host", "peer_access", "no_rdma", "engine", "sm_free"),
    [
        (True, False, "no device", "host staging", True),
        (True, True, "no device", "peer copies", False),
        (False, True, "", "host staging over NIXL", True),
        (False, True, "no device", "host staging over TCP", True),
    ],
)
def test_the_engine_follows_from_the_machine(
    one_host: bool, peer_access: bool, no_rdma: str, engine: str, sm_free: bool
) -> None:
    found = Capabilities(True, "", "13.0", 2, 1 << 30, "host", True, peer_access, no_rdma)
    choice = choose("host", CUDA, overlapped=True, one_host=one_host, found=found)
    assert (choice.backend, choice.engine, choice.sm_free) == ("freescale", engine, sm_free)


@pytest.mark.parametrize(("text", "expected"), [(None, None), ("1", 1), ("8", 8)])
def test_the_limit_of_nccl_ctas(text: str | None, expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NCCL_CTAS, raising=False)
    if text is not None:
        monkeypatch.setenv(NCCL_CTAS, text)
    assert chosen_ctas() == expected
    if dist.is_nccl_available():
        hidden, urgent = nccl_options("low", beside_compute=True, sms=132), nccl_options("high", False, sms=132)
        assert hidden.config.max_ctas == (expected or 16)
        assert urgent.config.max_ctas == 16
        assert urgent.is_high_priority_stream
        assert not hidden.is_high_priority_stream


@pytest.mark.parametrize("text", ["0", "-1", "some", ""])
def test_a_limit_of_nccl_ctas_that_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NCCL_CTAS, text)
    with pytest.raises(ConfigurationError, match=f"environment variable {NCCL_CTAS}='?{text}'?"):
        chosen_ctas()


@pytest.mark.parametrize("sms", range(1, 200))
def test_kernels_of_all_groups_fit_on_the_gpu(sms: int) -> None:
    """Four groups take half of the SMs at most, and more than a quarter, unless the GPU is tiny."""
    most = fitting_ctas(sms)
    assert most.bit_count() == 1
    assert 4 * most <= sms / 2 or most == 1
    assert 4 * most > sms / 4
