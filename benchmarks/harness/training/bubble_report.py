"""The figures of the end-to-end benchmark as text."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.training.bubble import PARTS, Figures
from benchmarks.harness.variant_names import DENSE_ONLY


def describe(figures: Figures) -> str:
    """Tables and conclusions for the console."""
    lines = [_title(figures), "", *_steps_table(figures["sides"])]
    if "dense_ms" in figures:
        lines += _bubble_lines(figures)
    if figures["doubts"]:
        lines += ["", "No bubble is given:" if figures["parameters"]["strict"] else "Do not trust the bubbles:"]
        lines += figures["doubts"]
    lines.append("")
    notes = {name: found["notes"]["verdict"] for name, found in figures["sides"].items() if "verdict" in found["notes"]}
    lines += [f"{name}: {verdict}" for name, verdict in notes.items()]
    lines += [f"{name}: FAILED, {reason}" for name, reason in figures["failed"].items()]
    return "\n".join([*lines, *loss_lines(figures), *_goal_lines(figures)])


def _title(figures: Figures) -> str:
    shape = figures["workload"] | figures["model"] | figures["versions"]
    return (
        f"{figures['title']}, {figures['parameters']['ranks']} ranks, {figures['machine']}\n"
        f"{', '.join(f'{name} {value}' for name, value in shape.items())}\n"
        f"measured collision rate {figures['collisions']:.1%}; {figures['counted']} of {figures['steps']} steps count"
    )


def _steps_table(variants: Figures) -> list[str]:
    rows = [
        [
            "",
            "ms/step",
            "median",
            "spread",
            "samples/s",
            "MFU",
            "straggler",
            "bubble",
            "MB sent",
            "GiB",
            "warm-up",
            "last loss",
        ]
    ]
    for name, found in variants.items():
        if "samples_per_second" not in found:
            continue
        step = found["step_ms"]
        rows.append(
            [
                name,
                *(f"{step[key]:.1f}" for key in ("mean", "median", "spread")),
                f"{found['samples_per_second']:.0f}",
                f"{found['mfu']:.1%}" if "mfu" in found else "-",
                f"{found['straggler_percent']:.1f} %",
                _number(found.get("bubble_ms")),
                f"{found['sent_bytes'] / 1e6:.2f}",
                f"{found['peak_bytes'] / 2**30:.1f}" if found["peak_bytes"] else "-",
                f"{found['warm_up']['steps']}{'' if found['warm_up']['steady'] else ', not steady'}",
                f"{found['losses'][-1]:.5f}",
            ]
        )
    return _table(rows)


def _bubble_lines(figures: Figures) -> list[str]:
    variants = figures["sides"]
    each = ", ".join(f"{value:.1f}" for value in variants[DENSE_ONLY]["rank_ms"])
    lines = ["", f"dense compute alone: {figures['dense_ms']:.1f} ms per step, mean of the ranks ({each})"]
    if "same_batch_apart" in figures:
        lines.append(f"compute time of the same batch varies between variants by +-{figures['same_batch_apart']:.2%}")
    lines += ["", "Parts of the bubble, ms per step, and the share of TorchRec's bubble that is removed:"]
    baselines = list(dict.fromkeys(name for found in variants.values() for name in found.get("gone", ())))
    rows = [["", *PARTS, "bubble", *(f"of {name}" for name in baselines)]]
    for name, found in variants.items():
        if "bubble_ms" in found:
            shares = [f"{found['gone'][key]:.1%}" if key in found["gone"] else "-" for key in baselines]
            parts = [_number(found["parts_ms"].get(part)) for part in PARTS]
            rows.append([name, *parts, f"{found['bubble_ms']:.1f}", *shares])
    return lines + _table(rows)


def loss_lines(figures: Figures) -> list[str]:
    """One line about the equality of the losses, if they were compared."""
    if "losses" not in figures:
        return []
    losses = figures["losses"]
    steps = f" over {figures['steps']} steps" if "steps" in figures else ""
    return [
        f"losses{steps}, from {losses['first']:.4g} to {losses['last']:.4g}: "
        f"{'equal' if losses['equal'] else 'DIFFERENT'}, largest relative difference {max(losses['apart'].values()):.1e} "
        f"(tolerance {losses['tolerance']:.0e})"
    ]


def _goal_lines(figures: Figures) -> list[str]:
    goal = figures.get("goal", {})
    if "gone" not in goal:
        return []
    outcome = "reached" if goal["reached"] >= goal["gone"] else "missed"
    return [f"goal, all techniques remove {goal['gone']:.1%} of TorchRec's bubble: {outcome}, {goal['reached']:.1%}"]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
