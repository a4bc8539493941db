"""Train HSTU on two processes: ``python examples/train_hstu.py``, or ``--help``, or on your own events:

    python examples/train_hstu.py --data ratings.csv --max-epochs 10

The code is in ``lightning_freescale/demo.py``, so that ``freescale demo`` runs it from an installed package. To read a
training script from top to bottom, see ``own_model.py``.
"""

from lightning_freescale.cli.demo import main

if __name__ == "__main__":
    main(strategy="freescale")
