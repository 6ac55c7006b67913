"""The weight-transfer backend of the vLLM server: loads a prefetched local folder of safetensors.

Registered through the entry point `vllm.general_plugins`, so it runs inside vLLM's worker process. The folder
is local and verified by the agent before the pause, so that the pause holds only this load.

Invariant: after an update every parameter of the model comes from the folder, or the update raises. In
particular the output head of a tied model is loaded too: where vLLM packs its matrices on CPU, the copy would
otherwise silently stay that of the older version.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from tasks.inference import cpu_linear

BACKEND = "rollart_store"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass
class FolderInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: there is no connection to a trainer."""


@dataclass
class FolderUpdateInfo(WeightTransferUpdateInfo):
    """The local folder whose *.safetensors hold the whole checkpoint."""

    folder: str


class FolderWeightTransferEngine(WeightTransferEngine[FolderInitInfo, FolderUpdateInfo]):
    """Loads a whole checkpoint in Hugging Face layout from a local folder."""

    init_info_cls = FolderInitInfo
    update_info_cls = FolderUpdateInfo
    in_place = False

    def init_transfer_engine(self, init_info: FolderInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Put the layers into the state in which checkpoint weights can be loaded, unless they are in it."""
        self.in_place = current_platform.is_cpu() and cpu_linear.in_checkpoint_form(self.model)
        if not self.in_place:
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FolderUpdateInfo) -> None:
        """Load the folder's tensors. Raises FileNotFoundError if it holds none, ValueError if one is missing in place."""
        tied = bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))
        model: Any = self.model
        with torch.no_grad():
            loaded = model.load_weights(checkpoint(Path(update_info.folder), tied))
        if self.in_place and (missing := dict(model.named_parameters()).keys() - loaded):
            raise ValueError(f"{update_info.folder} has no weights for {', '.join(sorted(missing)[:3])}")

    def finish_weight_update(self) -> None:
        """Bring the loaded layers into the form the kernels want."""
        if not self.in_place:
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing to release."""


def checkpoint(folder: Path, tied: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of the folder by name, layer by layer as the files order them; a tied head is repeated."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no *.safetensors")
    head_seen = False
    embedding: torch.Tensor | None = None
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                tensor = file.get_tensor(name)
                head_seen = head_seen or name == HEAD
                if name == EMBEDDING:
                    embedding = tensor
                yield name, tensor
    if tied and not head_seen and embedding is not None:
        yield HEAD, embedding


def register() -> None:
    """Entry point of `vllm.general_plugins`; vLLM calls it in every process, perhaps more than once."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FolderWeightTransferEngine)
    if current_platform.is_cpu():
        cpu_linear.install()
