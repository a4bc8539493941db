"""Bubbles you can see: spans of every rank, the bubble and its causes, in TensorBoard, in a trace, in a report."""

from __future__ import annotations

from lightning_freescale.bubbles.timeline import Kind, Timeline

__all__ = ["Kind", "Timeline"]
