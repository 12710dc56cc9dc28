"""All kernels that a loaded part of a model can use, in the order in which they look at its modules."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from trinity.stages.kernels.decoder_layers import fuse_decoder_layers
from trinity.stages.kernels.encoder_layers import fuse_encoder_elementwise, fuse_encoder_layers
from trinity.stages.kernels.fused_elementwise import fuse_elementwise
from trinity.stages.kernels.gpu.fp8_linear import use_fp8_products
from trinity.stages.kernels.linear import pack_weights, use_onednn
from trinity.stages.kernels.native_linear import use_native_products


def use_kernels(part: Any, *, on_gpu: bool, packed: bool) -> None:
    """Have the modules of ``part``, which are its own, run by the kernels that fit them.

    ``on_gpu``: it is a text model on a GPU. ``packed``: linear layers may get a packed copy of their weights.
    """
    use_fp8_products(part)
    use_native_products(part)
    if packed:
        pack_weights(part)
    use_onednn(part)
    fuse_encoder_elementwise(part)
    fuse_elementwise(part)
    fuse_decoder_layers(part)
    fuse_encoder_layers(part)
    if on_gpu and find_spec("triton") is not None:
        from trinity.stages.kernels.gpu.device_layers import fuse_device_layers

        fuse_device_layers(part)
