"""Finds out whether TorchRec and FBGEMM can be imported. Training needs both. Inference from an exported model needs neither.

Without them the package can be imported, and every name that needs them raises an error that names the packages to install.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch

# Each FBGEMM release is built against one torch release. pyproject.toml says which torch releases this package accepts.
FBGEMM_FOR_TORCH = {"2.11": "1.6.0", "2.12": "1.7.0", "2.13": "1.8.0", "2.14": "1.9.0"}


def find_problem() -> str | None:
    """Why TorchRec or FBGEMM cannot be imported, and the commands to run; ``None`` if both can."""
    release = ".".join(torch.__version__.split(".")[:2])
    fbgemm = FBGEMM_FOR_TORCH.get(release, "(the release made for your torch)")
    package = "fbgemm-gpu" if torch.version.cuda else "fbgemm-gpu-cpu"
    handlers = list(logging.root.handlers)
    try:
        import fbgemm_gpu  # noqa: F401
        import torchrec  # noqa: F401
    except (ImportError, OSError) as error:
        return (
            f"it needs TorchRec and the FBGEMM release that is built for torch {release}. Run: "
            f"pip install {package}=={fbgemm} tensordict pyre-extensions && pip install --no-deps torchrec ({error})"
        )
    finally:
        # FBGEMM logs through the root logger during its import. That adds a handler, which would print Lightning's
        # messages a second time.
        for handler in [handler for handler in logging.root.handlers if handler not in handlers]:
            logging.root.removeHandler(handler)
    return None


TORCHREC_PROBLEM = find_problem()


def refusing(module: str, names: Collection[str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for ``module`` that explains why ``names`` are not there. For use if there is a problem."""

    def explain(name: str) -> Any:
        if name in names:
            raise ImportError(f"{module}.{name} cannot be imported: {TORCHREC_PROBLEM}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return explain


def register_refusing_strategies(names: Collection[str]) -> None:
    """Let ``Trainer(strategy=name)`` raise the explanation. For use if there is a problem."""
    # Importing the second takes time, which is lost if nobody uses it.
    for package in ["lightning.pytorch", *({"pytorch_lightning"} & sys.modules.keys())]:
        strategies = importlib.import_module(f"{package}.strategies")

        def refuse(self: Any, **options: Any) -> None:
            raise ImportError(f"strategy='freescale' cannot be used: {TORCHREC_PROBLEM}")

        refused = type("Refused", (strategies.DDPStrategy,), {"__init__": refuse})
        for name in names:
            strategies.StrategyRegistry.register(
                name, refused, description="FreeScale: TorchRec is missing", override=True
            )
