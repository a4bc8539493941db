"""A reference of the partition solver in plain Python. It has the same rules, tries every pair, and is exact on integers."""

from __future__ import annotations

from collections.abc import Sequence

Plan = list[list[int]]  # the samples of each rank, by descending cost

TOLERANCE = 1e-5
EXCHANGES_PER_RANK = 16


def zigzag(costs: Sequence[float], ranks: int) -> list[int]:
    return _ranks_of(_zigzag(costs, ranks), len(costs))


def fixed(costs: Sequence[float], ranks: int) -> list[int]:
    return _ranks_of(_fixed_plan(costs, ranks), len(costs))


def variable(
    costs: Sequence[float],
    ranks: int,
    tokens: Sequence[int] | None = None,
    max_tokens: int | None = None,
    shares: Sequence[float] | None = None,
) -> list[int]:
    n = len(costs)
    pace = [sum(shares) / ranks / share for share in shares] if shares else [1.0] * ranks
    solver = _Solver(costs, pace, tokens or [0] * n, max_tokens, 0, n)
    bound = max(sum(costs) / ranks, max(costs, default=0) * min(pace))
    plan: Plan | None = _fixed_plan(costs, ranks)
    if not solver.has_room(plan):
        plan = None
    if plan is None or solver.slowest(plan) > bound * (1 + TOLERANCE):
        other = solver.longest_first()
        if plan is None or (other is not None and solver.slowest(other) < solver.slowest(plan)):
            plan = other
        if plan is None:
            order = _descending(costs)
            packed = variable([float(solver.tokens[i]) for i in order], ranks)
            plan = [[i for i, to in zip(order, packed, strict=True) if to == rank] for rank in range(ranks)]
            if not solver.has_room(plan):
                raise ValueError("max_tokens")
        solver.refine(plan, bound)
    return _ranks_of(plan, n)


def _fixed_plan(costs: Sequence[float], ranks: int) -> Plan:
    n = len(costs)
    least, most = n // ranks, -(-n // ranks)
    solver = _Solver(costs, [1.0] * ranks, [0] * n, None, least, most)
    plan: Plan = [[] for _ in range(ranks)]
    larger = n - least * ranks
    for i in _descending(costs):
        has_room = [r for r in range(ranks) if len(plan[r]) < least or (len(plan[r]) < most and larger > 0)]
        rank = min(has_room, key=lambda r: (solver.load(plan[r]), r))
        larger -= len(plan[rank]) == least
        plan[rank].append(i)
    if solver.slowest(zigzagged := _zigzag(costs, ranks)) < solver.slowest(plan):
        plan = zigzagged
    ascending = sorted(costs)
    dominated = sum(ascending[-1:]) + sum(ascending[: max(least - 1, 0)])
    solver.refine(plan, max(sum(costs) / ranks, dominated))
    return plan


class _Solver:
    def __init__(
        self,
        costs: Sequence[float],
        pace: Sequence[float],
        tokens: Sequence[int],
        max_tokens: int | None,
        least: int,
        most: int,
    ):
        self.costs, self.pace, self.tokens = costs, pace, tokens
        self.max_tokens = sum(tokens) if max_tokens is None else max_tokens
        self.least, self.most = least, most

    def load(self, samples: list[int]) -> float:
        return sum(self.costs[i] for i in samples)

    def time(self, plan: Plan, rank: int) -> float:
        return self.load(plan[rank]) * self.pace[rank]

    def slowest(self, plan: Plan) -> float:
        return max(self.time(plan, rank) for rank in range(len(plan)))

    def has_room(self, plan: Plan) -> bool:
        return all(sum(self.tokens[i] for i in samples) <= self.max_tokens for samples in plan)

    def longest_first(self) -> Plan | None:
        plan: Plan = [[] for _ in self.pace]
        for i in _descending(self.costs):
            options = []
            for rank, samples in enumerate(plan):
                if self.has_room([[*samples, i]]):
                    options.append((self.load([*samples, i]) * self.pace[rank], len(samples), rank))
            if not options:
                return None
            plan[min(options)[2]].append(i)
        return plan

    def refine(self, plan: Plan, bound: float) -> None:
        ranks = range(len(plan))
        for _ in range(EXCHANGES_PER_RANK * len(plan)):
            by_time = sorted(ranks, key=lambda rank: (self.time(plan, rank), rank))
            slow = by_time[-1]
            if self.time(plan, slow) <= bound * (1 + TOLERANCE):
                return
            for fast in by_time[:-1]:
                options = [
                    (max(self.time(after, slow), self.time(after, fast)), give, take, after)
                    for give in range(len(plan[slow]))
                    for take in range(len(plan[fast]) + 1)
                    if (after := self._exchanged(plan, slow, give, fast, take)) is not None
                ]
                best = min(options, default=None)
                if best is not None and best[0] < self.time(plan, slow):
                    plan[:] = best[3]
                    break
            else:
                return

    def _exchanged(self, plan: Plan, slow: int, give: int, fast: int, take: int) -> Plan | None:
        """Return the plan after the swap, or ``None`` if it breaks a rule. With ``take`` past the end nothing comes back."""
        given, taken = plan[slow][give], plan[fast][take : take + 1]
        after = list(plan)
        after[slow] = self._sorted({*plan[slow], *taken} - {given})
        after[fast] = self._sorted({*plan[fast], given} - {*taken})
        fits = self.has_room(after) and all(self.least <= len(after[r]) <= self.most for r in (slow, fast))
        return after if fits else None

    def _sorted(self, samples: set[int]) -> list[int]:
        return sorted(samples, key=lambda i: (-self.costs[i], i))


def _descending(costs: Sequence[float]) -> list[int]:
    return sorted(range(len(costs)), key=lambda i: (-costs[i], i))


def _zigzag(costs: Sequence[float], ranks: int) -> Plan:
    plan: Plan = [[] for _ in range(ranks)]
    turns = [*range(ranks), *reversed(range(ranks))]
    for position, i in enumerate(_descending(costs)):
        plan[turns[position % len(turns)]].append(i)
    return plan


def _ranks_of(plan: Plan, n: int) -> list[int]:
    ranks = [-1] * n
    for rank, samples in enumerate(plan):
        for i in samples:
            ranks[i] = rank
    return ranks
