"""The private names of TorchRec that the exchange uses: all are listed in ``contract.py``, and checked for several releases."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import fbgemm_gpu
import pytest
import torch

from tests.embedding import contract

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = metadata.version("torchrec")
OTHERS = [release for release in ("1.6.1", "1.9.2") if release != INSTALLED]
UNUSABLE = 77  # exit status of CHECK: the release does not import with the installed torch and FBGEMM
CHECK = f"""
import sys
try:
    import torchrec.distributed.embedding, torchrec.distributed.model_parallel
except Exception as error:
    print(type(error).__name__, error)
    sys.exit({UNUSABLE})
from tests.embedding import contract
contract.check()
print("checked torchrec", torchrec.__version__, "at", torchrec.__file__)
"""
CACHE = Path(tempfile.gettempdir()) / "lightning-freescale-contract"


def test_installed_release() -> None:
    contract.check()


def test_output_options_are_passed() -> None:
    expected = contract.OUTPUT_OPTIONS & contract.output_parameters()
    assert expected
    assert contract.run_ranks(contract.output_options) == [expected, expected]


@pytest.mark.slow
@pytest.mark.parametrize("release", OTHERS)
def test_other_release(release: str) -> None:
    folder = installed(release)
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode == UNUSABLE:
        with_what = f"torch {torch.__version__} and fbgemm {fbgemm_gpu.__version__}"
        pytest.skip(f"torchrec {release} with {with_what}: {done.stdout.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"checked torchrec {release} at {folder}" in done.stdout


def installed(release: str) -> Path:
    """A folder that holds only this release of torchrec. It is kept for the next run."""
    folder = CACHE / f"torchrec-{release}"
    if folder.exists():
        return folder
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as fresh:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        pip += ["--retries", "1", "--timeout", "10"]  # fail soon if the package index cannot be reached
        target = Path(fresh) / "torchrec"
        environment = {
            key: value for key, value in os.environ.items() if key != "RES_OPTIONS"
        }  # pip needs a name server.
        command = [*pip, "--target", str(target), f"torchrec=={release}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        if done.returncode:
            reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
            pytest.skip(f"torchrec {release} cannot be installed here: {reason}")
        target.rename(folder)  # so that an interrupted installation leaves no folder
    return folder


def foreign_private_names(source: str) -> set[str]:
    """Names that start with an underscore and belong to anything but ``self``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        ):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                found.add(name.value)
    documented = {"_asdict", "_replace"}  # methods of every named tuple
    return {name for name in found - documented if name.startswith("_") and not name.startswith("__")}


def private_names_used_in(package: str) -> set[str]:
    files = sorted((ROOT / "lightning_freescale" / package).rglob("*.py"))
    return {name for file in files for name in foreign_private_names(file.read_text())}


def test_every_private_name_is_pinned() -> None:
    used = private_names_used_in("embedding") | private_names_used_in("batch")
    assert used  # the scan finds something
    assert used <= set(contract.PINNED), (
        "list them in PINNED of tests/embedding/contract.py, and add a check of what they mean"
    )
    strategy = private_names_used_in("strategy")
    assert set(contract.PINNED) <= used | strategy, "listed in PINNED, but no longer used"


def test_the_scan_finds_private_names() -> None:
    source = "a._one\nself._mine\nself.module._two\ngetattr(b, '_three')\nhasattr(c, 'public')\nd.__class__\n"
    assert foreign_private_names(source) == {"_one", "_two", "_three"}


@pytest.mark.parametrize("name", ["_lookups", "_features_to_permute_indices"])
def test_a_missing_name_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build = contract.build

    def renamed(*args: object, **kwargs: object) -> object:
        module = build(*args, **kwargs)  # type: ignore[arg-type]
        vars(module)["_renamed"] = vars(module).pop(name) if name in vars(module) else module._modules.pop(name)
        return module

    monkeypatch.setattr(contract, "build", renamed)
    with pytest.raises(AssertionError, match=name):
        contract.run_ranks(contract.check_names, 2, (2,))
