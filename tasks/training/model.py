"""The policy under DeepSpeed: forward, optimiser step, and its weights and optimiser state as plain tensors.

Nothing here knows of objectives, versions or the store. Weights are exchanged as Hugging Face state dicts and
optimiser state as each rank's own shard; both are safetensors, never pickle.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tasks.config import TrainerConfig
from tasks.training.model_folder import weight_files

ADAM_STATE = ("exp_avg", "exp_avg_sq")


class Policy(nn.Module):
    """A causal language model that computes logits only where they are asked for."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [N, V] in fp32 of `tokens` [B, T], padded on the right, at `positions` [N] of [B * T]."""
        hidden = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        selected = hidden.flatten(0, 1).index_select(0, positions)
        return self.model.get_output_embeddings()(selected).float()


def new_model(policy_folder: Path, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    """A model of `policy_folder`'s architecture with random weights that depend on `seed` alone."""
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(policy_folder)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").to(dtype)


def load_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A model with the weights of a Hugging Face folder."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of a folder's safetensors files, one at a time."""
    for name in weight_files(folder):
        with safe_open(folder / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (not a dict)
                yield key, file.get_tensor(key)


class ShardedPolicy:
    """A policy and its Adam optimiser, spread over ranks by DeepSpeed's ZeRO stage.

    All methods are collective: every rank calls them in the same order.
    """

    def __init__(self, model: PreTrainedModel, config: TrainerConfig):
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.config.use_cache = False
        self.policy = Policy(model).train()
        # bf16 needs fp32 masters and fp32 gradient accumulation, which DeepSpeed does alike from ZeRO stage 2 on.
        self.stage = max(config.zero_stage, 2) if config.precision == "bf16" else config.zero_stage
        self.max_grad_norm = config.max_grad_norm
        optimiser = torch.optim.AdamW(
            self.policy.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        self.engine, self.optimiser, _, _ = deepspeed.initialize(
            model=self.policy, optimizer=optimiser, config=self._settings(config), dist_init_required=False
        )
        self.base = optimiser if self.stage == 0 else self.optimiser.optimizer
        self.device = self.engine.device
        self.reset_optimiser()  # stage 3 takes a step of zeros to make its state

    @property
    def model(self) -> PreTrainedModel:
        """The Hugging Face model inside."""
        return self.policy.model

    def logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """See `Policy.forward`; without a gradient inside `torch.no_grad`."""
        return self.engine(tokens, positions)

    def accumulate(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of this rank's share of the loss; gradients are summed over ranks at the `last`."""
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * dist.get_world_size())  # DeepSpeed takes the mean over ranks

    def step(self, learning_rate: float) -> float:
        """One optimiser step after clipping; returns the norm of the gradient before clipping.

        Raises FloatingPointError if the gradient is not finite; the weights are then of no use.
        """
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate
        if self.stage == 0:  # DeepSpeed clips here too, but does not say what the norm was
            norm = nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.engine.step()
        else:
            self.engine.step()
            norm = self.engine.get_global_grad_norm()  # inf or -1 if it is not finite
        if not 0 <= float(norm) < math.inf:
            raise FloatingPointError("the gradient is not finite")
        return float(norm)

    def reset_optimiser(self) -> None:
        """Forget Adam's moments and step count."""
        self.base.state.clear()

    def weights(self) -> dict[str, Tensor]:
        """The whole state dict, on the CPU, on rank 0; empty on the others. A tied output head is in it too."""
        gathered: dict[str, Tensor] = {}
        for name, tensor in self._named_tensors():
            with deepspeed.zero.GatheredParameters([tensor], enabled=self.stage == 3):
                if dist.get_rank() == 0:
                    gathered[name] = tensor.detach().to("cpu", copy=True)
        return gathered

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Take weights in place, masters included. Raises KeyError if one is missing."""
        mine = dict(self._named_tensors())
        taken = set()
        for name, value in weights:
            if name in mine:
                with deepspeed.zero.GatheredParameters(
                    [mine[name]], modifier_rank=0, enabled=self.stage == 3
                ):
                    mine[name].data.copy_(value)
                taken.add(id(mine[name]))
        missing = [name for name, tensor in mine.items() if id(tensor) not in taken]
        if missing:
            raise KeyError(f"the weights have no {', '.join(missing[:3])}")
        if self.stage in (1, 2):
            self.optimiser.refresh_fp32_params()
        elif self.stage == 3:
            for master, shards in zip(
                self.optimiser.fp32_partitioned_groups_flat,
                self.optimiser.fp16_partitioned_groups_flat,
                strict=True,
            ):
                master.data.copy_(shards.data)

    def shard(self) -> dict[str, Tensor]:
        """This rank's masters and Adam state, to be restored by `load_shard` of the same rank and stage."""
        state: dict[str, Tensor] = {}
        for i, master in enumerate(self._masters()):
            state[f"{i}.master"] = master.detach().to("cpu", copy=True).contiguous()
            moments = self.base.state.get(master, {})
            if moments:
                state[f"{i}.step"] = torch.as_tensor(moments["step"], dtype=torch.float32).reshape(1).clone()
            for key in ADAM_STATE:
                if key in moments:
                    state[f"{i}.{key}"] = moments[key].detach().to("cpu", copy=True).contiguous()
        return state

    def load_shard(self, state: dict[str, Tensor]) -> None:
        """The inverse of `shard`; the weights themselves are loaded first, by `load`."""
        self.base.state.clear()
        for i, master in enumerate(self._masters()):
            master.data.copy_(state[f"{i}.master"])
            if f"{i}.step" in state:
                self.base.state[master] = {
                    "step": state[f"{i}.step"].reshape(()).clone(),
                    **{key: state[f"{i}.{key}"].to(master.device, copy=True) for key in ADAM_STATE},
                }

    def _masters(self) -> list[Tensor]:
        if self.stage == 0:
            return [p for group in self.base.param_groups for p in group["params"]]
        if self.stage == 3:
            return list(self.optimiser.fp32_partitioned_groups_flat)
        return list(self.optimiser.single_partition_of_fp32_groups)

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters under all their names, tied ones more than once, and persistent buffers."""
        yield from self.model.named_parameters(remove_duplicate=False)
        persistent = self.model.state_dict(keep_vars=True).keys()
        yield from ((name, buffer) for name, buffer in self.model.named_buffers() if name in persistent)

    def _settings(self, config: TrainerConfig) -> dict[str, Any]:
        bucket = min(500_000_000, sum(p.numel() for p in self.policy.parameters()))
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": config.max_grad_norm if self.stage else 0.0,
            "zero_optimization": {
                "stage": self.stage,
                "overlap_comm": False,
                "reduce_bucket_size": bucket,  # DeepSpeed's default takes 2 GB a rank, whatever the model
                "allgather_bucket_size": bucket,
            },
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": config.precision == "bf16"},
            "data_types": {"grad_accum_dtype": "fp32"},
            "steps_per_print": 10**9,
        }


def start_distributed(threads: int) -> None:
    """Join the ranks that torchrun started, and make arithmetic repeatable. `threads` are this rank's."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # On CPU DeepSpeed would compile a shared-memory collective at first use: minutes, and it needs a C++ compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo", verbose=False)
