"""Compares two runs in one sentence: how much faster the second one is, and what changed most."""

from __future__ import annotations

from lightning_freescale.bubbles.analysis import Analysis
from lightning_freescale.bubbles.attribution import PARTS

SAME_SPEED = 0.02  # a smaller relative difference is within the noise of most machines
_WORDS = {
    "straggler": "the wait for stragglers",
    "exposed_embedding": "the exposed embedding exchange",
    "exposed_experts": "the exposed exchange of experts",
    "exposed_dense": "the exposed AllReduce",
    "input_wait": "the wait for batches",
    "other": "other idle time",
    "useful": "useful work",
}


def comparison_sentence(first: Analysis, second: Analysis) -> str:
    """For example "B is 1.15x faster: the wait for stragglers fell from 18% to 7% of a step."

    Steps with different numbers of samples are compared per sample. The named part is the one whose time changed most in the
    direction of the whole.
    """
    samples = [float(one.bubbles.counts["samples"].sum(axis=0).mean()) for one in (first, second)]
    same_batch = min(samples) <= 0 or abs(samples[1] / samples[0] - 1) < 0.001
    scale = 1.0 if same_batch else samples[0] / samples[1]
    unit = "" if same_batch else " per sample"
    before, after = first.ms("wall"), second.ms("wall") * scale
    if abs(after / before - 1) < SAME_SPEED:
        return f"A and B are equally fast{unit}: a step takes {_ms(first, 'wall')} in A and {_ms(second, 'wall')} in B."
    faster = after < before
    changes = {name: second.ms(name) * scale - first.ms(name) for name in (*PARTS, "useful")}
    part = min(changes, key=lambda name: changes[name] if faster else -changes[name])
    ratio = before / after if faster else after / before
    verb = "fell" if faster else "rose"
    return f"B is {ratio:.2f}x {'faster' if faster else 'slower'}{unit}: {_WORDS[part]} {verb} {_change(first, second, part)}."


def _change(first: Analysis, second: Analysis, part: str) -> str:
    """From what to what a part changed, in percent of a step if that shows the direction, otherwise in ms."""
    shares = [one.ms(part) / one.ms("wall") for one in (first, second)]
    times = [one.ms(part) for one in (first, second)]
    same_direction = (shares[1] - shares[0]) * (times[1] - times[0]) > 0
    texts = [f"{share:.0%}" for share in shares]
    if part != "useful" and same_direction and texts[0] != texts[1]:
        return f"from {texts[0]} to {texts[1]} of a step"
    return f"from {_ms(first, part)} to {_ms(second, part)} per step"


def _ms(one: Analysis, part: str) -> str:
    return f"{one.ms(part):.3g} ms"
