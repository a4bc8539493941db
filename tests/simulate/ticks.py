"""A simple reference for ``simulate.events``: it advances one second at a time, and handles one rank after another."""

from __future__ import annotations

from typing import NamedTuple


class Op(NamedTuple):
    """One operation of the program that all ranks run. ``seconds`` has one integer per rank, which is at least 1 for a send."""

    name: str  # "compute", "send" or "wait"
    seconds: tuple[int, ...] = ()
    urgent: bool = False
    after: int | None = None  # number of a send
    number: int = -1  # of the send to wait for


def run(program: list[Op], ranks: int, latency: int) -> tuple[list[int], list[list[int]]]:
    """The time at which each rank ends the program, and the time at which each send is done on each rank."""
    sends = [op for op in program if op.name == "send"]
    left = [list(send.seconds) for send in sends]
    joined: list[list[int | None]] = [[None] * ranks for _ in sends]
    done: list[list[int | None]] = [[None] * ranks for _ in sends]
    at, busy, through = [0] * ranks, [0] * ranks, [-1] * ranks
    numbers = {index: sum(op.name == "send" for op in program[:index]) for index in range(len(program))}

    def ready(number: int, now: int) -> bool:
        times = list(joined[number])
        if sends[number].after is not None:
            times += done[sends[number].after]
        return all(time is not None and time + latency <= now for time in times)

    for now in range(100_000):
        for rank in range(ranks):
            for number in range(len(sends)):
                if done[number][rank] is None and not left[number][rank]:
                    done[number][rank] = now
        for rank in range(ranks):
            while at[rank] < len(program) and busy[rank] <= now:
                op = program[at[rank]]
                if op.name == "wait" and done[op.number][rank] is None:
                    break
                if op.name == "compute":
                    busy[rank] = now + op.seconds[rank]
                elif op.name == "send":
                    joined[numbers[at[rank]]][rank] = now
                at[rank] += 1
            if at[rank] == len(program) and busy[rank] <= now and through[rank] < 0:
                through[rank] = now
        if all(time >= 0 for time in through) and all(None not in times for times in done):
            return through, done  # type: ignore[return-value]
        for rank in range(ranks):
            heads = [
                next((n for n, s in enumerate(sends) if s.urgent == urgent and done[n][rank] is None), None)
                for urgent in (True, False)
            ]
            for number in heads:
                if number is not None and ready(number, now) and left[number][rank]:
                    left[number][rank] -= 1
                    break
    raise AssertionError("the program does not end")
