"""Runs each example like a user would, with real launchers and two ranks."""

from __future__ import annotations

import csv
import io
import logging
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks.harness.free_ports import free_port
from lightning_freescale.bubbles.analysis import analyse
from lightning_freescale.bubbles.records import read_run
from lightning_freescale.cli import demo, demo_output
from tests.bubbles.synthetic_runs import write_run
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TIMEOUT = 240.0  # seconds; a launch takes 10 to 20, mostly for imports, and several times as long on a busy machine
pytestmark = pytest.mark.timeout(300)
LAUNCHER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK")
# Two steps of a tiny model.
TINY = shlex.split(
    "--accelerator cpu --max-epochs 1 --limit-train-batches 2 --limit-val-batches 2 --batch-size 4 --max-history 16 "
    "--embedding-dim 8 --layers 1 --heads 1 --num-negatives 4"
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREESCALE_CACHE", str(tmp_path / "cache"))


# ---- processes ---------------------------------------------------------------------------------------------------------
@contextmanager
def started(command: Sequence[str], **environment: str) -> Any:
    """A process group that is killed at the end of the block."""
    env = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    env |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def output_of(process: subprocess.Popen[str]) -> str:
    text, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, text[-5000:]
    return text


def launch(command: Sequence[str], **environment: str) -> str:
    """The output of the command. Fails if the exit code is not 0."""
    with started(command, **environment) as process:
        return output_of(process)


# ---- the commands of torchrun.md ------------------------------------------------------------------------------------------
def documented(word: str) -> list[list[str]]:
    """The commands, split into words, of the first code block of torchrun.md that contains ``word``."""
    blocks = re.findall(r"```bash\n(.*?)```", (EXAMPLES / "torchrun.md").read_text(), re.DOTALL)
    block = next(block for block in blocks if word in block)
    return [shlex.split(line) for line in block.splitlines() if not line.startswith("#")]


def here(command: Sequence[str], per_node: int, port: int = 0) -> list[str]:
    """``command`` for this machine: with its Python, its address, and ``per_node`` processes instead of 8 GPUs."""
    words = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        "python": [sys.executable],
        "8": [str(per_node)],
        "node0": ["127.0.0.1"],
        "29500": [str(port)],
    }
    local = [part for word in command for part in words.get(word, [word])]
    return [str(ROOT / part) if part.startswith("examples/") else part for part in local]


def has_trained(output: str) -> bool:
    """Whether the demo printed that it trained on two processes, and printed HR@10 once."""
    figures = re.findall(r"^HR@10 +0\.\d{3}$", output, re.MULTILINE)
    return "2 x cpu" in output and len(figures) == 1


def test_a_failed_launch_is_noticed() -> None:
    assert not has_trained("2 x cpu")
    with pytest.raises(AssertionError, match="no such luck"):
        launch([sys.executable, "-c", "raise SystemExit('no such luck')"])


def test_the_demo_by_plain_python(tmp_path: Path) -> None:
    (command,) = documented("python examples/train_hstu.py")
    output = launch([*here(command, per_node=2), *TINY])
    assert has_trained(output)
    assert "Epoch 0" in output
    assert re.search(r"samples/s +\d+", output)
    assert "tensorboard --logdir runs" in output
    assert list(tmp_path.glob("runs/freescale/version_0/events.out.tfevents.*"))
    (checkpoint,) = tmp_path.glob("runs/freescale/version_0/checkpoints/*.ckpt")
    assert f"export '{checkpoint.relative_to(tmp_path)}' hstu.pt" in output
    for noise in ("Warning", "Tip:", "is_fx_tracing", "LeafSpec", "INFO:"):
        assert noise not in output, output


def check_comparison(output: str, folder: Path) -> None:
    """The output of ``freescale demo`` in ``folder`` with four steps. ``tests/test_packaging.py`` runs it from the wheel."""
    assert output.count("2 x cpu") == 2
    assert re.search(r"^ +freescale_sync +freescale$", output, re.MULTILINE)
    assert re.search(r"^HR@10 +0\.\d{3} +0\.\d{3}$", output, re.MULTILINE)
    assert re.search(r"^The losses of all 4 steps are equal", output, re.MULTILINE)
    assert re.search(r"^A +runs/freescale_sync/version_0$", output, re.MULTILINE)
    assert re.search(r"^B +runs/freescale/version_0$", output, re.MULTILINE)
    assert output.count("3 steps recorded (1 to 3)") == 2  # the first step is not recorded
    assert re.search(r"^  straggler ms( +\d+\.\d\d){2}", output, re.MULTILINE)
    assert re.search(r"^Straggler wait: \d+% of the ranks' time in A, \d+% in B", output, re.MULTILINE)
    page = (folder / "runs" / "report.html").read_text()
    assert "runs/freescale_sync/version_0" in page
    assert "See every step:    runs/report.html" in output
    for noise in ("Warning", "Tip:", "is_fx_tracing", "LeafSpec", "INFO:"):
        assert noise not in output, output


def test_two_machines_by_torchrun() -> None:
    port = free_port()
    first, second = (here(command, per_node=1, port=port) for command in documented("--node-rank"))
    with started([*first, *TINY]) as node0, started([*second, *TINY]) as node1:
        assert has_trained(output_of(node0))
        assert "HR@10 " not in output_of(node1)


# ---- launches in which other programs start the processes: forked here, which saves their imports ----------------------
def run_script(rank: int, commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]]) -> str:
    """The output of rank ``rank`` of ``python script.py ...``, with the environment variables of its launcher."""
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(environments[rank])
    _, script, *arguments = commands[rank]
    sys.argv = [script, *arguments]
    with redirect_stdout(io.StringIO()) as output:
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).addHandler(logging.StreamHandler(output))  # the log, too
        runpy.run_path(script, run_name="__main__")
    return output.getvalue()


def test_own_model() -> None:
    """With the variables that torchrun sets. The test above starts torchrun itself."""
    (command,) = documented("own_model.py")
    assert command[:-1] == ["torchrun", "--standalone", "--nproc-per-node", "2"]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "own", "GROUP_RANK": "0"}
    job |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    outputs = run_ranks(run_script, args=([["python", *here(command[-1:], per_node=2)]] * 2, ranks))
    assert "Starting with 2 processes" in outputs[0]
    accuracies = [re.findall(r"^accuracy (\S+)$", output, re.MULTILINE) for output in outputs]
    assert float(accuracies[0][0]) > 0.9
    assert accuracies[1] == []  # rank 0 alone prints it


def test_two_machines_by_plain_python() -> None:
    commands = documented("NODE_RANK")
    environments = [dict(word.split("=") for word in command if re.match(r"[A-Z_]+=", word)) for command in commands]
    port = str(free_port())
    for rank, environment in enumerate(environments):
        assert environment == {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "NODE_RANK": str(rank)}
        environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    scripts = [[*here(command[3:], per_node=1), *TINY] for command in commands]
    outputs = run_ranks(run_script, args=(scripts, environments))
    assert [has_trained(output) for output in outputs] == [True, False]


def test_slurm() -> None:
    (command,) = documented("SBATCH")
    assert command[0] == "srun"
    job = {
        "SLURM_JOB_ID": "4321",
        "SLURM_JOB_NAME": "hstu",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NODELIST": "127.0.0.1",
        "MASTER_PORT": str(free_port()),  # the default depends on the number of the job
    }
    tasks = [{**job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank)} for rank in range(2)]
    outputs = run_ranks(run_script, args=([[*here(command[1:], per_node=1), *TINY]] * 2, tasks))
    assert [has_trained(output) for output in outputs] == [True, False]


def test_kubernetes_runs_the_command_of_two_machines() -> None:
    """The test above runs this command of torchrun. In a pod, only the names of rank, machine and log folder differ."""
    (text,) = re.findall(r"```yaml\n(.*?)```", (EXAMPLES / "torchrun.md").read_text(), re.DOTALL)
    service, job = yaml.safe_load_all(text)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = shlex.split(container["args"][0])
    first, _ = documented("--node-rank")
    assert words[-2:] == ["--log-dir", "/checkpoints"]
    names = {"$JOB_COMPLETION_INDEX": "0", "hstu-0.hstu": "node0"}
    assert [names.get(word, word) for word in words[:-2]] == first
    # The first pod of a job is JOB-0, and the headless service gives it the name JOB-0.SUBDOMAIN.
    assert job["metadata"]["name"] == pod["subdomain"] == service["metadata"]["name"] == "hstu"
    assert service["spec"] == {"clusterIP": "None", "selector": {"job-name": "hstu"}}
    assert job["spec"]["completionMode"] == "Indexed"
    assert str(job["spec"]["completions"]) == str(job["spec"]["parallelism"]) == words[words.index("--nnodes") + 1]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(words[words.index("--nproc-per-node") + 1])


# ---- the README --------------------------------------------------------------------------------------------------------
def run_readme(rank: int, script: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(script, names)
    return {"steps": names["trainer"].global_step, "ranks": names["trainer"].world_size}


def test_the_usage_in_the_readme() -> None:
    usage = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    shorter = "max_steps=2, limit_val_batches=1, accelerator='cpu', logger=False, enable_checkpointing=False"
    assert "max_epochs=5" in usage
    for result in run_ranks(run_readme, args=(usage.replace("max_epochs=5", shorter),)):
        assert result == {"steps": 2, "ranks": 2}


# ---- data of the demo --------------------------------------------------------------------------------------------------
def run_demo(rank: int, arguments: Sequence[str]) -> str:
    with redirect_stdout(io.StringIO()) as output:
        demo.main(arguments)
    return output.getvalue()


def test_the_demo_reads_movielens(movielens: Path) -> None:
    output = run_ranks(
        run_demo, args=([*TINY, "--devices", "2", "--strategy", "freescale", "--data", str(movielens)],)
    )[0]
    assert has_trained(output)
    with movielens.open() as file:
        rows = list(csv.DictReader(file))
    users, items = ({row[name] for row in rows} for name in ("userId", "movieId"))
    assert f"{len(users):,} users, {len(items):,} items, {len(rows):,} events" in output


def test_the_demo_resumes(tmp_path: Path) -> None:
    options = [*TINY, "--devices", "2", "--strategy", "freescale"]
    run_ranks(run_demo, args=(options,))
    (checkpoint,) = tmp_path.glob("runs/freescale/version_0/checkpoints/*.ckpt")
    output = run_ranks(run_demo, args=([*options, "--max-epochs", "2", "--ckpt-path", str(checkpoint)],))[0]
    assert has_trained(output)
    assert list(tmp_path.glob("runs/freescale/version_1/checkpoints/epoch=1-step=4.ckpt"))


def test_the_model_is_twice_as_good_as_popularity() -> None:
    """One of the demo's three epochs is enough for this."""
    options = (
        "--devices 2 --accelerator cpu --strategy freescale --max-epochs 1 --max-history 64 --limit-val-batches 32"
    )
    output = run_ranks(run_demo, args=(options.split(),))[0]
    model, popular = map(float, re.findall(r"^(?:HR@10|  popularity recommender) +(\S+)$", output, re.MULTILINE))
    assert model > 2 * popular > 0


# ---- comparison of two trainings ---------------------------------------------------------------------------------------
def test_losses_are_compared() -> None:
    losses = torch.tensor([4.0, 3.0, 2.0], dtype=torch.float64)
    compare = demo_output.compare_losses
    assert compare(losses, losses.clone()) == "The losses of all 3 steps are equal bit for bit."
    assert "equal up to rounding: the largest relative difference is 1e-05" in compare(losses, losses * (1 + 1e-5))
    assert "DIFFER: the largest relative difference is 1.0e-02" in compare(
        losses, losses * torch.tensor([1.0, 1.0, 1.01])
    )
    assert "different numbers of steps, 3 and 2" in compare(losses, losses[:2])


def test_the_verdict_warns_if_the_machine_disturbed_the_runs(tmp_path: Path) -> None:
    uneven, even, slow = (
        analyse(read_run(write_run(tmp_path / name, [computes] * 4)))
        for name, computes in (("uneven", (10.0, 50.0)), ("even", (30.0, 30.0)), ("slow", (40.0, 40.0)))
    )
    undisturbed = "Straggler wait: 34% of the ranks' time in A, 0% in B. Step time: 59 ms in A, 39 ms in B."
    assert demo_output.verdict(uneven, even) == undisturbed
    assert "It took 30 ms per step in A and 40 ms in B." in demo_output.verdict(uneven, slow)


def test_a_checkpoint_cannot_resume_both_trainings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main(["--ckpt-path", "some.ckpt"])
    assert "choose --strategy freescale or freescale_sync" in capsys.readouterr().err
