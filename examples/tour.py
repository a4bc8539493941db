# %% [markdown]
# # A tour: from a file of events to recommendations
#
# This script is a notebook in the percent format: run it with `python examples/tour.py`, or open it with Jupytext. It takes less
# than a minute on two CPU cores. Every command also works in a terminal.
#
# ## A file of your own
#
# All that is needed is a CSV file with one event per line: who, what, when. Here a small one is made: 160 users who walk around a
# circle of 200 items, each from a start of their own. A few users have very long histories, as in real logs.

# %%
import subprocess
import sys
from pathlib import Path

import numpy as np

draw = np.random.default_rng(7)
lines = ["user,item,time"]
for user in range(160):
    start, now = draw.integers(200), 1_700_000_000 + 86_400 * user
    for at in range(int(np.clip(draw.lognormal(3, 1), 4, 180))):
        now += int(draw.integers(60, 4000))
        lines.append(f"user-{user},item-{(start + at) % 200},{now}")
Path("events.csv").write_text("\n".join(lines) + "\n")
print(*lines[:4], "...", f"{len(lines) - 1:,} events", sep="\n")

# %% [markdown]
# ## Plan
#
# `freescale plan` reads only the lengths of the histories. It tells what balancing would save on this file, for any number of
# GPUs, before you train anything.

# %%
from lightning_freescale.cli.main import main as freescale

freescale(["plan", "events.csv", "--ranks", "2,8", "--batch-size", "8", "--max-history", "256"])

# %% [markdown]
# ## Train both ways
#
# `freescale demo` trains an HSTU model on two processes: first with the baseline, `freescale_sync`, then with `freescale`, from
# the same seed. It starts in processes of its own, because each rank runs the whole program again. The losses are equal, because
# both trainings have the same global batches.

# %%
command = [sys.executable, "-m", "lightning_freescale.cli.main", "demo", "--data", "events.csv"]
options = "--accelerator cpu --max-epochs 1 --batch-size 8 --max-history 256 --embedding-dim 32 --num-negatives 16"
trained = subprocess.run([*command, *options.split()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
assert trained.returncode == 0, trained.stdout
lines = trained.stdout.splitlines()
print(*lines[lines.index(f"{'freescale_sync':>40}  freescale") :], sep="\n")

# %% [markdown]
# ## Report
#
# The monitor has recorded where the time of the steps went. `freescale report` shows it, with advice; with `--html` it writes a
# page that shows every recorded step. [Reading the report](../docs/report.md) explains the words.

# %%
freescale(["report", "runs/freescale/version_0", "--html", "report.html"])

# %% [markdown]
# ## Recommend
#
# The checkpoint knows the ids of the file. `freescale evaluate` ranks the last event of every user among the whole catalogue, and
# `freescale recommend` writes the best items of every user.

# %%
(checkpoint,) = Path("runs/freescale/version_0/checkpoints").glob("*.ckpt")
freescale(["evaluate", str(checkpoint), "events.csv"])
freescale(["recommend", str(checkpoint), "events.csv", "--k", "3", "--output", "recommendations.csv"])
print(*Path("recommendations.csv").read_text().splitlines()[:7], sep="\n")

# %% [markdown]
# The users walk around a circle, so the item that follows the last one of a user should be on top. To go on: train on
# [your own data](../docs/your_own_data.md) or with [your own model](../docs/your_own_model.md),
# [export the model and serve it](../docs/recommendations.md), or train on
# [several GPUs and machines](torchrun.md).
