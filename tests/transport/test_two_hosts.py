"""Two network namespaces as two hosts: the queue over TCP and over NIXL between them, and a link that goes down in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.transport import TransportError
from tests.ranks import run_ranks
from tests.transport.collectives import all_to_all_case, same_bits
from tests.transport.networks import use_network

QUEUE = {"cpu": "queue", "chunk_bytes": 4096, "buffer_bytes": 1 << 20}
ADDRESSES = ["10.213.0.1", "10.213.0.2"]
LINK = "freescale-1"  # the end of the link on the second host
BUSY_SECONDS = 20  # A busy machine may add this time. A host that waits for the network alone takes minutes.


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"needs the right to make network namespaces: ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    names = [f"freescale-{os.getpid()}-{host}" for host in range(2)]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", "freescale-0", "netns", names[0], "type", "veth", "peer", "name", LINK, "netns", names[1])
        for host, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"{ADDRESSES[host]}/24", "dev", f"freescale-{host}")
            _ip("-n", name, "link", "set", f"freescale-{host}", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def enter(name: str) -> None:
    with open(f"/run/netns/{name}") as namespace:
        import ctypes

        assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0x40000000) == 0  # CLONE_NEWNET


def _see_own_link(link: str) -> None:
    """Mount a /sys that shows the links of this network namespace, where UCX looks for them, and wait until it is up."""
    import ctypes

    assert ctypes.CDLL(None, use_errno=True).unshare(0x00020000) == 0  # CLONE_NEWNS
    for command in (["mount", "--make-rprivate", "/"], ["mount", "-t", "sysfs", "x", "/sys"]):
        subprocess.run(command, check=True, capture_output=True)
    deadline = time.monotonic() + 10
    while Path(f"/sys/class/net/{link}/operstate").read_text().strip() != "up":
        assert time.monotonic() < deadline, f"{link} does not come up"
        time.sleep(0.02)


def _on_two_hosts(rank: int, hosts: list[str], cut: bool) -> str:
    enter(hosts[rank])
    if os.environ["FREESCALE_NETWORK"] == "nixl":
        _see_own_link(f"freescale-{rank}")
    os.environ["FREESCALE_HOST_ID"] = f"host{rank}"
    os.environ["FREESCALE_SECRET"] = "0123456789abcdef"
    # As torchrun on the first host may: the master's own name leads to its loopback interface.
    os.environ["MASTER_ADDR"] = "localhost" if rank == 0 else ADDRESSES[0]
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("0.0.0.0" if rank == 0 else ADDRESSES[0], port, 2, rank == 0, timedelta(seconds=20))
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["UCX_NET_DEVICES"] = f"freescale-{rank}"
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    group: Any = dist.new_group(backend="freescale", pg_options=QUEUE, timeout=timedelta(seconds=6))
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    for seed in range(20):
        source, in_splits, out_splits, right = all_to_all_case(rank, 2, seed, torch.float32, width=500)
        output = torch.empty_like(right)
        dist.all_to_all_single(output, source, out_splits, in_splits, group=group)
        assert same_bits(output, right)
    dist.barrier()  # The last bytes have arrived: the link must not go down before.
    if not cut:
        return "ok"
    if rank == 1:
        subprocess.run(["ip", "link", "set", LINK, "down"], check=True)
    start = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        while True:  # what was already on its way may still arrive
            dist.all_to_all_single(torch.empty(2000), torch.ones(2000), group=group)
    except TransportError as error:
        message = str(error)
    assert stopped, "the process must react to SIGTERM"
    assert time.monotonic() - start < 12 + BUSY_SECONDS, "it must end within twice its timeout"
    group.shutdown()
    assert time.monotonic() - start < 12 + BUSY_SECONDS, "its end must not wait for the peer"
    return message


@pytest.mark.parametrize("network", ["tcp", "nixl"])
def test_exchanges_between_two_hosts_whose_master_is_called_localhost(
    hosts: list[str], network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_network(monkeypatch, network)
    assert run_ranks(_on_two_hosts, args=(hosts, False)) == ["ok", "ok"]


@pytest.mark.parametrize("network", ["tcp", "nixl"])
def test_a_link_that_goes_down_ends_both_hosts_within_twice_the_timeout(
    hosts: list[str], network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_network(monkeypatch, network)
    messages = run_ranks(_on_two_hosts, args=(hosts, True))
    for rank, message in enumerate(messages):
        assert f"rank {rank}, all_to_all" in message
        assert f"bytes from rank {1 - rank}" in message
