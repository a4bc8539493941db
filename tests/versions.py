"""``make test-versions``: a short suite for each supported set of versions, in an environment of its own.

    python -m tests.versions [--only NAME ...] [--output FILE]

Each set is installed into ``.versions/NAME`` and tested there. An environment that has the packages already keeps them. A set
whose interpreter or packages are not to be had on this machine is reported as "not run here", with the reason, and never as
passed. With ``--output``, sets that were not asked for keep their row of that file. The table in ``docs/install.md`` is
made from ``benchmarks/results/versions_cpu.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.report import head, table

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / ".versions"
TIMEOUT = 1800  # seconds, for an installation and for a run of the suite
# What another version can break: Lightning's private parts, sharding, both exchanges against TorchRec, checkpoints.
SHORT_SUITE = (
    "tests/runtime/test_frozen_objects.py",
    "tests/runtime/test_lightning_compat.py",
    "tests/strategy/test_against_torchrec.py",
    "tests/strategy/test_changed_tables.py",
    "tests/strategy/test_direct_use.py",
    "tests/strategy/test_namespaces.py",
    "tests/strategy/test_several_backwards.py",
    "tests/embedding/test_prioritized.py",
    "tests/embedding/test_batched_copies.py",
    "tests/embedding/test_gradient_places.py",
    "tests/contract/test_collections.py",
    "tests/contract/test_callbacks.py",
    "tests/contract/test_learning_rate.py",
    "tests/contract/test_plain_ddp.py",
    "tests/transport/test_torchrec.py",
    "tests/cli/test_recommend.py",
)
TEST_TOOLS = (
    "pytest>=8",
    "pytest-timeout",
    "hypothesis",
    "jsonargparse[signatures]>=4.28",
    "pybind11>=2.12",
    "setuptools>=77",
)


class VersionSet(NamedTuple):
    """Releases that are tested together."""

    python: str
    torch: str
    fbgemm: str
    torchrec: str
    lightning: str

    @property
    def name(self) -> str:
        """Name of the environment, for example ``torch2.13-py3.11``."""
        return f"torch{self.torch.rpartition('.')[0]}-py{self.python}"


# Each torch release, each TorchRec release, each Python and both Lightning series appear at least once.
SETS = (
    VersionSet("3.11", "2.11.0", "1.6.0", "1.6.1", "2.5.6"),
    VersionSet("3.12", "2.12.1", "1.7.0", "1.7.0", "2.5.6"),
    VersionSet("3.11", "2.13.0", "1.8.0", "1.8.0", "2.6.6"),
    VersionSet("3.11", "2.14.1", "1.9.0", "1.9.2", "2.6.6"),
    VersionSet("3.13", "2.14.1", "1.9.0", "1.9.2", "2.6.6"),
)


class NotHere(Exception):
    """The set cannot be tested on this machine; the message is the reason."""


def run(command: Sequence[str | Path], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def interpreter(version: str) -> str:
    """A Python of this version that starts."""
    found = shutil.which(f"python{version}")
    if found is None or run([found, "-c", "pass"]).returncode:
        raise NotHere(f"no Python {version}")
    return found


def requirements(chosen: VersionSet) -> list[str]:
    """What pip has to install: the exact releases of the set, what the package needs besides, and the tools of the tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["cpu"], *TEST_TOOLS]
    exact = [f"torch=={chosen.torch}", f"fbgemm-gpu-cpu=={chosen.fbgemm}", f"lightning=={chosen.lightning}"]
    exact.append(f"pytorch-lightning=={chosen.lightning}")  # tests of the other namespace import it
    return [*exact, *needed]


def install(chosen: VersionSet) -> Path:
    """The interpreter of the set's environment, with everything installed."""
    folder = ENVIRONMENTS / chosen.name
    python = folder / "bin" / "python"
    if not python.exists():
        made = run([interpreter(chosen.python), "-m", "venv", folder])
        if made.returncode:
            raise NotHere(f"python -m venv failed: {last_line(made.stdout)}")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # TorchRec's own requirements do not fit the CPU build of FBGEMM.
    for what in (requirements(chosen), ["--no-deps", f"torchrec=={chosen.torchrec}"]):
        done = run([*pip, *what])
        if done.returncode:
            raise NotHere(f"pip install failed: {last_line(done.stdout)}")
    return python


def build(python: Path) -> None:
    """Compile the C++ core for this interpreter, unless the tree has it and it is newer than the sources."""
    suffix = run([python, "-c", "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"]).stdout.strip()
    core = ROOT / "lightning_freescale" / f"_C{suffix}"
    sources = [ROOT / "setup.py", *(path for path in (ROOT / "csrc").rglob("*") if path.is_file())]
    if not core.exists() or core.stat().st_mtime < max(path.stat().st_mtime for path in sources):
        done = run([python, "setup.py", "--quiet", "build_ext", "--inplace"])
        if done.returncode:
            raise RuntimeError(f"the C++ core does not compile with {python}:\n{done.stdout[-3000:]}")


def installed_versions(python: Path) -> dict[str, str]:
    """The releases that the environment really has."""
    script = (
        "import json, platform, torch, importlib.metadata as m; print(json.dumps({'python': platform.python_version(), "
        "'torch': torch.__version__, 'fbgemm': m.version('fbgemm-gpu-cpu'), 'torchrec': m.version('torchrec'), "
        "'lightning': m.version('lightning')}))"
    )
    done = run([python, "-c", script])
    if done.returncode:
        raise NotHere(f"torch cannot be imported: {last_line(done.stdout)}")
    return json.loads(done.stdout.splitlines()[-1])


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("WARNING")]
    return lines[-1].strip()[:200] if lines else "no output"


def outcome(status: int, output: str) -> dict[str, Any]:
    """The result of a run of pytest, from its exit code and its last line."""
    counts = {
        word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", last_line(output))
    }
    passed = status == 0 and counts.get("passed", 0) > 0
    return {
        "result": "passed" if passed else "failed",
        "tests": counts.get("passed", 0),
        "skipped": counts.get("skipped", 0),
    }


def check(chosen: VersionSet, logs: Path) -> dict[str, Any]:
    """The row of one set in the table."""
    row: dict[str, Any] = chosen._asdict()
    try:
        python = install(chosen)
        build(python)
        row |= installed_versions(python)
    except NotHere as reason:
        return row | {"result": "not run here", "reason": str(reason)}
    started = time.monotonic()
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SHORT_SUITE]
    done = run(pytest, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    (logs / f"{chosen.name}.log").write_text(done.stdout)
    seconds = round(time.monotonic() - started)
    return row | outcome(done.returncode, done.stdout) | {"seconds": seconds, "date": f"{datetime.now(UTC):%Y-%m-%d}"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [chosen.name for chosen in SETS]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results to this JSON file")
    options = parser.parse_args(argv)
    output: Path | None = options.output
    known: dict[str, dict[str, Any]] = {}
    if output is not None and output.exists():
        known = {row["name"]: row for row in json.loads(output.read_text())["sets"]}
    ENVIRONMENTS.mkdir(exist_ok=True)
    for chosen in SETS:
        if chosen.name in options.only:
            known[chosen.name] = {"name": chosen.name, **check(chosen, ENVIRONMENTS)}
            print(f"{chosen.name}: {known[chosen.name]}", flush=True)
    rows = [known[name] for name in names if name in known]
    if output is not None:
        # The rows may come from several calls, each for some of the sets.
        result = {**head("versions"), "command": "python -m tests.versions", "sets": rows}
        output.write_text(json.dumps(result, indent=1) + "\n")
    print(
        table([{key: row.get(key, "") for key in ("name", "torchrec", "lightning", "result", "tests")} for row in rows])
    )
    return int(any(known[name]["result"] == "failed" for name in options.only))


if __name__ == "__main__":
    sys.exit(main())
