"""Publishing a version: the whole weights as a Hugging Face folder, with the probe that engines check them by."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from tasks.store import Store, folder_objects, layout

SHARD_SIZE = "128MB"  # of one file: several of them are hashed and moved at once, at both ends
PROBE_SEQUENCES, PROBE_LENGTH = 6, 32


def probe_tokens(vocabulary: int, context_limit: int) -> list[list[int]]:
    """A few fixed random sequences over the whole vocabulary: any wrong tensor of a model shows in them."""
    random = np.random.default_rng(20251222)
    length = min(PROBE_LENGTH, context_limit)
    return random.integers(0, vocabulary, size=(PROBE_SEQUENCES, length)).tolist()


def write_weights(weights: dict[str, Tensor], folder: Path) -> None:
    """Write a state dict as safetensors, with an index if it takes several files.

    A tied output head is written too: engines keep their old one when an update leaves it out.
    """
    split = split_torch_state_dict_into_shards(
        weights, filename_pattern="model{suffix}.safetensors", max_shard_size=SHARD_SIZE
    )
    for name, tensors in split.filename_to_tensors.items():
        save_file({t: weights[t].contiguous() for t in tensors}, folder / name, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True))


def publish(
    store: Store,
    version: int,
    folder: Path,
    policy_folder: Path,
    tokens: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
) -> dict[str, Any]:
    """Put `folder`'s weights and the policy's files at `weights/<version>`; returns the manifest.

    `logprobs[i][j]` is log p(tokens[i][j + 1] | tokens[i][: j + 1]) at temperature 1.
    """
    objects = {**folder_objects(policy_folder), **folder_objects(folder)}
    return store.put(
        layout.weights(version),
        objects,
        version=version,
        probe={"tokens": list(tokens), "logprobs": list(logprobs)},
    )


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Where a version's files are made before they are put into the store."""
    return tempfile.TemporaryDirectory(prefix="rollart-weights-")
