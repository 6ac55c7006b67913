"""Weights that are loaded beside the serving ones, on modules of torch's own and vLLM's bookkeeping of reloads."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from tasks.inference.standby import Standby

WIDTH = 4


class Tied(nn.Module):
    """A layer, a buffer that no checkpoint has, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(float(WIDTH)), persistent=False)
        self.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.layer(self.embedding(tokens)) + self.table)
        return hidden


@pytest.fixture
def model() -> Tied:
    model = Tied()
    fill(model, 0)
    record_metadata_for_reloading(model)
    return model


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embedding, layer = (torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(2))
    return {"embedding.weight": embedding, "layer.weight": layer, "head.weight": embedding}


def fill(model: nn.Module, seed: int) -> None:
    """What a model's `load_weights` does with a checkpoint."""
    for name, tensor in weights(seed).items():
        parameter = model.get_parameter(name)
        getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)


def expected(seed: int, tokens: torch.Tensor) -> torch.Tensor:
    embedding, layer, _ = weights(seed).values()
    return (embedding[tokens] @ layer.T + torch.arange(float(WIDTH))) @ embedding.T


def test_the_serving_weights_stay_until_the_swap_and_all_are_new_after_it(model: Tied) -> None:
    tokens = torch.tensor([0, 3, 1])
    before = expected(0, tokens)
    for seed in (1, 2):  # the second swaps out what the first swapped in
        standby = Standby(model, None, partial(fill, seed=seed))
        standby._thread.join()
        assert standby.ready()
        assert torch.allclose(model(tokens), before, atol=1e-5)
        standby.swap_in()
        before = expected(seed, tokens)
        assert torch.allclose(model(tokens), before, atol=1e-5)
        assert model.head.weight is model.embedding.weight


def test_a_model_serves_while_its_next_weights_are_loaded(model: Tied) -> None:
    tokens, go_on = torch.tensor([2]), threading.Event()

    def load(twin: Any) -> None:
        fill(twin, 1)
        assert go_on.wait(20)

    standby = Standby(model, None, load)
    before = model(tokens).clone()
    assert not standby.ready()
    assert torch.equal(model(tokens), before)
    go_on.set()
    standby.swap_in()
    assert torch.allclose(model(tokens), expected(1, tokens), atol=1e-5)


def test_weights_that_cannot_be_loaded_are_reported_and_the_old_ones_serve_on(model: Tied) -> None:
    tokens = torch.tensor([1, 2])
    before = model(tokens).clone()

    def load(twin: Any) -> None:
        fill(twin, 1)
        raise FileNotFoundError("a shard is missing")

    standby = Standby(model, None, load)
    standby._thread.join()
    with pytest.raises(FileNotFoundError, match="a shard is missing"):
        standby.ready()
    with pytest.raises(FileNotFoundError, match="a shard is missing"):
        standby.swap_in()
    assert torch.equal(model(tokens), before)
