"""Trains an HSTU recommender on two processes, on synthetic data or on your own events:

    python examples/train_hstu.py
    python examples/train_hstu.py --data ratings.csv --max-epochs 10
    python examples/train_hstu.py --help

The code is in ``lightning_freescale/cli/demo.py``, because ``freescale demo`` runs it too. ``own_model.py`` is a complete
training script to read from top to bottom.
"""

from __future__ import annotations

from lightning_freescale.cli.demo import main

if __name__ == "__main__":
    main(strategy="freescale")
