"""Products with float32 weights as they are, where vLLM's CPU kernels would first pack a copy of each matrix.

Packing takes twice as long as all else of a load, and all generation waits for it. Measured on AVX2, plain
products are 1 to 4 times as fast for matrices below SMALL and for a single sequence, and 0 to 25% slower for larger
ones with several. Weights in bfloat16 are packed as before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import linear
from vllm.model_executor.layers import utils

SMALL = 1 << 21  # elements; above it oneDNN beats the BLAS that torch calls

_pack = utils.dispatch_cpu_unquantized_gemm


def install() -> None:
    """Have vLLM prepare its layers with `choose_product`; again is no error."""
    utils.dispatch_cpu_unquantized_gemm = choose_product


def in_checkpoint_form(model: Module) -> bool:
    """Whether every layer of the model keeps its weights as a checkpoint has them, so that they load in place."""
    prepared = [layer for layer in model.modules() if getattr(layer, "quant_method", None) is not None]
    return all(
        getattr(layer, "cpu_linear", None) in (linear, onednn_linear)
        and not getattr(layer, "_cpu_skip_gemm_dispatch", False)  # MLA derives other matrices from it
        for layer in prepared
    )


def choose_product(layer: Module, remove_weight: bool) -> None:
    """Set `layer.cpu_linear(x, weight, bias)`; a float32 weight stays in the layer."""
    weight: Any = layer.weight
    prepared: Any = layer
    if weight.is_meta or weight.ndim != 2 or weight.dtype != torch.float32:
        _pack(layer, remove_weight)
    else:
        prepared.cpu_linear = linear if weight.numel() < SMALL else onednn_linear


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] times weight [out, in], by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
