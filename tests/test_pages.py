"""The code and the commands of the documentation run as they are written, with fewer steps and on one process.

Other tests run some of the pages: ``RUN_ELSEWHERE`` names them.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.run import get_args_parser
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_freescale.cli.main import main
from lightning_freescale.models import HSTU
from tests.bubbles.synthetic_runs import write_run
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "examples" / "torchrun.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
RUN_ELSEWHERE = {  # page and kind of code: the test that runs it
    ("README.md", "python"): "tests/examples/test_examples.py",
    ("README.md", "bash"): "tests/test_packaging.py",
    ("CONTRIBUTING.md", "bash"): "tests/test_docs.py",  # the files and modules that the commands name exist
    ("SECURITY.md", "bash"): "tests/transport/test_two_hosts.py",  # sets the same variable
    ("examples/torchrun.md", "bash"): "tests/examples/test_examples.py",
    ("docs/limits.md", "bash"): "tests/test_docs.py",  # needs a checkout of Lightning; the module exists
    ("docs/quickstart.md", "bash"): "tests/test_packaging.py",
    ("docs/recommendations.md", "python"): "tests/serving/test_page.py",
    ("docs/recommendations.md", "bash"): "tests/serving/test_page.py",
    ("docs/serving.md", "python"): "tests/serving/test_page.py",
    ("docs/tour.md", "python"): "tests/examples/test_tour.py",
}
QUICK = (
    "max_steps=1, limit_val_batches=1, limit_test_batches=1, accelerator='cpu', devices=1, enable_progress_bar=False"
)
SHORTER = {  # page: what is replaced, so that the code takes little time and memory
    "CONTRIBUTING.md": {},
    "docs/checkpoints.md": {},
    "docs/exchange.md": {},
    "docs/failures.md": {'strategy="freescale", callbacks': f'strategy="freescale", {QUICK}, callbacks'},
    "docs/metrics.md": {},
    "docs/migrating.md": {'"nccl"': '"gloo"', 'accelerator="cuda", devices=8,': "accelerator='cpu', logger=False,"},
    "docs/models.md": {"max_epochs=20": f"{QUICK}, logger=False"},
    "docs/options.md": {},
    "docs/quickstart.md": {"devices=2, max_epochs=5": f"{QUICK}, logger=False"},
    "docs/your_own_data.md": {},
    "docs/your_own_model.md": {},
    "docs/zero_collision.md": {"1 << 20": "1 << 12"},
}


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[list[str]]:
    """The words of each command of the page, without comments."""
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def write_events(path: str, header: str) -> None:
    rows = [
        f"user-{user},film-{(user * 7 + at) % 30},{1000 * user + 60 * at},{at % 5}"
        for user in range(40)
        for at in range(6 + user % 5)
    ]
    Path(path).write_text("\n".join([header, *rows]) + "\n")


# ---- names that a page expects -----------------------------------------------------------------------------------------
class Model(nn.Module):
    """The model of the page about migrating: a TorchRec part and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingConfig(name="item", num_embeddings=64, embedding_dim=8, feature_names=["history"])
        self.tables = EmbeddingCollection(tables=[config], device=torch.device("meta"))
        self.head = nn.Linear(8, 1)

    def forward(self, batch: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.head(self.tables(batch)["history"].values())
        return scores.square().mean(), scores


def history(seed: int = 0) -> KeyedJaggedTensor:
    draw = torch.Generator().manual_seed(seed)
    return KeyedJaggedTensor(["history"], torch.randint(64, (6,), generator=draw), lengths=torch.tensor([4, 2]))


def torchrec_loop() -> dict[str, Any]:
    """What the loop of the page about migrating imports and makes before its first line."""
    model = Model()
    place = construct_module_sharding_plan(
        model.tables,
        {"item": row_wise(compute_kernel="fused")},
        sharder=EmbeddingCollectionSharder(),
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    imported = (
        apply_optimizer_in_backward,
        RowWiseAdagrad,
        DistributedModelParallel,
        KeyedOptimizerWrapper,
        in_backward_optimizer_filter,
        TrainPipelineSparseDist,
        CombinedOptimizer,
    )
    return {
        **{one.__name__: one for one in imported},
        "dist": dist,
        "model": model,
        "plan": ShardingPlan({"tables": place}),
        "device": torch.device("cpu"),
        "steps": 2,
        "loader": DataLoader([history(seed) for seed in range(4)], batch_size=None, collate_fn=lambda batch: batch),
    }


def context(page: str) -> dict[str, Any]:
    """Names that the code of the page uses and does not define: parts of the reader's own program."""
    bags = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=name, num_embeddings=64, embedding_dim=8, feature_names=[name])
            for name in ("item", "country")
        ],
        device=torch.device("meta"),
    )
    two = EmbeddingCollection(
        tables=[EmbeddingConfig(name="item", num_embeddings=64, embedding_dim=8, feature_names=["history", "scored"])]
    )
    features = KeyedJaggedTensor(["history", "scored"], torch.arange(10), lengths=torch.tensor([1, 3, 3, 3]))
    own_model = {
        "self": SimpleNamespace(tables=two),
        "batch": SimpleNamespace(features=features),
        "states": torch.ones(2, 8),
        "dim": 8,
    }
    known: Mapping[str, Any] = {
        "docs/exchange.md": lambda: {"FreeScaleStrategy": __import__("lightning_freescale").FreeScaleStrategy},
        "docs/options.md": lambda: {"model": SimpleNamespace(bags=bags)},
        "docs/your_own_model.md": lambda: {**own_model, "torch": torch, "nn": nn},
        "docs/migrating.md": lambda: {
            **torchrec_loop(),
            "self": SimpleNamespace(item=nn.Embedding(64, 8), tables=two),
            "ids": torch.zeros(2, 3, dtype=torch.long),
            "features": features,
            "L": pl,
            "torch": torch,
            "Model": Model,
            "fs": __import__("lightning_freescale"),
        },
    }
    return known.get(page, dict)()


# ---- the code ----------------------------------------------------------------------------------------------------------
def run_page(rank: int, page: str, folder: str) -> list[str]:
    """Run the blocks of the page in one namespace; returns the names that they defined."""
    os.chdir(folder)
    os.environ["FREESCALE_CACHE"] = folder
    write_events("ratings.csv", "userId,movieId,timestamp,rating")
    write_events("events.csv", "user,item,time,rating")
    if page == "docs/checkpoints.md":
        torch.save(HSTU(num_items=1000).state_dict(), "model.pt")  # a test below exports one
    names = context(page)
    before = set(names)
    for number, block in enumerate(blocks(page, "python")):
        for long, short in SHORTER[page].items():
            block = block.replace(long, short)
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    if page == "CONTRIBUTING.md":
        names["test_sum_over_two_ranks"]()
    return sorted(set(names) - before)


@pytest.mark.parametrize("page", SHORTER)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    assert blocks(page, "python")
    for long in SHORTER[page]:
        assert long in "".join(blocks(page, "python")), "the page has changed: what is replaced here is no longer there"
    (names,) = run_ranks(run_page, 1, (page, str(tmp_path)))
    assert names


def test_code_that_fails_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    (tmp_path / "page.md").write_text("```python\nimport lightning_freescale as fs\n\nfs.no_such_name\n```\n")
    monkeypatch.setitem(SHORTER, str(tmp_path / "page.md"), {})
    with pytest.raises(Exception, match="no_such_name"):
        run_ranks(run_page, 1, (str(tmp_path / "page.md"), str(tmp_path)))


def test_every_page_with_code_is_run() -> None:
    with_python = {str(page.relative_to(ROOT)) for page in PAGES if "```python" in page.read_text()}
    elsewhere = {page for page, kind in RUN_ELSEWHERE if kind == "python"}
    assert with_python == {*SHORTER, *elsewhere}
    with_bash = {
        str(page.relative_to(ROOT)) for page in PAGES if re.search(r"^\s*```bash", page.read_text(), re.MULTILINE)
    }
    here = {"docs/metrics.md", "docs/report.md", "docs/checkpoints.md", "docs/failures.md", "docs/install.md"}
    assert with_bash == here | {page for page, kind in RUN_ELSEWHERE if kind == "bash"}
    assert all((ROOT / test).exists() for test in RUN_ELSEWHERE.values())


def test_a_configuration_in_yaml_is_valid() -> None:
    (text,) = blocks("docs/options.md", "yaml")
    strategy = yaml.safe_load(text)["trainer"]["strategy"]
    module, name = strategy["class_path"].rsplit(".", 1)
    made = getattr(__import__(module), name)(**strategy["init_args"])
    assert type(made).__name__ == "FreeScaleStrategy"


# ---- the commands ------------------------------------------------------------------------------------------------------
def test_the_commands_of_report_and_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREESCALE_CACHE", str(tmp_path))
    write_events("ratings.csv", "userId,movieId,timestamp,rating")
    for name in ("RUN_DIR", "OTHER_RUN"):
        write_run(Path(name), [(10.0, 20.0)] * 3)
    (report,) = commands("docs/report.md")
    (plan,) = commands("docs/metrics.md")
    for command in (report, plan):
        assert command[0] == "freescale"
        assert main([word.strip("[]") for word in command[1:]]) == 0
    assert Path("report.html").exists()


def save_checkpoint(rank: int, path: str) -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_steps=0, barebones=True)
    trainer.strategy.connect(HSTU(num_items=1000))
    trainer.save_checkpoint(path)


def test_the_command_of_export(tmp_path: Path) -> None:
    (export,) = commands("docs/checkpoints.md")
    run_ranks(save_checkpoint, 1, (str(tmp_path / export[2]),))
    assert main(export[1:]) == 0
    HSTU(num_items=1000).load_state_dict(torch.load("model.pt"))


def test_torchrun_accepts_the_options_of_a_changing_number_of_machines() -> None:
    (variable, command) = commands("docs/failures.md")
    assert variable[0] == "export"
    options = get_args_parser().parse_args(command[1:])
    assert (options.nnodes, options.nproc_per_node, options.training_script) == ("1:4", "8", "train.py")


def test_the_commands_of_install_name_the_versions_of_make() -> None:
    makefile = (ROOT / "Makefile").read_text()
    words = [word for command in commands("docs/install.md") for word in command if "==" in word]
    assert len(words) == 3
    assert [word for word in words if word not in makefile] == []
