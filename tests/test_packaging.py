"""The package builds from its sdist with only g++, and a second ``make`` installs nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from email import message_from_bytes
from pathlib import Path

import pybind11
import pytest

import lightning_freescale

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "csrc").rglob("*.cpp"))
LEFT_OUT = (".*", "build", "dist", "*.egg-info", "__pycache__", "*.so", "runs", "lightning_logs")


def run(command: Sequence[str | Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "MAKEFLAGS", "MAKELEVEL")}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


# ---- sdist and wheel ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, built in a copy of the tree, because a build writes files into the tree."""
    folder = tmp_path_factory.mktemp("sdist")
    tree = shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*LEFT_OUT))
    script = "import setuptools.build_meta as b; b.build_sdist('..')"
    done = run([sys.executable, "-c", script], cwd=tree)
    assert done.returncode == 0, done.stdout
    return next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> zipfile.ZipFile:
    """The wheel, built from the sdist in an isolated environment with setuptools and pybind11 and without torch."""
    done = run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", ".", sdist], cwd=sdist.parent)
    unreachable = "No matching distribution found for (setuptools|pybind11)|Failed to establish a new connection"
    if done.returncode and re.search(unreachable, done.stdout):
        pytest.skip("pip cannot reach the package index to install setuptools and pybind11")
    assert done.returncode == 0, done.stdout
    return zipfile.ZipFile(next(sdist.parent.glob("*.whl")))


def test_the_sdist_contains_what_a_build_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*")} <= names
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE"} <= names
    assert not [name for name in names if name.startswith("tests/")]


@pytest.mark.timeout(300)  # downloads two packages, then compiles
def test_the_wheel_contains_the_package_and_its_metadata(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert [name for name in names if re.fullmatch(r"lightning_freescale/_C\.[^/]*\.so", name)]
    assert {name.split("/")[0].split("-")[0] for name in names} == {"lightning_freescale", "lightning_freescale_cli.py"}
    files = {path for path in (ROOT / "lightning_freescale").rglob("*") if path.is_file()}
    files = {str(path.relative_to(ROOT)) for path in files if path.suffix not in (".so", ".pyc")}
    assert files <= set(names)
    (metadata_file,) = (name for name in names if name.endswith("METADATA"))
    metadata = message_from_bytes(wheel.read(metadata_file))
    assert metadata["Version"] == lightning_freescale.__version__
    required = [value.split(";")[0] for value in metadata.get_all("Requires-Dist", [])]
    # TorchRec's own pins do not fit the CPU build of FBGEMM, so it is installed separately.
    assert not [name for name in required if name.startswith("torchrec")]
    (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "freescale = lightning_freescale_cli:main" in wheel.read(entry_points).decode()


@pytest.mark.timeout(300)
def test_the_extension_of_the_wheel_loads_without_torch(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".so"))
    path = wheel.extract(name, tmp_path)
    script = (
        "import importlib.util, sys; spec = importlib.util.spec_from_file_location('_C', sys.argv[1]); "
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module); "
        "print(len([f for f in dir(module) if not f.startswith('_')]), 'torch' in sys.modules)"
    )
    done = run([sys.executable, "-I", "-c", script, path], cwd=tmp_path)
    assert re.fullmatch(r"[1-9]\d* False\n", done.stdout), done.stdout


# ---- the C++ -----------------------------------------------------------------------------------------------------------
def compiled(source: Path) -> subprocess.CompletedProcess[str]:
    """Compile with warnings as errors. Only the headers of Python and pybind11 can be found, and they may cause warnings."""
    headers = [part for path in (sysconfig.get_path("include"), pybind11.get_include()) for part in ("-isystem", path)]
    flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    return run([os.environ.get("CXX", "g++"), *flags, *headers, source], cwd=source.parent)


@pytest.mark.timeout(300)
def test_the_sources_compile_without_a_warning() -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = list(pool.map(compiled, SOURCES))
    assert done
    assert not [output.stdout for output in done if output.returncode]


@pytest.mark.parametrize("line", ["#include <torch/torch.h>", "#include <cuda.h>", "int f(int unused) { return 0; }"])
def test_the_compilation_detects(line: str, tmp_path: Path) -> None:
    (tmp_path / "bad.cpp").write_text(f"{line}\n")
    assert compiled(tmp_path / "bad.cpp").returncode != 0


# ---- the Makefile ------------------------------------------------------------------------------------------------------
@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A tree as after ``make venv``: the stamp files are newer than everything they depend on."""
    for name in ("Makefile", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    age = 100.0
    for path in [*tmp_path.rglob("*"), tmp_path / ".venv" / ".stack", tmp_path / ".venv" / ".built"]:
        path.parent.mkdir(exist_ok=True)
        path.touch()
        if path.name in (".stack", ".built"):
            age += 100
        os.utime(path, (age, age))
    return tmp_path


def planned(tree: Path) -> str:
    """The commands that ``make venv`` would run."""
    done = run(["make", "-n", "venv"], cwd=tree)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_second_make_installs_nothing(installed: Path) -> None:
    assert run(["make", "-q", "venv"], cwd=installed).returncode == 0
    assert "pip" not in planned(installed)


def test_a_changed_source_rebuilds_only_the_package(installed: Path) -> None:
    (installed / "csrc" / "jagged" / "jagged.h").touch()
    assert run(["make", "-q", "venv"], cwd=installed).returncode == 1
    assert "--editable" in planned(installed)
    assert "torch==" not in planned(installed)


def test_a_fresh_tree_installs_everything(installed: Path) -> None:
    shutil.rmtree(installed / ".venv")
    assert re.search(r"torch==.*fbgemm-gpu.*\n(.*\n)*.*--no-deps torchrec==.*\n(.*\n)*.*--editable", planned(installed))
