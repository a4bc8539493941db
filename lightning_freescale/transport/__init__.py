"""Transport between ranks. Importing it registers the torch.distributed backend ``"freescale"``."""

from lightning_freescale.transport.backend import BACKEND_NAME, FreeScaleGroup, register
from lightning_freescale.transport.choice import Capabilities, TransportChoice, capabilities, choose
from lightning_freescale.transport.errors import TransportError
from lightning_freescale.transport.groups import new_group
from lightning_freescale.transport.options import Options

register()

__all__ = [
    "BACKEND_NAME",
    "Capabilities",
    "FreeScaleGroup",
    "Options",
    "TransportChoice",
    "TransportError",
    "capabilities",
    "choose",
    "new_group",
]
