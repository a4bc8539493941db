"""A mixture of experts that keeps little for its backward pass (MoEBlaze, arXiv 2601.05296).

Modules:

* :mod:`.layer`: the module :class:`MoE`: router, losses, experts.
* :mod:`.experts`: the experts as one function with its own backward pass.
* :mod:`.dispatch` and :mod:`.dispatch_triton`: which row belongs to which token.
* :mod:`.products`: the products and the passes between them, and which kernels compute them.
* :mod:`.parallel`: experts that the ranks share; :mod:`.exchange`: how tokens travel between the ranks.
* :mod:`.up_triton`: the first product with the activation on Hopper; :mod:`.activation_triton`: the activation and its
gradients;
  :mod:`.rows_triton`: copies of tokens as rows, and sums over the rows of a token.
"""

from __future__ import annotations

from lightning_freescale.models.moe.layer import MoE, RouterTerms

__all__ = ["MoE", "RouterTerms"]
