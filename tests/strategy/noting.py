"""A strategy that keeps what the exchange of a training was like, for tests."""

from __future__ import annotations

from typing import Any

from lightning_freescale import FreeScaleStrategy


class Noting(FreeScaleStrategy):
    """Keeps on the model why its collections are synchronous, and in how many backwards the first one was prioritized."""

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        if self.schedule is not None:
            module.reasons = {part.synchronous_reason for part in self.schedule.modules}
            module.prioritized += self.schedule.modules[0].current is not None
        return super().backward(*args, **kwargs)
