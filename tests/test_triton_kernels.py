"""Triton kernels are compiled once for all batches: not again when a size is 1 or a multiple of 16, or when ids begin elsewhere.

Triton compiles a kernel anew for such values unless ``do_not_specialize`` names the argument. Jagged batches have all of them, so
a step in the middle of a training would take a second or more. The sources are read as text, so this needs no GPU and no Triton.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "lightning_freescale"
# Arguments that differ from batch to batch, by name: sizes, and tensors that may be a part of a longer one.
VARYING = {"count", "samples", "total", "blocks", "step", "ids_ptr", "item_ids_ptr", "negative_ids_ptr", "history_ptr"}


def launched_kernels(source: str) -> Iterator[tuple[str, set[str], set[str]]]:
    """The kernels that ``source`` launches: name, arguments that are not constants, and those that are not specialized."""
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef) or not re.search(rf"\b{node.name}\[", source):
            continue
        for decorator in node.decorator_list:
            text = ast.unparse(decorator)
            if text.startswith("triton.jit"):
                arguments = {argument.arg for argument in node.args.args if argument.annotation is None}
                yield node.name, arguments, set(re.findall(r"'(\w+)'", text.partition("do_not_specialize=")[2]))


SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if "@triton.jit" in path.read_text()]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_sizes_of_batches_are_not_specialized(path: Path) -> None:
    for name, arguments, free in launched_kernels(path.read_text()):
        assert arguments & VARYING <= free, f"{name}: add to do_not_specialize"


def test_a_specialized_size_would_be_found() -> None:
    source = "@triton.jit\ndef _add(x_ptr, count, ROWS: tl.constexpr): ...\n\ndef add(x): _add[(1,)](x, len(x), 4)\n"
    assert list(launched_kernels(source)) == [("_add", {"x_ptr", "count"}, set())]
    fixed = source.replace("triton.jit", "triton.jit(do_not_specialize=['count'])")
    assert list(launched_kernels(fixed)) == [("_add", {"x_ptr", "count"}, {"count"})]


def test_kernels_are_found_at_all() -> None:
    assert sum(len(list(launched_kernels(path.read_text()))) for path in SOURCES) > 10
