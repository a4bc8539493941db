"""A benchmark's command, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Printed(NamedTuple):
    json: dict[str, Any]
    errors: str


def run_benchmark(name: str, *arguments: str, timeout: float = 300) -> Printed:
    """What ``benchmarks/name.py`` prints as JSON, and on stderr; it must succeed."""
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return Printed(json.loads(done.stdout), done.stderr)
