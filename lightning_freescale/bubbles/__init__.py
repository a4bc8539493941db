"""Bubbles: measures how long each rank is idle in a training step, and why.

How a recorded step becomes a metric:

1. ``timeline`` records spans. The strategy and the embedding exchange add theirs; ``probes`` add those of TorchRec, autograd
   and DDP; ``monitor`` adds those of Lightning's hooks.
2. ``attribution.account`` turns the step of a rank into a row of numbers. ``gather`` sends the rows to all ranks.
3. ``attribution.attribute`` splits the bubble of every rank into parts: straggler, exposed exchanges, input, other.
4. ``summary`` turns the parts into metrics, named as in TensorBoard. ``monitor`` logs them.
5. ``records`` keeps the spans on disk. ``analysis`` reads them for ``freescale report``.

Recording:
    spans                kinds of spans, ``Span``, ``Step``
    timeline             ``Timeline``: records the spans of a step
    pending              a recorded step whose CUDA events are not resolved yet
    clock                offsets between the clocks of ranks, and between device and host
    probes               spans of TorchRec's exchange and of DDP's AllReduce
    collision_estimate   share of rows that consecutive batches share
    batch_stats          samples, tokens, padding and cost of a batch

From spans to metrics:
    attribution          bubble of a step and its parts
    metrics              torchmetrics of bubbles, balance, communication and throughput
    summary              all metrics of an interval, by tag

While training:
    monitor              ``BubbleMonitor``, the Lightning callback
    overhead             what the monitor costs, and how often it records
    gather               the steps of an interval from all ranks
    outputs              run folder and TensorBoard pictures
    picture              a step as an image

After training:
    records              recorded steps on disk; ``record_checks`` refuses damaged fields
    analysis             figures of a run
    advice               what would make a run faster
    comparison           two runs in one sentence
    trace                a run as a trace for Perfetto
"""

from __future__ import annotations

from lightning_freescale.bubbles.spans import Kind
from lightning_freescale.bubbles.timeline import Timeline

__all__ = ["Kind", "Timeline"]
