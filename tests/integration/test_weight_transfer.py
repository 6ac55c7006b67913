"""Loads in place: all or an error."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tasks.inference.weight_transfer import FolderUpdateInfo, FolderWeightTransferEngine


class Model(nn.Sequential):
    """Loads as vLLM's models do."""

    def load_weights(self, weights: Any) -> set[str]:
        own, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            own[name].copy_(tensor)
            loaded.add(name)
        return loaded


@pytest.fixture
def engine() -> FolderWeightTransferEngine:
    engine = object.__new__(FolderWeightTransferEngine)
    engine.model = Model(nn.Linear(2, 3), nn.Linear(3, 2))
    engine.model_config = SimpleNamespace(hf_config=SimpleNamespace())  # type: ignore[assignment]
    engine.in_place = True
    return engine


def test_all_tensors_come_from_the_folder(engine: FolderWeightTransferEngine, tmp_path: Path) -> None:
    new = Model(nn.Linear(2, 3), nn.Linear(3, 2)).state_dict()
    save_file(new, tmp_path / "model.safetensors")
    engine.receive_weights(FolderUpdateInfo(str(tmp_path)))
    assert all(torch.equal(tensor, new[name]) for name, tensor in engine.model.state_dict().items())


def test_a_tensor_that_is_missing_is_named(engine: FolderWeightTransferEngine, tmp_path: Path) -> None:
    new = engine.model.state_dict()
    del new["1.weight"]
    save_file(new, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"no weights for 1\.weight"):
        engine.receive_weights(FolderUpdateInfo(str(tmp_path)))


def test_a_folder_without_weights_is_named(engine: FolderWeightTransferEngine, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors"):
        engine.receive_weights(FolderUpdateInfo(str(tmp_path)))
