"""The strategy's checkpoint hooks: what is saved, what is loaded, and in which order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrec.distributed.model_parallel import DistributedModelParallel

from lightning_freescale.balance.balancer import Balancer
from lightning_freescale.embedding import table_optimizer as table_state
from lightning_freescale.strategy import checkpoint as checkpoints
from lightning_freescale.strategy.control import Control

if TYPE_CHECKING:  # The hooks are mixed into the DDPStrategy of either Lightning namespace.
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object

FITTING = "fit"  # The value of TrainerFn.FITTING in both namespaces.


class CheckpointHooks(_Base):
    """Lightning's checkpoint hooks, as a part of the strategy class."""

    control: Control | None
    _sharded: DistributedModelParallel | None
    _balancer: Balancer
    _module: Any

    def flush(self) -> None:
        """Apply every pending embedding gradient. The strategy implements it."""
        raise NotImplementedError

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # the tables exist only once they are sharded

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError(
                "storage_options: checkpoints are folders written by torch.distributed.checkpoint, without CheckpointIO"
            )
        assert self.control is not None
        assert self._sharded is not None
        self.flush()
        self.control.check_losses()  # a checkpoint never holds the weights that a NaN has reached
        sharded = {"state_dict": checkpoint.pop("state_dict")}
        if "optimizer_states" in checkpoint:
            sharded["table_optimizer"] = table_state.optimizer_tensors(self._sharded)
            checkpoint["table_optimizer_steps"] = table_state.steps_of_all_ranks(self._module, self.control.gather)
            checkpoint["balance"] = self._balancer.state_dict()
        checkpoints.save(Path(self.broadcast(filepath)), sharded, checkpoint, self.control)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.control is not None
        assert self._sharded is not None
        path = Path(self.broadcast(checkpoint_path))
        checkpoints.verify(path, self.control)
        module = self._module
        state: dict[str, Any] = {"state_dict": module.state_dict()}
        checkpoints.check_same_model(path, state["state_dict"], module.strict_loading)
        meta = checkpoints.load_meta(path, weights_only)
        resuming = module.trainer.state.fn == FITTING and "optimizer_states" in meta
        if resuming:
            state["table_optimizer"] = table_state.optimizer_tensors(self._sharded)
        checkpoints.load_sharded(path, state, self.control)
        module.load_state_dict(state["state_dict"], strict=module.strict_loading)
        if resuming:
            table_state.set_steps(module, meta["table_optimizer_steps"])
            self._balancer.load_state_dict(meta.get("balance"))
        return meta

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing to do: :meth:`load_checkpoint` has filled the sharded tensors in place."""

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(filepath)
