"""A second set of the policy's weights in a vLLM worker, loaded while the first one generates.

For CPU only: its kernels want packed matrices, and packing takes longer than all else of a load. On a GPU a load
is one copy into the tensors that CUDA graphs refer to, and there is no room for a second model.

Invariants: the serving model is not touched before `swap_in`; after it every parameter is that of the standby.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from threading import Thread
from typing import Any

import torch
from torch.nn import Module
from vllm.config import ModelConfig
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor

PACKED = "cpu_linear"  # vLLM's attribute of a layer that holds the product with its packed matrix


class Standby:
    """The next weights of `model`; `load(twin)` fills a model of the same shapes, in a thread."""

    def __init__(self, model: Module, model_config: ModelConfig, load: Callable[[Any], Any]):
        self.model, self.twin = model, twin_of(model)
        self._config, self._load = model_config, load
        self._error: Exception | None = None
        self._thread = Thread(target=self._prepare, name="standby weights", daemon=True)
        self._thread.start()

    def ready(self) -> bool:
        """Whether the weights are loaded and packed. Raises what loading them raised."""
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def swap_in(self) -> None:
        """Give the serving model these weights; waits for them. Raises what loading them raised."""
        self._thread.join()
        self.ready()
        for layer, twin in zip(self.model.modules(), self.twin.modules(), strict=True):
            layer._parameters, layer._buffers = twin._parameters, twin._buffers
            if PACKED in twin.__dict__:
                layer.__dict__[PACKED] = twin.__dict__[PACKED]

    def _prepare(self) -> None:
        try:
            with torch.no_grad():
                initialize_layerwise_reload(self.twin)
                self._load(self.twin)
                finalize_layerwise_reload(self.twin, self._config)
        except Exception as error:  # raised again where somebody asks
            self._error = error


def twin_of(model: Module) -> Module:
    """A model of the same layers with tensors of its own; all else is shared."""
    tensors: dict[int, torch.Tensor] = {}  # by the id of the original, so that tied ones stay tied
    layers: dict[int, Module] = {}

    def clone(tensor: Any) -> Any:
        if tensor is None:
            return None
        if id(tensor) not in tensors:
            own = tensor.detach().clone()
            own.__class__ = tensor.__class__
            own.__dict__ = tensor.__dict__.copy()  # how vLLM loads it
            tensors[id(tensor)] = own
        return tensors[id(tensor)]

    def twin(layer: Module) -> Module:
        if id(layer) not in layers:
            own = layers[id(layer)] = copy.copy(layer)
            own._parameters = {name: clone(p) for name, p in layer._parameters.items()}
            own._buffers = {name: clone(b) for name, b in layer._buffers.items()}
            own._non_persistent_buffers_set = set(layer._non_persistent_buffers_set)
            own._modules = {name: child and twin(child) for name, child in layer._modules.items()}
            # Copies: a reload notes in these whose loader fills them.
            parameters, buffers = get_layerwise_info(layer).restore_metadata
            get_layerwise_info(own).restore_metadata = (
                {name: to_meta_tensor(p) for name, p in parameters.items()},
                {name: to_meta_tensor(b) for name, b in buffers.items()},
            )
        return layers[id(layer)]

    return twin(model)
