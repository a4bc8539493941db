"""Recording of spans: with a manual clock, with threads, with real transfers, and with events on a GPU."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.bubbles.clock import DeviceClock
from lightning_freescale.bubbles.spans import ENGINE, Kind, Role, Span, Step
from lightning_freescale.bubbles.timeline import Timeline
from tests.ranks import run_ranks


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def spans(step: Step, track: str = ENGINE) -> list[tuple[str, float, float]]:
    return [(span.kind.value, span.start, span.end) for span in step.spans if span.track == track]


def test_spans_nest_and_lie_within_their_step() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    timeline.begin_step(7)
    clock.now = 101.0
    with timeline.span("dense_forward"):
        clock.now = 102.0
        with timeline.span(Kind.ROW_EXCHANGE, joined=101.5):
            clock.now = 104.0
        clock.now = 105.0
    clock.now = 106.0
    timeline.end_step()
    (step,) = timeline.take()
    assert (step.index, step.start, step.end, step.wall) == (7, 100.0, 106.0, 6.0)
    assert spans(step) == [("dense_forward", 101.0, 105.0), ("row_exchange", 102.0, 104.0)]
    assert [span.joined for span in step.spans] == [101.0, 101.5]
    assert timeline.take() == []


def test_nothing_is_recorded_between_steps() -> None:
    timeline = Timeline()
    with timeline.span("dense_forward"):
        pass
    timeline.count("bytes", 1)
    timeline.keep("lengths", torch.tensor([1]))
    timeline.begin_step(0)
    timeline.cancel_step()
    timeline.add("metrics", 0.0, 1.0)
    assert timeline.span("metrics") is timeline.span("optimizer")  # no object is created
    timeline.begin_step(1)
    timeline.end_step()
    (step,) = timeline.take()
    assert (step.index, step.spans, step.counts, step.arrays) == (1, (), {}, {})


def test_an_unknown_kind_is_refused() -> None:
    timeline = Timeline()
    timeline.begin_step(0)
    with pytest.raises(ValueError, match="dense_foward"):
        timeline.span("dense_foward")


def test_counts_and_arrays() -> None:
    timeline = Timeline()
    timeline.begin_step(0)
    lengths = torch.tensor([3, 5])
    timeline.keep("lengths", lengths)
    lengths.zero_()  # the step has its own copy, because the batch may be overwritten
    timeline.count("bytes", 10)
    timeline.count("bytes", 5)
    timeline.count("rows", torch.tensor(4))
    timeline.end_step()
    (step,) = timeline.take()
    assert step.counts == {"bytes": 15, "rows": 4}
    assert step.arrays["lengths"].tolist() == [3, 5]


def test_background_spans_are_cut_at_the_end_of_the_step() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    timeline.begin_step(0)
    timeline.add("row_exchange_exclusive", 100.0, 107.0, track="exchange")
    clock.now = 105.0
    timeline.end_step()
    timeline.begin_step(1)
    clock.now = 110.0
    timeline.end_step()
    clock.now = 120.0
    timeline.begin_step(3)  # step 2 is not recorded: spans that continue in it are dropped
    timeline.add("row_exchange_exclusive", 121.0, 140.0, track="exchange")
    clock.now = 125.0
    timeline.end_step()
    first, second, third = timeline.take()
    assert spans(first, "exchange") == [("row_exchange_exclusive", 100.0, 105.0)]
    assert spans(second, "exchange") == [("row_exchange_exclusive", 105.0, 107.0)]
    assert spans(third, "exchange") == [("row_exchange_exclusive", 121.0, 125.0)]


def test_take_stops_at_the_given_step() -> None:
    timeline = Timeline()
    for index in range(4):
        timeline.begin_step(index)
        timeline.end_step()
    assert [step.index for step in timeline.take(upto=1)] == [0, 1]
    assert [step.index for step in timeline.take()] == [2, 3]


def test_other_threads_have_their_own_tracks() -> None:
    timeline = Timeline()
    timeline.begin_step(0)

    def work() -> None:
        with timeline.span("row_exchange_exclusive"):
            pass

    thread = threading.Thread(target=work, name="exchange")
    thread.start()
    thread.join()
    with timeline.span("h2d", stream="copy"):
        pass
    timeline.end_step()
    (step,) = timeline.take()
    assert [span.track for span in step.spans] == ["exchange", "copy"]


def test_iterate_times_each_wait_and_gives_every_item() -> None:
    clock = Clock()
    timeline = Timeline(clock)

    def slow() -> Any:
        for item in range(3):
            clock.now += 10.0
            yield item

    timeline.begin_step(0)
    items = []
    for item in timeline.iterate("input_wait", slow()):
        items.append(item)
        clock.now += 1.0
    timeline.end_step()
    (step,) = timeline.take()
    assert items == [0, 1, 2]
    assert [end - start for _, start, end in spans(step)] == [
        10.0,
        10.0,
        10.0,
        0.0,
    ]  # the last wait finds the end of the source


def test_roles() -> None:
    assert {kind for kind in Kind if kind.role is Role.COMPUTE} == {
        Kind.DENSE_FORWARD,
        Kind.DENSE_BACKWARD,
        Kind.OPTIMIZER,
        Kind.LOOKUP,
    }
    assert Kind("allreduce").role is Role.COMMUNICATION
    assert Kind.INPUT_WAIT.role is Role.WAITING


# ---- the clock of a device -----------------------------------------------------------------------------------------
def clock_errors(lags: list[float], drift: float = 0.0, period: float = 0.1) -> list[float]:
    """Error of the clock after each sample. The device reaches the sample's event ``lags`` seconds late.

    The device's clock runs faster than the host's by ``drift`` seconds per second.
    """
    clock, before, wrong = DeviceClock(), 0.0, []
    for number, lag in enumerate(lags):
        host = 5000.0 + period * number
        moment = host + lag
        wrong.append(clock.sample(host, (moment - before) * (1 + drift)) - moment)
        before = moment
    return wrong


def test_the_sample_with_the_smallest_delay_counts() -> None:
    assert clock_errors([0.0, 0.0, 0.0]) == pytest.approx([0.0, 0.0, 0.0], abs=1e-4)
    # Late samples are ignored: the first ones as soon as a better sample exists, and all later ones.
    assert clock_errors([0.03, 0.03, 0.0, 0.05, 0.02]) == pytest.approx([-0.03, -0.03, 0.0, 0.0, 0.0], abs=1e-4)


@pytest.mark.parametrize("drift", [-5e-5, 5e-5])
def test_the_clock_follows_a_drifting_device(drift: float) -> None:
    hour = clock_errors([0.0] * 36_000, drift)
    assert max(map(abs, hour)) < 1e-4
    # Without DRIFT, the error would grow without bound.
    assert 36_000 * 0.1 * abs(drift) > 0.1


# ---- transfers between ranks ---------------------------------------------------------------------------------------
PAUSE = 0.3
RESOLUTION = 1e-4  # seconds by which the clocks of host and device may drift apart within a test
SLEEP_CYCLES, FASTEST_CLOCK = 50_000_000, 2.5e9  # of a GPU, and cycles per second that none reaches


def follow(rank: int) -> tuple[Span, Span, float]:
    """Rank 1 joins late. Rank 0 does something else meanwhile, and then waits."""
    dist.init_process_group("gloo")
    timeline = Timeline()
    dist.barrier()
    timeline.begin_step(0)
    if rank == 1:
        time.sleep(PAUSE)
    sent, received = torch.ones(4), torch.empty(4)
    issued = timeline.clock()
    work = dist.all_to_all_single(received, sent, async_op=True)
    transfer = timeline.transfer("row_exchange_exclusive", work)
    if rank == 0:
        time.sleep(2 * PAUSE)
    with transfer.waiting():
        work.wait()
    dist.barrier()  # make sure that the callback of the transfer has run
    time.sleep(0.05)
    timeline.end_step()
    (step,) = timeline.take()
    background = next(span for span in step.spans if span.track != ENGINE)
    waiting = next(span for span in step.spans if span.track == ENGINE)
    assert received.sum() == 4
    return background, waiting, issued


def test_a_transfer_shows_its_duration_and_the_wait_for_it() -> None:
    (first_way, first_wait, first_issued), (second_way, second_wait, second_issued) = run_ranks(follow)
    assert first_way.start == first_wait.joined
    assert 0 <= first_way.start - first_issued < PAUSE / 2
    # The transfer is done when rank 1 has joined, which is in the middle of the pause of rank 0. Rank 0 then does not wait.
    assert first_way.end - first_way.start == pytest.approx(PAUSE, abs=PAUSE / 2)
    assert first_way.end >= second_issued
    assert first_wait.start > first_way.end
    assert second_way.end <= second_wait.end + PAUSE / 2


@pytest.mark.gpu
def test_events_show_when_the_device_is_idle() -> None:
    """Each event lies between two readings of the host's clock, however busy the host is."""
    device = torch.device("cuda")
    timeline = Timeline()
    timeline.open(device)
    work = torch.randn(4096, 4096, device=device)
    side = torch.cuda.Stream()
    readings = []
    for index in range(3):
        torch.cuda.synchronize()
        began = timeline.clock()
        timeline.begin_step(index)
        with timeline.span("dense_forward"):
            for _ in range(20):
                work @ work
        with timeline.span("input_wait"):
            torch.cuda.synchronize()
            idle = timeline.clock()
            time.sleep(PAUSE)
            slept = timeline.clock() - idle
        with torch.cuda.stream(side), timeline.span("row_exchange_exclusive"):
            torch.cuda._sleep(SLEEP_CYCLES)
        with timeline.span("row_exchange_exclusive"):
            torch.cuda.current_stream().wait_stream(side)
        timeline.count("rows", torch.tensor(3, device=device))
        timeline.end_step()
        torch.cuda.synchronize()
        readings.append((began, idle, slept, timeline.clock()))
    steps = timeline.take()
    assert len(timeline._pool) > 0
    for step, (began, idle, slept, ended) in zip(steps, readings, strict=True):
        by_kind = {(span.kind, span.track): span for span in step.spans}
        compute, wait = by_kind[Kind.DENSE_FORWARD, ENGINE], by_kind[Kind.INPUT_WAIT, ENGINE]
        # The device's clock is converted to the host's, and the result is never late.
        assert began - RESOLUTION <= step.start <= compute.start < compute.end <= wait.start <= idle + RESOLUTION
        # The wait contains the host's sleep. The compute was complete before it.
        assert slept - RESOLUTION <= wait.end - wait.start <= ended - began
        (side_track,) = {span.track for span in step.spans} - {ENGINE}
        beside, until = by_kind[Kind.ROW_EXCHANGE_EXCLUSIVE, side_track], by_kind[Kind.ROW_EXCHANGE_EXCLUSIVE, ENGINE]
        assert beside.end - beside.start > SLEEP_CYCLES / FASTEST_CLOCK  # the time of the device, and not of the launch
        assert wait.end <= until.start
        assert beside.end - RESOLUTION <= until.end <= step.end <= ended + RESOLUTION
        assert step.counts["rows"] == 3
        assert step.start <= min(span.start for span in step.spans)
    assert steps[0].end <= steps[1].start
