"""Run all tests in two processes at the same time: ``python -m tests [pytest options]``.

Most tests wait for other processes, so two processes finish sooner than one. The second process runs the folders of the
list below. Both take about equally long.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECOND_PROCESS = [
    "tests/test_packaging.py",
    "tests/test_site.py",
    "tests/inference",
    "tests/serving",
    "tests/examples",
    "tests/cli",
    "tests/transport",
    "tests/benchmarks",
    "tests/models",
    "tests/data",
    "tests/bubbles",
    "tests/simulate",
    "tests/runtime",
    "tests/strategy/test_zero_collision.py",
    "tests/embedding/zero_collision",
]


def main() -> int:
    pytest = [sys.executable, "-m", "pytest", "-q", *sys.argv[1:]]
    with tempfile.TemporaryFile("w+") as log:
        second = subprocess.Popen(
            [*pytest, "-p", "no:cacheprovider", *SECOND_PROCESS], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            ignored = [f"--ignore={path}" for path in SECOND_PROCESS]
            first_status = subprocess.run([*pytest, *ignored], cwd=ROOT, check=False).returncode
            second_status = second.wait()
        finally:
            second.kill()
        log.seek(0)
        print(f"\n{' '.join(SECOND_PROCESS)}:\n{log.read()}", flush=True)
    statuses = {first_status, second_status} - {0, 5}  # 5: the options select no test of this process
    return max(statuses, default=0)


if __name__ == "__main__":
    sys.exit(main())
