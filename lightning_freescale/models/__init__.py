"""Reference models to train with the strategy, and the parts they are built of.

Modules:

* :mod:`.hstu`: the model :class:`HSTU`, a LightningModule; :mod:`.hstu_layer`: one of its layers; :mod:`.hstu_options`: checks of
  its arguments; :mod:`.hstu_cost`: the FLOPs of a sample.
* :mod:`.evaluation`: validation and test of a LightningModule: the target is ranked among the catalogue.
* :mod:`.item_catalogue`: the ids of the items.
* :mod:`.recommendation`: predictions of a LightningModule; :mod:`.top_k` and :mod:`.top_k_triton`: the best items of a divided
  catalogue.
* :mod:`.sequences`: the sequences over which the layers attend; :mod:`.preparation`: their plan before the lookup;
  :mod:`.even_rows`: numbers of rows that repeat.
* :mod:`.personal_tokens` and :mod:`.personalization`: long histories as a few learned tokens, and states for serving;
  :mod:`.state_attention_triton`: recent events that continue from a state on CUDA.
* :mod:`.last_event_triton`: the outputs at the last event of each history on CUDA.
* :mod:`.event_encoding`: position and time as embeddings that are added to the input.
* :mod:`.event_encoding_triton`: the same on CUDA.
* :mod:`.initialization`: initial values of tables and linear maps.
* :mod:`.attention`: jagged attention, with implementations for CPUs and for CUDA.
* :mod:`.fused_layer`: a layer of HSTU on CUDA as one function; :mod:`.layer_passes`: its kernels in order;
  :mod:`.elementwise_triton`: its elementwise passes; :mod:`.layer_graphs`: its passes as CUDA graphs;
  :mod:`.late_gradients`: the first layer computes its gradients after the gradient of the embeddings.
* :mod:`.feed_forward`: a feed-forward layer after each layer; :mod:`.moe`: its mixture of experts;
  :mod:`.micro_chunks`: layers in parts of the batch, while events travel to experts.
* :mod:`.norm` and :mod:`.norm_triton`: layer norms, and scaling of rows to length 1.
* :mod:`.dropout` and :mod:`.dropout_triton`: dropout whose mask is a function of the sample.
* :mod:`.loss` and :mod:`.loss_triton`: sampled softmax over the next item; :mod:`.loss_tiles_triton`: what each program works on.
* :mod:`.metrics`: HR@k, NDCG@k and MRR.
* :mod:`.tiles` and :mod:`.tiles_triton`: histories cut into tiles, for the loss and for the CUDA kernels.
"""

from __future__ import annotations

from lightning_freescale.models.feed_forward import FeedForward
from lightning_freescale.models.hstu import HSTU
from lightning_freescale.models.moe import MoE
from lightning_freescale.models.personal_tokens import PersonalTokens

__all__ = ["HSTU", "FeedForward", "MoE", "PersonalTokens"]
