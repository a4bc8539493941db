"""The documentation site: it builds without a warning, asks no other server for anything, and fits small and large windows."""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cli.browser import CHROMIUM, Browser

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "",
    "quickstart/",
    "tour/",
    "report/",
    "results/",
    "api/",
    "options/",
    "failures/",
    "migrating/",
    "examples/torchrun/",
    "benchmarks/",
)


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(config),
        "--site-dir",
        str(site),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_has_the_pages_and_files_outside_docs(site: Path) -> None:
    for page in PAGES:
        assert (site / page / "index.html").exists()
    assert (site / "benchmarks/results/figure_end_to_end.png").exists()
    assert "lightning_freescale.FreeScaleStrategy" in (site / "api/index.html").read_text()
    assert 'href="../benchmarks/results/end_to_end_h200.json"' in (site / "results/index.html").read_text()


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    """The negative control: the settings of the site, with one page whose link leads nowhere."""
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "index.md").write_text("# Page\n\n[no such page](missing.md)\n")
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    settings |= {"docs_dir": "pages", "hooks": [], "plugins": [], "nav": [{"Page": "index.md"}], "theme": "mkdocs"}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(settings))
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    assert "missing.md" in done.stderr


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_pages_in_a_browser(address: str, tmp_path: Path) -> None:
    with Browser(tmp_path) as browser:
        for width in (400, 1400):
            browser.resize(width)
            for page in PAGES:
                browser.open(f"{address}/{page}")
                assert browser.evaluate("document.documentElement.scrollWidth") <= width, (page, width)
        assert browser.complaints() == []
        assert {url for url in browser.requested() if not url.startswith((address, "data:"))} == set()
