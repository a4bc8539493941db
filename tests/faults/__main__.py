"""``python -m tests.faults --kills 100 --seed 0``: kill ranks at random moments and check what is left."""

from __future__ import annotations

import argparse
import json
import sys

from tests.faults.campaign import TrainingResult, campaign


def show(result: TrainingResult) -> None:
    kills = ", ".join(f"rank {kill['rank']} at {kill['kind']} {kill['count']}" for kill in result.kills)
    print(f"{result.seed}: ranks {result.worlds}, killed {kills}: {'; '.join(result.problems) or 'ok'}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="how many ranks are killed")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same settings and moments")
    parser.add_argument("--output", help="write the result to this JSON file")
    options = parser.parse_args()
    result = {"seed": options.seed, **campaign(options.kills, options.seed, show)}
    text = json.dumps(result, indent=2)
    print(text)
    if options.output:
        with open(options.output, "w") as stream:
            stream.write(text + "\n")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
