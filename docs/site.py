"""Hooks of MkDocs: the site also has pages and files that lie outside ``docs/``, and its links lead to them.

The Markdown files are written for a reader of the repository, so their links are relative to the repository. A link to another
Markdown file becomes a link to its page. Any other linked file is copied to the site. A link to a folder becomes plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "examples/torchrun.md",
)  # pages outside docs/
HOME = "index.md"  # The README of the repository is the first page of the site.
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside ``docs/``, and every file that a page links to."""
    sources = {HOME: ROOT / "README.md", **{name: ROOT / name for name in OUTSIDE}}
    for name, path in sources.items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    pages = [*sources.values(), *(path for path in DOCS.glob("*.md") if path.name != "README.md")]
    for page in pages:
        for _, _, link, _ in _LINK.findall(page.read_text()):
            target = _target(link, page)
            if target is None or target.is_dir() or target.suffix == ".md" or DOCS in target.parents:
                continue
            name = str(target.relative_to(ROOT))
            if files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Make links of the repository links of the site."""
    source = Path(page.file.abs_src_path)

    def replace(match: re.Match[str]) -> str:
        image, text, link, anchor = match.groups()
        target = _target(link, source)
        if target is None:
            return match.group(0)
        if target.is_dir():
            return text
        place = os.path.relpath(_site_path(target), Path(page.file.src_uri).parent)
        return f"{image}[{text}]({place}{anchor or ''})"

    return _LINK.sub(replace, markdown)


def _target(link: str, page: Path) -> Path | None:
    """The file or folder of the repository that ``link`` on ``page`` leads to; ``None`` for addresses and anchors."""
    if not link or re.match(r"[a-z]+:", link):
        return None
    target = Path(os.path.normpath(page.parent / link))
    return target if target.exists() else None


def _site_path(target: Path) -> str:
    """The place of a file of the repository in the site."""
    if target in (ROOT / "README.md", DOCS / "README.md"):
        return HOME
    return str(target.relative_to(DOCS if DOCS in target.parents else ROOT))
