"""A tiny Qwen3 with random weights, put into a store the way a run does it: `policy/` and `weights/<v>/`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from tasks.store import Store, folder_objects, layout

VOCAB = 96
EOS = 1


def tiny_config(*, tied: bool, context_limit: int = 256) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=context_limit,
        tie_word_embeddings=tied,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=0,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )


def tiny_model(seed: int, *, tied: bool) -> Qwen3ForCausalLM:
    """Weights of spread-out log-probs, so that a wrong load is far outside every tolerance."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(tiny_config(tied=tied)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(torch.randn_like(parameter) * 0.08)
    return model


@torch.no_grad()
def logprobs_of(model: Qwen3ForCausalLM, tokens: Sequence[int]) -> list[float]:
    """log p(tokens[j + 1] | tokens[: j + 1]) at temperature 1, in fp32, for every j."""
    ids = torch.tensor([list(tokens)])
    logits = torch.log_softmax(model(ids).logits[0, :-1].float(), -1)
    return logits.gather(1, ids[0, 1:, None])[:, 0].tolist()


def probe_of(model: Qwen3ForCausalLM) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    sequences = [torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in (5, 40, 90)]
    return {"tokens": sequences, "logprobs": [logprobs_of(model, sequence) for sequence in sequences]}


def put_policy(store: Store, *, tied: bool, context_limit: int = 256) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tiny_config(tied=tied, context_limit=context_limit).save_pretrained(folder)
        (Path(folder) / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
        store.put("policy", folder_objects(Path(folder)))


def put_weights(store: Store, version: int, model: Qwen3ForCausalLM, probe: dict[str, Any] | None) -> None:
    """Publish `model` as `version`; a tied model is saved without lm_head.weight, as Hugging Face does."""
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)
        save_file(tensors, str(Path(folder) / "model.safetensors"), metadata={"format": "pt"})
        facts = {"probe": probe} if probe else {}
        store.put(layout.weights(version), folder_objects(Path(folder)), version=version, **facts)
