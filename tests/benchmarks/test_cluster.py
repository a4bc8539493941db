"""The launcher: the environment of the ranks, their output, and that no process survives a failure or a timeout."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from benchmarks.harness.gpu_cluster import launcher, mps, rank_process
from benchmarks.harness.gpu_cluster.fixed_clock import fixed_clock
from benchmarks.harness.gpu_cluster.launcher import run
from benchmarks.harness.gpu_cluster.rank_process import ClusterFailed

ROOT = Path(__file__).resolve().parents[2]


def code(text: str) -> list[str]:
    return ["-c", textwrap.dedent(text)]


SHOW = """
    import os
    names = "RANK NODE_RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR NCCL_HOSTID NCCL_SOCKET_IFNAME EXTRA"
    print([os.environ.get(name) for name in names.split()])
"""


def test_environment_of_every_rank() -> None:
    outputs = run(3, code(SHOW), timeout=200, gpu=False, env={"EXTRA": "yes"})
    for rank, output in enumerate(outputs):
        assert eval(output) == [str(rank), str(rank), "3", "0", "1", "127.0.0.1", f"node{rank}", "lo", "yes"]


def test_same_host_sets_no_nccl_hostid() -> None:
    for output in run(2, code(SHOW), timeout=200, gpu=False, same_host=True):
        assert eval(output)[6] is None


def test_two_clusters_at_once(mps_notes: Path) -> None:
    show = "import os; print(*(os.environ[name] for name in ('CLUSTER', 'RANK', 'WORLD_SIZE', 'RESERVED_SMS', 'MASTER_PORT')))"
    outputs = [output.split() for output in run(2, code(show), timeout=200, gpu=True, clusters=2)]
    assert [words[:4] for words in outputs] == [
        [str(number), str(rank), "2", f"{rank}/2"] for number in range(2) for rank in range(2)
    ]
    first, same, second, too = (words[4] for words in outputs)
    assert first == same != second == too  # each cluster has its own rendezvous
    assert len(mps_notes.read_text().splitlines()) == 2  # one daemon, which is started and stopped


def test_ranks_communicate() -> None:
    gather = """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor(1.0 + dist.get_rank())
        dist.all_reduce(total)
        print(total.item())
        dist.barrier()
        dist.destroy_process_group()
    """
    assert run(2, code(gather), timeout=200, gpu=False) == ["3.0\n", "3.0\n"]


def is_gone(pid: int) -> bool:
    """Whether the process does not exist, or has ended and waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while not all(is_gone(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if not is_gone(pid)]}"
        time.sleep(0.01)


LINGER = """
    import os, pathlib, subprocess, sys, time
    rank, folder = os.environ["RANK"], pathlib.Path(os.environ["FOLDER"])
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (folder / rank).write_text(f"{os.getpid()} {child.pid}")
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.01)
    if rank == os.environ.get("FAILS"):
        print("about to fail")
        print("no such table", file=sys.stderr)
        sys.exit(7)
    time.sleep(600)
"""


def noted_pids(folder: Path) -> list[int]:
    return [int(pid) for file in folder.iterdir() for pid in file.read_text().split()]


def test_the_first_failure_ends_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(ClusterFailed, match="rank 1 ended with status 7") as failure:
        run(2, code(LINGER), timeout=200, gpu=False, env={"FOLDER": str(tmp_path), "FAILS": "1"})
    assert failure.value.status == 7
    assert "about to fail" in str(failure.value)
    assert "no such table" in str(failure.value)
    pids = noted_pids(tmp_path)
    assert len(pids) == 4  # both ranks, and their child processes
    wait_until_gone(pids)


def test_the_timeout_ends_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(ClusterFailed, match=r"timeout after 2 s; still running: \[0, 1\]") as failure:
        run(2, code(LINGER), timeout=2, gpu=False, env={"FOLDER": str(tmp_path)})
    assert failure.value.status == 124
    assert str(failure.value).count("(most recent call first)") == 2  # the stack of each rank
    wait_until_gone(noted_pids(tmp_path))


def test_ranks_that_ignore_sigterm_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_process, "GRACE", 0.5)
    stubborn = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + textwrap.dedent(LINGER)
    with pytest.raises(ClusterFailed, match="rank 0 ended with status 7"):
        run(2, ["-c", stubborn], timeout=200, gpu=False, env={"FOLDER": str(tmp_path), "FAILS": "0"})
    wait_until_gone(noted_pids(tmp_path))


# ---- MPS, with its control program replaced by one that records its calls -------------------------------------------------
@pytest.fixture
def mps_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tool, notes = tmp_path / "bin" / mps.MPS_CONTROL, tmp_path / "notes"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "$CUDA_MPS_PIPE_DIRECTORY" "$@" "$([ $# = 0 ] && cat)" >> {notes}\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    return notes


@pytest.mark.parametrize(("fails", "share"), [(False, None), (False, 16), (True, None)])
def test_mps_runs_in_a_temporary_folder_and_is_stopped(mps_notes: Path, fails: bool, share: int | None) -> None:
    show = f"""
        import os, sys
        print(os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"])
        sys.exit({int(fails)})
    """
    if fails:
        with pytest.raises(ClusterFailed):
            run(4, code(show), timeout=200, gpu=True)
    else:
        for output in run(4, code(show), timeout=200, gpu=True, share=share):
            assert output.split() == [mps_notes.read_text().split()[0], str(share or 100)]
    folder = mps_notes.read_text().split()[0]
    assert mps_notes.read_text().splitlines() == [f"{folder} -d ", f"{folder} quit"]
    assert not Path(folder).exists()


def test_every_rank_gets_reserved_sms(mps_notes: Path) -> None:
    show = "import os; print(os.environ['RESERVED_SMS'], os.environ['CUDA_MPS_ACTIVE_THREAD_PERCENTAGE'])"
    for rank, output in enumerate(run(3, code(show), timeout=200, gpu=True, sms=(1, 2))):
        assert output.split() == [f"{3 + rank}/6", "100"]
    assert mps_notes.read_text().splitlines()[-1].endswith("quit")


def test_without_mps_the_error_names_the_missing_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "MPS_CONTROL", "no-such-tool")
    with pytest.raises(RuntimeError, match="no-such-tool is not installed"):
        run(2, code("print(1)"), timeout=200, gpu=True)


# ---- the command ---------------------------------------------------------------------------------------------------------
def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.cluster", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=200
    )


@pytest.mark.skipif(launcher.has_gpu(), reason="would start MPS")
def test_the_command_prints_rank_0_and_returns_the_status(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint('rank', os.environ['RANK'], sys.argv[1:])\nsys.exit(int(sys.argv[-1]))\n")
    done = command("2", "--", str(script), "--option", "0")
    assert (done.returncode, done.stdout) == (0, "rank 0 ['--option', '0']\n")
    failed = command("2", "--timeout", "30", "--", str(script), "3")
    assert failed.returncode == 3
    assert "ended with status 3" in failed.stderr


def test_a_module_is_launched_on_every_rank(capfd: pytest.CaptureFixture[str]) -> None:
    assert launcher.launch("benchmarks", [], 2, gpu=False, timeout=200) == 0
    assert "python -m benchmarks.balance" in capfd.readouterr().out
    assert launcher.launch("benchmarks.nothing", [], 2, gpu=False, timeout=200) != 0
    assert "No module named benchmarks.nothing" in capfd.readouterr().err


def test_a_fixed_clock_is_set_and_reset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script takes the place of nvidia-smi. It notes its arguments and refuses a clock of 1 MHz."""
    with fixed_clock(None):
        pass
    tool, log = tmp_path / "nvidia-smi", tmp_path / "log"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {log}\ncase "$1" in *=1,1) echo no permission; exit 4;; esac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(KeyError), fixed_clock(1500):
        raise KeyError
    assert log.read_text().split() == ["--lock-gpu-clocks=1500,1500", "--reset-gpu-clocks"]
    with pytest.raises(RuntimeError, match="--clock 1: nvidia-smi says: no permission"), fixed_clock(1):
        pass
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(RuntimeError, match="nvidia-smi is not installed"), fixed_clock(1500):
        pass
