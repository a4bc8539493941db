"""The arguments of HSTU that have a set of names, and checks of its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from lightning_freescale.runtime.errors import ConfigurationError

Bias = Literal["relative", "input"]
LinearInit = Literal["hstu", "torch"]


def check_options(options: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigurationError` if arguments of HSTU do not fit together or are unknown."""
    dim, heads = options["embedding_dim"], options["num_heads"]
    if dim % heads and (options["qk_dim"] is None or options["v_dim"] is None):
        raise ConfigurationError(
            f"num_heads: {heads} does not divide embedding_dim {dim}; choose another num_heads, or set qk_dim and v_dim"
        )
    if options["top_k"] < 1:
        raise ConfigurationError(f"top_k: must be at least 1, not {options['top_k']}")
    for name, kind in (("bias", Bias), ("linear_init", LinearInit)):
        known = get_args(kind)
        if options[name] not in known:
            raise ConfigurationError(f"{name}: {options[name]!r} is unknown; choose one of {', '.join(known)}")
