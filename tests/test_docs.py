"""The documentation agrees with the code: links and file names exist, code parses, options and variables are complete."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.runtime.requirements import FBGEMM_FOR_TORCH

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightning_freescale"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
FILE = re.compile(r"`([\w./-]+\.(?:py|md|h|cpp|cu|cuh|svg|png|toml))`")
FOLDER = re.compile(r"`((?:[\w.-]+/)+)`")
OUTSIDE = {"freescale/", "meta.pt", ".versions/"}  # files that a training or a make target writes


def exists(name: str, page: Path) -> bool:
    """Whether ``name`` exists relative to the page, to the repository or to the package."""
    return any((folder / name).exists() for folder in (page.parent, ROOT, PACKAGE))


@PAGE
def test_relative_links_exist(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if not re.match(r"[a-z]+:", link)]
    assert [link for link in links if not (page.parent / link).exists()] == []


@PAGE
def test_named_files_and_folders_exist(page: Path) -> None:
    text = re.sub(
        r"\[`[^`]*`\]\(", "(", page.read_text()
    )  # the text of a link may be short; its target is checked above
    names = {*FILE.findall(text), *FOLDER.findall(text)} - OUTSIDE
    assert sorted(name for name in names if not exists(name, page)) == []


def test_a_missing_file_is_detected() -> None:
    """Negative control of the two tests above."""
    page = ROOT / "README.md"
    assert FILE.findall("see `strategy/prefetch.py` and `no/such_file.py`") == [
        "strategy/prefetch.py",
        "no/such_file.py",
    ]
    assert FOLDER.findall("see `no/such/`") == ["no/such/"]
    assert LINK.findall("[a](no_such_page.md#part)") == ["no_such_page.md"]
    assert not any(exists(name, page) for name in ("no/such_file.py", "no/such/", "no_such_page.md"))


@PAGE
def test_python_code_parses(page: Path) -> None:
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        ast.parse(code)


@PAGE
def test_named_modules_exist(page: Path) -> None:
    modules = set(re.findall(r"python -m ((?:benchmarks|tests|lightning_freescale)(?:\.\w+)*)", page.read_text()))
    assert sorted(module for module in modules if importlib.util.find_spec(module) is None) == []


def test_the_readme_is_short_and_has_a_place_for_the_results() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    begin, end = "<!-- results: made by `python -m benchmarks.tables` -->", "<!-- end of results -->"
    assert lines.count(begin) == lines.count(end) == 1
    assert lines.index(begin) < lines.index(end)


def test_every_argument_of_the_strategy_is_documented() -> None:
    section = (ROOT / "docs" / "options.md").read_text().split("## Arguments")[1].split("\n## ")[0]
    documented = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    parameters = inspect.signature(FreeScaleStrategy.__init__).parameters.values()
    assert documented == [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def test_every_environment_variable_is_documented() -> None:
    sources = [*PACKAGE.rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.h")]
    used = {name for source in sources for name in re.findall(r"\"(FREESCALE_[A-Z_]+)\"", source.read_text())}
    documented = re.findall(r"^\| `(FREESCALE_[A-Z_]+)` \|", (ROOT / "docs" / "options.md").read_text(), re.MULTILINE)
    assert set(documented) == used


def test_the_table_of_versions_is_that_of_the_import_check() -> None:
    text = (ROOT / "docs" / "install.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch = next(Requirement(text) for text in project["dependencies"] if Requirement(text).name == "torch")
    accepted = {release: fbgemm for release, fbgemm in FBGEMM_FOR_TORCH.items() if f"{release}.0" in torch.specifier}
    assert dict(re.findall(r"^\| (2\.\d+) \| ([\d.]+) \|", text, re.MULTILINE)) == accepted


def test_the_picture_of_the_schedule_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("schedule", ROOT / "docs" / "schedule.py")
    assert spec is not None
    assert spec.loader is not None
    schedule = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(schedule)
    drawn = schedule.draw([schedule.synchronous(), schedule.prioritized()])
    assert (ROOT / "docs" / "schedule.svg").read_text() == drawn
