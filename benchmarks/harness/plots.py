"""The style of the benchmarks' figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

COLOURS = ("#b23a48", "#e09f3e", "#7a9e7e", "#5b8e9f", "#1d3557", "#8d6a9f")
DPI = 130


def figure(width: float, height: float) -> Figure:
    """An empty figure; width and height in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def doubling_axis(axes: Any, ranks: Iterable[int], label: str = "ranks") -> None:
    """A logarithmic x axis with a labelled tick at every given number."""
    ticks = sorted(set(ranks))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)
    tidy(axes)


def legend(figure: Figure, colours: Iterable[str], lines: Mapping[str, Any]) -> None:
    """A legend below the figure: the names of the colours in order, then the names of the line styles."""
    handles = [Line2D([], [], color=colour, label=name) for colour, name in zip(COLOURS, colours, strict=False)]
    handles += [Line2D([], [], color="grey", linestyle=style, label=name) for name, style in lines.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)


def tidy(axes: Any) -> None:
    """A light grid, no frame at the top and right."""
    axes.set_axisbelow(True)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.title.set_fontsize(10)
