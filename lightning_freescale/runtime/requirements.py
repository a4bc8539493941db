"""Checks that TorchRec and FBGEMM can be imported. If not, the error names the packages to install."""

from __future__ import annotations

import logging

import torch

# Each FBGEMM release is built against one torch release. pyproject.toml says which torch releases this package accepts.
FBGEMM_FOR_TORCH = {"2.11": "1.6.0", "2.12": "1.7.0", "2.13": "1.8.0", "2.14": "1.9.0"}


def check() -> None:
    """Raise an ImportError that names the commands to run, unless TorchRec and FBGEMM can be imported."""
    release = ".".join(torch.__version__.split(".")[:2])
    fbgemm = FBGEMM_FOR_TORCH.get(release, "(the release made for your torch)")
    package = "fbgemm-gpu" if torch.version.cuda else "fbgemm-gpu-cpu"
    handlers = list(logging.root.handlers)
    try:
        import fbgemm_gpu  # noqa: F401
        import torchrec  # noqa: F401
    except (ImportError, OSError) as error:
        raise ImportError(
            f"lightning_freescale needs TorchRec and the FBGEMM release that is built for torch {release}. Run: "
            f"pip install {package}=={fbgemm} tensordict pyre-extensions && pip install --no-deps torchrec ({error})"
        ) from error
    finally:
        # FBGEMM logs through the root logger during its import. That adds a handler, which would print Lightning's
        # messages a second time.
        for handler in [handler for handler in logging.root.handlers if handler not in handlers]:
            logging.root.removeHandler(handler)


check()
