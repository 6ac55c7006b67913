"""vLLM's own layers with plain products, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from tasks.inference import cpu_linear

SMALL, LARGE = (96, 64), (1024, 2049)  # out, in


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
    cpu_linear.install()


def layer(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> nn.Module:
    """A layer as vLLM has it after loading."""
    found = nn.Linear(shape[1], shape[0], bias=False, dtype=dtype).requires_grad_(False)
    found.quant_method = UnquantizedLinearMethod()
    found.quant_method.process_weights_after_loading(found)
    return found


@pytest.mark.parametrize("shape", [SMALL, LARGE])
@pytest.mark.parametrize("rows", [(1,), (3,), (2, 70)])
def test_products_are_those_of_the_weights_in_the_layer_also_after_they_change(
    shape: tuple[int, int], rows: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    one, x, bias = layer(shape), torch.randn(*rows, shape[1]), torch.randn(shape[0])
    for _ in range(2):
        for added in (None, bias):
            expected = x.double() @ one.weight.double().T + (0 if added is None else added.double())
            got = one.quant_method.apply(one, x, added)
            assert got.dtype == torch.float32 and torch.allclose(got.double(), expected, atol=1e-4)
        one.weight.copy_(torch.randn(shape) / 30)  # as a load in place does


def test_large_and_small_matrices_have_the_product_that_is_faster_for_them() -> None:
    assert layer(SMALL).cpu_linear is nn.functional.linear
    assert layer(LARGE).cpu_linear is cpu_linear.onednn_linear


def test_a_model_loads_in_place_only_if_all_its_layers_keep_their_weights() -> None:
    plain = nn.Sequential(layer(SMALL), nn.ReLU(), layer(LARGE))
    assert cpu_linear.in_checkpoint_form(plain)
    as_vllm_likes = layer(SMALL, torch.bfloat16)
    assert not cpu_linear.in_checkpoint_form(nn.Sequential(*plain, as_vllm_likes))
    odd = nn.Linear(2, 2)
    odd.quant_method = object()  # one of which nothing is known, e.g. of experts
    assert not cpu_linear.in_checkpoint_form(nn.Sequential(*plain, odd))
