"""The sdist builds with only g++ and without a warning, the wheel runs where there is no compiler, and make installs once."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

import pybind11
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import lightning_freescale
from tests.examples.test_examples import TINY, check_comparison

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = (".*", "build", "dist", "*.egg-info", "__pycache__", "*.so", "runs", "lightning_logs")
# Without optimization a build takes two thirds of the time. `make venv` builds with optimization.
STRICT = "-O0 -Werror"


def run(command: Sequence[str | Path], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    left_out = ("PYTHONPATH", "MAKEFLAGS", "MAKELEVEL", "RES_OPTIONS")  # pip needs a name server.
    env = {key: value for key, value in os.environ.items() if key not in left_out}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env | environment,
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
def wheel(sdist: Path) -> Path:
    """The wheel, built from the sdist in an isolated environment with setuptools and pybind11 and without torch.

    The build fails at any warning of the compiler. Where pip cannot reach a package index, the build uses the installed
    setuptools and pybind11.
    """
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--wheel-dir", ".", sdist]
    flags = {"CFLAGS": STRICT, "CXXFLAGS": STRICT}  # releases of setuptools differ in which one they use for C++
    done = run(command, sdist.parent, **flags)
    unreachable = "No matching distribution found for (setuptools|pybind11)|Failed to establish a new connection"
    if done.returncode and re.search(unreachable, done.stdout):
        done = run([*command, "--no-build-isolation"], sdist.parent, **flags)
    assert done.returncode == 0, done.stdout
    compilations = [line for line in done.stdout.splitlines() if re.search(r" -c \S+\.cpp ", line)]
    assert compilations
    assert all(STRICT in line for line in compilations), compilations
    return next(sdist.parent.glob("*.whl"))


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel. It finds the dependencies in the folder of the tests' own packages.

    That folder may hold an editable installation of this package, but Python follows its .pth file only in its own environment.
    """
    folder = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install"]
    done = run([*install, "--no-deps", "--ignore-installed", wheel], cwd=folder)
    assert done.returncode == 0, done.stdout
    return folder


def test_the_sdist_contains_what_a_build_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*")} <= names
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE"} <= names
    assert not [name for name in names if name.startswith("tests/")]


@pytest.mark.slow
@pytest.mark.timeout(600)  # downloads two packages, then compiles
def test_the_wheel_contains_the_package_and_its_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    assert [name for name in names if re.fullmatch(r"lightning_freescale/_C\.[^/]*\.so", name)]
    assert {name.split("/")[0].split("-")[0] for name in names} == {"lightning_freescale", "lightning_freescale_cli.py"}
    files = {path for path in (ROOT / "lightning_freescale").rglob("*") if path.is_file()}
    files = {str(path.relative_to(ROOT)) for path in files if path.suffix not in (".so", ".pyc")}
    assert files <= set(names)
    (metadata_file,) = (name for name in names if name.endswith("METADATA"))
    described = message_from_bytes(archive.read(metadata_file))
    assert described["Version"] == lightning_freescale.__version__
    required = [Requirement(value) for value in described.get_all("Requires-Dist", [])]
    # TorchRec's own pins do not fit the CPU build of FBGEMM, so it is installed separately.
    assert not [requirement for requirement in required if requirement.name == "torchrec"]
    for requirement in required:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            assert requirement.specifier.contains(metadata.version(requirement.name), prereleases=True), requirement
    (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "freescale = lightning_freescale_cli:main" in archive.read(entry_points).decode()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_extension_of_the_wheel_loads_without_torch(wheel: Path, tmp_path: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".so"))
    path = archive.extract(name, tmp_path)
    script = (
        "import importlib.util, sys; spec = importlib.util.spec_from_file_location('_C', sys.argv[1]); "
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module); "
        "print(len([f for f in dir(module) if not f.startswith('_')]), 'torch' in sys.modules)"
    )
    done = run([sys.executable, "-I", "-c", script, path], cwd=tmp_path)
    assert re.fullmatch(r"[1-9]\d* False\n", done.stdout), done.stdout


def quickstart() -> list[list[str]]:
    """The words of the commands of the page."""
    text = (ROOT / "docs" / "quickstart.md").read_text()
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    return [shlex.split(line) for line in lines]


def write_events(path: Path) -> None:
    """The lines that the quickstart shows, and more users."""
    (shown,) = re.findall(r"```\n(user,item,time\n.*?)```", (ROOT / "docs" / "quickstart.md").read_text(), re.DOTALL)
    rows = [f"user-{u},film-{(u * 7 + at) % 40},{1000 * u + 60 * at}" for u in range(40) for at in range(4 + u % 9)]
    path.write_text(shown + "\n".join(rows) + "\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_quickstart_from_the_wheel_without_a_compiler(clean: Path, tmp_path: Path) -> None:
    """Every command of the page, in its order. The demo makes four steps of a tiny model."""
    make, activate, doctor, plan, demo, report, recommend = quickstart()
    assert (make, activate) == (
        ["make", "venv"],
        ["source", ".venv/bin/activate"],
    )  # the fixtures do this with the wheel
    programs = str(clean / "bin")  # nothing else is in the PATH
    assert not [
        name for name in ("g++", "gcc", "c++", "cc", "clang", "make", "nvcc") if shutil.which(name, path=programs)
    ]
    where = "import importlib.util; print(importlib.util.find_spec('lightning_freescale').origin)"
    found = run([clean / "bin" / "python", "-c", where], tmp_path, PATH=programs)
    assert found.stdout.startswith(f"{clean}/lib/"), found.stdout
    write_events(tmp_path / "events.csv")

    def follow(*commands: list[str]) -> str:
        """What the commands print. One process runs them, which saves imports."""
        script = (
            "import json, glob, sys; from lightning_freescale.cli.main import main\n"
            "for words in json.loads(sys.argv[1]):\n"
            "    assert words[0] == 'freescale'\n"
            "    code = main([name for word in words[1:] for name in (glob.glob(word) if '*' in word else [word])])\n"
            "    assert code == 0 or words[1] == 'doctor', (words, code)\n"
        )
        variables = {"PATH": programs, "OMP_NUM_THREADS": "1", "FREESCALE_CACHE": str(tmp_path / "cache")}
        command = [clean / "bin" / "python", "-c", script, json.dumps(commands)]
        if len(commands) == 1:  # Lightning starts the other rank with the same command line
            command = [clean / "bin" / commands[0][0], *commands[0][1:]]
        done = run(command, tmp_path, **variables)
        assert done.returncode == 0, done.stdout[-5000:]
        return done.stdout

    looked = follow(doctor, plan)
    assert f"  {lightning_freescale.__version__}\n" in looked
    assert re.search(r"^ +64 +random ", looked, re.MULTILINE)
    assert demo[:4] == ["freescale", "demo", "--data", "events.csv"]
    check_comparison(follow([*demo, *TINY, "--limit-train-batches", "4"]), tmp_path)
    assert re.search("B is |A and B are equally fast", follow(report, recommend))
    assert "freescale_sync/version_0" in (tmp_path / "report.html").read_text()
    recommended = (tmp_path / "recommendations.csv").read_text()
    assert all(f'"{user}",{rank},' in recommended for user in ("ann", "bob") for rank in (1, 10))


def test_release_wheels_are_built_for_every_supported_python_and_machine() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheels, project = settings["tool"]["cibuildwheel"], settings["project"]
    supported = [text.split("::")[-1].strip() for text in project["classifiers"] if re.search(r":: 3\.\d+$", text)]
    assert wheels["build"] == [f"cp{version.replace('.', '')}-manylinux*" for version in supported]
    assert all(SpecifierSet(project["requires-python"]).contains(version) for version in supported)
    assert wheels["linux"]["archs"] == ["x86_64", "aarch64"]


# ---- the flags of the wheel's build detect these -----------------------------------------------------------------------
def compiled(source: Path) -> subprocess.CompletedProcess[str]:
    """Compile as the wheel's build does. Only the headers of Python and pybind11 can be found."""
    headers = [f"-I{path}" for path in (sysconfig.get_path("include"), pybind11.get_include())]
    flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", *STRICT.split()]
    return run([os.environ.get("CXX", "g++"), *flags, *headers, source], cwd=source.parent)


@pytest.mark.parametrize(
    ("line", "accepted"),
    [
        ("#include <torch/torch.h>", False),
        ("#include <cuda.h>", False),
        ("int f(int unused) { return 0; }", False),
        ("int f(int used) { return used; }", True),
    ],
)
def test_the_compilation_detects(line: str, accepted: bool, tmp_path: Path) -> None:
    (tmp_path / "bad.cpp").write_text(f"{line}\n")
    assert (compiled(tmp_path / "bad.cpp").returncode == 0) == accepted


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
