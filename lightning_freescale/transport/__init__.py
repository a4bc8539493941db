"""Transport between ranks. Importing it registers the torch.distributed backend ``"freescale"``."""

from lightning_freescale.transport.backend import NAME, FreeScaleGroup, register
from lightning_freescale.transport.choice import Capabilities, Choice, capabilities, choose
from lightning_freescale.transport.errors import TransportError
from lightning_freescale.transport.groups import new_group
from lightning_freescale.transport.options import Options

register()

__all__ = [
    "NAME",
    "Capabilities",
    "Choice",
    "FreeScaleGroup",
    "Options",
    "TransportError",
    "capabilities",
    "choose",
    "new_group",
]
