"""Run one command on every rank of a cluster; a single GPU acts as the cluster's nodes.

    python -m benchmarks.cluster 4 -- benchmarks/exposed.py --device cuda

``benchmarks/harness/gpu_cluster`` describes how one GPU becomes a cluster. Without a GPU the ranks are plain processes.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.gpu_cluster import launcher


def main() -> int:
    return launcher.main(__doc__)


if __name__ == "__main__":
    sys.exit(main())
