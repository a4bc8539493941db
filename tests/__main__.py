"""Run all tests, in two processes side by side: ``python -m tests [pytest options]``.

Those of one list start programs and compilers and mostly wait for them; the others run meanwhile.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ASIDE = ["tests/examples", "tests/test_packaging.py", "tests/cli", "tests/transport"]


def main() -> int:
    pytest = [sys.executable, "-m", "pytest", "-q", *sys.argv[1:]]
    with tempfile.TemporaryFile("w+") as log:
        aside = subprocess.Popen(
            [*pytest, "-p", "no:cacheprovider", *ASIDE], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            here = subprocess.run([*pytest, *(f"--ignore={path}" for path in ASIDE)], cwd=ROOT, check=False).returncode
            there = aside.wait()
        finally:
            aside.kill()
        log.seek(0)
        print(f"\n{' '.join(ASIDE)}:\n{log.read()}", flush=True)
    statuses = {here, there} - {0, 5}  # 5: the options select no test of this list
    return max(statuses, default=0)


if __name__ == "__main__":
    sys.exit(main())
