"""Sizes of tiles by head width. They are set by type and width alone, so that results do not depend on the machine."""

from __future__ import annotations

from dataclasses import dataclass

WIDTHS = (32, 64, 128, 256)
BIAS_SLOTS = 64  # most entries of a bias table
RECORD_EVENTS = 64  # events of a record; bias.cuh says what that is


@dataclass(frozen=True)
class Config:
    """Compile-time constants of the kernels of one pair of widths; ``kernels.cu`` says what they mean."""

    qk: int  # head width of queries and keys
    v: int  # head width of values
    half: bool  # fp16 rather than bf16
    bias: bool = False  # relative bias
    forward_groups: int = 2  # warpgroups of 64 queries
    forward_keys: int = 128  # keys of a tile
    forward_stages: int = 2  # tiles of keys and values in shared memory
    backward_rows: int = 64  # queries of a tile
    backward_stages: int = 3  # tiles of queries and output gradients in shared memory
    backward_buffers: int = 2  # tiles of score gradients in shared memory
    backward_double: bool = False  # two sets of scores in registers
    backward_split: bool = False  # 64 keys a block, each warpgroup half of the columns
    backward_part: int = 1  # sixteenths of a tile that are activated before their products start
    backward_registers: int = 56  # of a thread of the warpgroup that sums dq
    backward_width: int = 32  # columns of one product of that warpgroup
    backward_turn: int = 1  # tiles that a block adds to dq before it is the next block's turn
    ordered: bool = True  # False, for measurements only: dq is summed in any order

    @property
    def forward_rows(self) -> int:
        return 64 * self.forward_groups

    @property
    def forward_threads(self) -> int:
        return 128 * (self.forward_groups + 1)

    @property
    def forward_shared(self) -> int:
        """Bytes of shared memory."""
        keys = self.forward_stages * self.forward_keys * (self.qk + self.v)
        return 1024 + 2 * (self.forward_rows * self.qk + keys)

    @property
    def backward_keys(self) -> int:
        """Keys of a block."""
        return 64 if self.backward_split else 128

    @property
    def backward_shared(self) -> int:
        """Bytes of shared memory."""
        rows = self.backward_stages * self.backward_rows * (self.qk + self.v)
        grads = self.backward_buffers * self.backward_keys * self.backward_rows
        return 2048 + 2 * (self.backward_keys * (self.qk + self.v) + rows + grads)

    def options(self) -> list[str]:
        """Definitions for the compiler."""
        values = {
            "DQK": self.qk,
            "DV": self.v,
            "HALF": int(self.half),
            "BIAS": int(self.bias),
            "FORWARD_GROUPS": self.forward_groups,
            "FORWARD_KEYS": self.forward_keys,
            "FORWARD_STAGES": self.forward_stages,
            "FORWARD_SHARED": self.forward_shared,
            "BACKWARD_ROWS": self.backward_rows,
            "BACKWARD_STAGES": self.backward_stages,
            "BACKWARD_BUFFERS": self.backward_buffers,
            "BACKWARD_DOUBLE": int(self.backward_double),
            "BACKWARD_SPLIT": int(self.backward_split),
            "BACKWARD_PART": self.backward_part,
            "BACKWARD_REGISTERS": self.backward_registers,
            "BACKWARD_WIDTH": self.backward_width,
            "BACKWARD_TURN": self.backward_turn,
            "BACKWARD_SHARED": self.backward_shared,
            "ORDERED": int(self.ordered),
        }
        return [f"-D{name}={value}" for name, value in values.items()]


def config(qk: int, v: int, half: bool, bias: bool = False) -> Config:
    """The sizes to use for head widths ``qk`` and ``v``."""
    if qk <= 64 and v <= 64:
        small = min(qk, v) == 32
        return Config(
            qk,
            v,
            half,
            bias,
            forward_groups=3,
            backward_double=True,
            backward_registers=56 if small else 72,
            backward_width=32 if small else 64,
            backward_stages=4,
            backward_buffers=3,
            backward_turn=4,
        )
    if max(qk, v) > 128:
        return Config(qk, v, half, bias, forward_keys=64, backward_stages=2, backward_split=True)
    return Config(qk, v, half, bias)
