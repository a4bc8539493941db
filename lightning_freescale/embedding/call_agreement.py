"""Agreement of the ranks about the calls of embedding modules.

A prioritized module has sent rows before it is called, so all ranks must call it in the same way. A rank may find that its own
call cannot use these rows, for example because user code has replaced the ids. If it used TorchRec's exchange alone, the ranks
would wait for different transfers. So the ranks agree first:

- In the first steps they tell each other after each step what they have found. What one rank has found holds for all of them.
- In later steps, and before a call is answered with TorchRec's exchange, a rank asks whether the other ranks have found the same.
  If they have not, it raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from lightning_freescale.runtime.errors import FreeScaleError, name_ranks

COMPARED_CALLS = "the comparison of the calls of embedding modules"
AGREED_STEPS = 16  # first steps, after which the ranks tell each other what they have found
CALL_ALIKE = "Change the model so that they do, or set prioritize=False"
LEAVE_OUT = "To leave a batch out, multiply its loss, which must be finite, by 0"
Ask = Callable[[str], list[int]]  # the ranks that do not ask the same in time


def but_not_on(others: list[int]) -> str:
    """The part of an error that says which ranks have not found the same."""
    return f"on this rank but not on {name_ranks(others)}"


class CallAgreement:
    """Leads the agreement for all modules of a schedule. All ranks make the same calls of :meth:`after_step`.

    Args:
        gather: gathers a value of every rank.
        ask: asks all ranks a question, and returns those that do not ask the same in time.
    """

    def __init__(self, gather: Callable[..., list[Any]], ask: Ask):
        self._gather, self._ask = gather, ask
        self._steps = 0

    def after_step(self, found: Mapping[str, str]) -> dict[str, str]:
        """What holds for all ranks, from what this rank has found in the step that has ended.

        Args:
            found: by module, why it cannot be prioritized.
        """
        self._steps += 1
        agreed: dict[str, str] = {}
        if self._steps <= AGREED_STEPS:
            for of_rank in self._gather(dict(found), what=COMPARED_CALLS):
                agreed = of_rank | agreed  # the first rank decides which reason is named
            return agreed
        for module, reason in found.items():
            self.settle(module, reason, "calls")
        return dict(found)

    def settle(self, module: str, reason: str, place: str, advice: str = CALL_ALIKE) -> None:
        """Return if all ranks settle the same place in this step. Otherwise raise, because this rank differs.

        Args:
            module: name of the module.
            reason: why this rank cannot use the rows that were sent, as the end of "it is ...".
            place: what all ranks would have to find, for example a call of the module.
            advice: what the user can do.
        """
        if others := self._ask(f"{module}/{self._steps}/{place}"):
            raise FreeScaleError(
                f"rank {dist.get_rank()}: {module} is {reason}, {but_not_on(others)}. Rows are sent before a module "
                f"is called, so all ranks must call it alike in every step. {advice}"
            )
