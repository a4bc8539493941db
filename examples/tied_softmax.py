"""An output layer over a sharded table: sampled softmax, in which the items to predict share the table with the history.

A model with tied weights scores every item with the row that also encodes it. ``Linear.weight = table.weight`` is refused: the
table is sharded over the ranks, and no rank has all rows. The recipe looks the rows of the targets and of some sampled items up
in the same table, as a second feature of it. The gradients of both features are summed in one update of each row.

    python examples/tied_softmax.py                  # two processes on the CPU
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

import lightning_freescale as fs

ITEMS, DIM, HISTORY, SAMPLED = 300, 16, 12, 40


@dataclass
class Histories:
    """What the DataLoader yields. Feature ``history``: items of the past. Feature ``scored``: the target, then sampled items."""

    features: KeyedJaggedTensor


class Chains(Dataset):
    """Synthetic histories: the next item is 7 more than the last one, or now and then any other."""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(index)
        start = int(torch.randint(ITEMS, (), generator=draw))
        length = int(torch.randint(2, HISTORY, (), generator=draw))
        items = (start + 7 * torch.arange(length + 1)) % ITEMS
        return items[:-1], items[-1:]


def collate(samples: list[tuple[Tensor, Tensor]]) -> Histories:
    """The sampled items are drawn here, once per batch and for all of its samples, so that they travel with the batch."""
    histories, targets = zip(*samples, strict=True)
    sampled = torch.randint(ITEMS, (SAMPLED,))
    scored = [torch.cat([target, sampled]) for target in targets]
    lengths = torch.tensor([len(part) for part in (*histories, *scored)])
    return Histories(KeyedJaggedTensor(["history", "scored"], torch.cat([*histories, *scored]), lengths=lengths))


class TiedModel(L.LightningModule):
    """A recurrent encoder. Its output is multiplied with rows of the table that also encodes the history."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(
            name="item", num_embeddings=ITEMS, embedding_dim=DIM, feature_names=["history", "scored"]
        )
        self.tables = EmbeddingCollection(tables=[table])
        self.encoder = nn.GRU(DIM, DIM, batch_first=True)
        self.accuracy: list[float] = []

    def training_step(self, batch: Histories, batch_idx: int) -> Tensor:
        rows = self.tables(batch.features)  # one call for both features: one exchange, and one update of each row
        history, scored = rows["history"], rows["scored"]
        lengths = history.lengths()
        padded = nn.utils.rnn.pad_sequence(list(history.values().split(lengths.tolist())), batch_first=True)
        states = self.encoder(padded)[0][torch.arange(len(lengths)), lengths.long() - 1]  # [B, D]
        items = scored.values().view(len(lengths), 1 + SAMPLED, DIM)
        logits = torch.einsum("bd,bnd->bn", states, items)
        ids = batch.features["scored"].values().view(len(lengths), 1 + SAMPLED)
        hit = torch.cat([torch.zeros(len(ids), 1, dtype=torch.bool), ids[:, 1:] == ids[:, :1]], dim=1)
        logits = logits.masked_fill(hit, float("-inf"))  # a sampled item that is the target is no negative
        self.accuracy.append(float((logits.argmax(1) == 0).float().mean()))
        return nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class TiedByAssignment(TiedModel):
    """What is refused: the weights of a layer are the table itself."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(DIM, ITEMS, bias=False)
        self.output.weight = self.tables.embeddings["item"].weight


def fit(model: TiedModel, steps: int) -> L.Trainer:
    trainer = L.Trainer(
        strategy=fs.FreeScaleStrategy(embedding_optimizer={"optimizer": "rowwise_adagrad", "lr": 0.1}),
        accelerator="cpu",
        devices=2,
        max_epochs=-1,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(Chains(), batch_size=32, shuffle=True, collate_fn=collate))
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    L.seed_everything(0, verbose=False)
    model = TiedModel()
    trainer = fit(model, options.steps)
    if trainer.global_rank == 0:
        tenth = max(1, options.steps // 10)
        first, last = (sum(part) / len(part) for part in (model.accuracy[:tenth], model.accuracy[-tenth:]))
        print(f"target ranked first among {1 + SAMPLED}: {first:.0%} at the beginning, {last:.0%} at the end")
    try:
        fit(TiedByAssignment(), 1)
    except fs.ConfigurationError as error:
        if trainer.global_rank == 0:
            print(f"tied by assignment: {error}")
