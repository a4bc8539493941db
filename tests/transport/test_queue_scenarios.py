"""The C++ queue on host memory: the scenarios of ``cpp/queue_test.cpp`` run under the thread and the address sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.slow import slow

ROOT = Path(__file__).resolve().parents[2]
EXCHANGES = [
    "random2",
    "random4",
    "random_high",
    "random_hosts",
    "random_hosts_high",
    "random_hosts_apart",
    "random_hosts_one_thread",
    "random_wrap",
    "random_hosts_wrap",
    "priority",
    "one_queue",
    "late_reader",
    "full_stream",
    "random_hosts@device",
    "random_hosts@nixl",
    "random_hosts_high@nixl",
]
FAILURES = [
    "timeout",
    "timeout_hosts",
    "leaver",
    "leaver_hosts",
    "disagreement",
    "disagreement_hosts",
    "poisoned_output",
    "poisoned_output_hosts",
    "late_receiver",
    "failure_during_issue",
    "idle_rank_fails",
    "idle_rank_fails_hosts",
    "zero_bytes_hosts",
    "zero_bytes_hosts_ahead",
    "silent_peer",
    "failure_before_close",
    "no_descriptors",
    "strangers",
    "bad_chunk",
    "held_chunk",
    "held_queue",
    "chunks_over_tcp",
    "ring",
    "ring_of_two_transfers",
    "segments",
    "interrupted_reserve",
    "numa",
    "leaver@device",
    "poisoned_output@device",
    "late_receiver@device",
    "timeout_hosts@nixl",
    "leaver_hosts@nixl",
    "zero_bytes_hosts_ahead@nixl",
]


def _build(folder: Path, flags: list[str]) -> Path:
    """Build the scenarios as one program from one source file, which is the fastest way, and a library that stands for NIXL."""
    sources = sorted(path for path in (ROOT / "csrc" / "transport").glob("*.cpp") if "bindings" not in path.name)
    whole = folder / "whole.cpp"
    whole.write_text(
        "".join(f'#include "{path}"\n' for path in [*sources, ROOT / "tests/transport/cpp/queue_test.cpp"])
    )
    command = ["g++", "-std=c++17", "-g1", *flags, str(whole), "-o", str(folder / "queue_test"), "-ldl", "-lpthread"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode != 0 and "sanitize" in built.stderr + built.stdout:
        pytest.skip(f"this g++ does not support {flags}: {built.stderr[-200:]}")
    assert built.returncode == 0, built.stderr
    fake = ROOT / "tests/transport/cpp/fake_nixl.cpp"
    command = ["g++", "-std=c++17", "-g1", *flags, "-shared", "-fPIC", str(fake), "-o", str(folder / "libnixl.so")]
    subprocess.run(command, check=True, timeout=300)
    return folder / "queue_test"


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The program by sanitizer, built on first use."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")

    class Built(dict):
        def __missing__(self, name: str) -> Path:
            self[name] = _build(tmp_path_factory.mktemp(name), [f"-fsanitize={name}", "-O0"])
            return self[name]

    return Built()


def _run(program: Path, *scenarios: str) -> subprocess.CompletedProcess:
    # The sanitizer notes what a call of send() has read after the call has returned. The peer may have answered by then, and our
    # stream may have filled the slot again, which would be taken for a race. The scenarios compare the bytes that arrive.
    thread_options = "halt_on_error=1:intercept_send=0"
    environment = os.environ | {"TSAN_OPTIONS": thread_options, "ASAN_OPTIONS": "detect_leaks=0"}
    environment |= {"FAKE_NIXL": str(program.with_name("libnixl.so"))}
    return subprocess.run(
        [str(program), *scenarios], capture_output=True, text=True, timeout=300, env=environment, check=False
    )


@pytest.mark.parametrize("scenarios", [EXCHANGES, FAILURES], ids=["exchanges", "failures"])
@pytest.mark.parametrize("sanitizer", ["thread", slow("address")])
def test_scenarios_under_a_sanitizer(sanitized: dict[str, Path], sanitizer: str, scenarios: list[str]) -> None:
    ran = _run(sanitized[sanitizer], *scenarios)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    assert ran.stdout.split() == [word for scenario in scenarios for word in (scenario, "ok")]


@pytest.mark.parametrize("scenario", ["early_flag", "early_flag@device"])
def test_thread_sanitizer_detects_a_flag_that_is_set_too_early(sanitized: dict[str, Path], scenario: str) -> None:
    ran = _run(sanitized["thread"], scenario)
    assert ran.returncode != 0
    assert "data race" in ran.stderr


@pytest.mark.slow
def test_scenarios_detect_wrong_bytes_of_an_early_flag(sanitized: dict[str, Path]) -> None:
    ran = _run(
        sanitized["address"], "early_flag", "early_flag@device"
    )  # the scenario succeeds if its own check finds wrong bytes
    assert ran.returncode == 0, ran.stderr
