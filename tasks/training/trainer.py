"""The two objectives: supervised rounds and policy-gradient iterations, on a sharded policy.

Invariants: a gradient does not depend on how its minibatch is cut into micro-batches or ranks; what is random
in iteration k depends on (seed, k) alone, so a replay of a batch gives the same weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tasks.config import Correction, LossConfig, RunConfig
from tasks.training import losses
from tasks.training.batching import plan
from tasks.training.model import Policy, ShardedPolicy
from tasks.training.samples import MicroBatch, Sample, collate, policy_gradient_samples, sample
from tasks.trajectory import Trajectory

PROXIMAL = ("decoupled", "icepop")  # corrections that compare with the policy the batch began with
Metrics = dict[str, float]
Progress = Callable[[str], None]  # told what is being done before each step; may raise to stop


def learning_rate(base: float, step: int, warmup: int, schedule: str, total: int) -> float:
    """The rate of optimiser step `step` (from 0): linear warm-up over `warmup` steps, then constant or cosine.

    Cosine (arXiv 1608.03983, one cycle) falls to 0 at step `total`.
    """
    if step < warmup:
        return base * (step + 1) / warmup
    if schedule == "constant":
        return base
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return base * 0.5 * (1 + math.cos(math.pi * progress))


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """log p [N] of `targets` [N] under `logits` [N, V]."""
    return logits.gather(-1, targets[:, None]).squeeze(-1) - torch.logsumexp(logits, dim=-1)


class Tally:
    """Sums and maxima over micro-batches and, at the end, over ranks."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.maxima: dict[str, float] = {}

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)

    def top(self, **values: float) -> None:
        for name, value in values.items():
            self.maxima[name] = max(self.maxima.get(name, -math.inf), float(value))

    def over_ranks(self, device: torch.device) -> Metrics:
        """The same on all ranks; every rank has the same names."""
        if dist.get_world_size() == 1:
            return {**self.sums, **self.maxima}
        result: Metrics = {}
        for values, operation in ((self.sums, dist.ReduceOp.SUM), (self.maxima, dist.ReduceOp.MAX)):
            if values:
                names = sorted(values)
                together = torch.tensor([values[name] for name in names], dtype=torch.float64, device=device)
                dist.all_reduce(together, op=operation)
                result |= dict(zip(names, together.tolist(), strict=True))
        return result


class Trainer:
    """Trains a sharded policy on batches. All methods are collective."""

    def __init__(self, policy: ShardedPolicy, config: RunConfig):
        self.policy, self.config = policy, config
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.steps = 0  # optimiser steps since the optimiser was fresh
        self.reference: Policy | None = None  # for the KL term

    def restart_optimiser(self) -> None:
        """A fresh optimiser at the beginning of its schedule."""
        self.policy.reset_optimiser()
        self.steps = 0

    def supervised(
        self, demonstrations: Sequence[Trajectory], batch_size: int, rate: float, progress: Progress
    ) -> Metrics:
        """One epoch of maximum likelihood on the demonstrations' generated tokens, in their order.

        The rate is constant after the configured warm-up.
        """
        samples = [s for s in map(sample, demonstrations) if s is not None]
        steps = [samples[i : i + batch_size] for i in range(0, len(samples), batch_size)]
        tally, norms, started, now = Tally(), [], time.perf_counter(), 0.0
        for number, step in enumerate(steps):
            progress(f"supervised step {number + 1}/{len(steps)}")
            weights = losses.token_weights(np.array([len(s.positions) for s in step]), "token_mean", 0)
            for micro, last in self._micro_batches(step, weights, tally):
                logits = self.policy.logits(micro.tokens, micro.positions)
                logp = token_logprobs(logits, micro.targets)
                loss = -(micro.weights * logp).sum()
                self.policy.accumulate(loss, last)
                right = (logits.detach().argmax(-1) == micro.targets) & (micro.weights > 0)
                tally.add(loss=loss.item() / len(steps), right=right.sum().item())
                tally.add(generated=(micro.weights > 0).sum().item())
            now = learning_rate(rate, self.steps, self.config.trainer.warmup_steps, "constant", 0)
            norms.append(self._step(now))
        seconds = time.perf_counter() - started
        total = tally.over_ranks(self.policy.device)
        return self._common(total, norms, seconds, now, samples) | {
            "train/loss": total.get("loss", 0.0),
            "train/token_accuracy": total.get("right", 0.0) / max(1.0, total.get("generated", 0.0)),
        }

    def policy_gradient(self, trajectories: Sequence[Trajectory], k: int, progress: Progress) -> Metrics:
        """Iteration `k`: `epochs` passes over the batch in `minibatches` optimiser steps each.

        Groups without reward variance are left out before the forward pass, and of every denominator.
        `train/kl` is of the policy to the one that generated (k3), `train/kl_reference` to version 0 where
        the objective has that term. `train/logprob_mismatch_max` is over the generated tokens of version k
        that were fed before the first update: those of the first minibatch, and with a correction around a
        proximal policy all of the trained ones. `train/masked_fraction` is of the tokens that the off-policy
        correction bounds or drops, `train/clip_fraction` of those that the clip takes the gradient from.
        """
        trainer = self.config.trainer
        samples, without = policy_gradient_samples(trajectories, self.config.loss.advantage)
        random = np.random.default_rng(np.random.SeedSequence([self.config.seed, k % 2**32]))
        count = min(trainer.minibatches, len(samples))
        tally, norms, started, now = Tally(), [], time.perf_counter(), 0.0
        tally.top(mismatch=0.0, ratio_max=0.0, weight_max=0.0)
        proximal: dict[int, np.ndarray] = {}
        minibatches = np.array_split(random.permutation(len(samples)), count) if count else []
        if self.config.correction in PROXIMAL:
            # The minibatch that comes before any update needs none: its own log-probs are the proximal ones.
            later = minibatches if trainer.epochs > 1 else minibatches[1:]
            proximal = self._proximal(samples, later, k, tally, progress)
        for number in range(trainer.epochs * count):
            progress(f"training iteration {k}: minibatch {number + 1}/{trainer.epochs * count}")
            minibatch = minibatches[
                number % count
            ]  # the same in each epoch, so a rank's proximal log-probs are its own
            self._minibatch(samples, minibatch, proximal, k if number == 0 else None, tally)
            now = self._scheduled_rate()
            norms.append(self._step(now))
        seconds = time.perf_counter() - started
        total = tally.over_ranks(self.policy.device)
        tokens = max(1.0, total.get("generated", 0.0))
        metrics = self._common(total, norms, seconds, now, samples) | {
            "train/loss": total.get("loss", 0.0) / max(1, len(norms)),
            "train/kl": total.get("kl", 0.0) / tokens,
            "train/entropy": total.get("entropy", 0.0) / tokens,
            "train/clip_fraction": total.get("clipped", 0.0) / tokens,
            "train/ratio_mean": total.get("ratio", 0.0) / tokens if norms else 1.0,
            "train/ratio_max": total["ratio_max"] if norms else 1.0,
            "train/masked_fraction": total.get("masked", 0.0) / tokens,
            **_weight_metrics(total, tokens),
            "train/logprob_mismatch_max": total["mismatch"],
            "train/groups_without_variance": float(without),
        }
        if self.reference is not None:
            metrics["train/kl_reference"] = total.get("kl_reference", 0.0) / tokens
        return metrics

    @torch.no_grad()
    def probe_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """log p(tokens[j + 1] | tokens[: j + 1]) of every position but the last, at temperature 1."""
        self.policy.policy.eval()
        result = []
        for sequence in sequences:
            tokens = torch.tensor([list(sequence)], device=self.policy.device)
            positions = torch.arange(len(sequence) - 1, device=self.policy.device)
            logits = self.policy.logits(tokens[:, :-1], positions)
            result.append(token_logprobs(logits, tokens[0, 1:]).tolist())
        self.policy.policy.train()
        return result

    # how

    def _minibatch(
        self,
        samples: Sequence[Sample],
        minibatch: np.ndarray,
        proximal: dict[int, np.ndarray],
        fresh: int | None,
        tally: Tally,
    ) -> None:
        """Accumulate the gradient of one minibatch. `fresh` is k while the weights are those of version k."""
        chosen = [samples[i] for i in minibatch]
        counts = np.array([len(s.positions) for s in chosen])
        weights = losses.token_weights(
            counts, self.config.loss.normalisation, self.config.policy.context_limit
        )
        known = [proximal.get(int(i)) for i in minibatch]
        for micro, last, indices in self._indexed_micro_batches(chosen, weights, tally):
            logits = self.policy.logits(micro.tokens, micro.positions) / self.config.rollout.temperature
            logp = token_logprobs(logits, micro.targets)
            before = [known[i] for i in indices]
            if before and all(values is not None for values in before):
                centre = torch.from_numpy(np.concatenate(before)).to(logp.device)
            else:
                centre = logp.detach()
            self._accumulate(logits, logp, centre, micro, last, fresh, tally)

    def _accumulate(
        self,
        logits: Tensor,
        logp: Tensor,
        proximal: Tensor,
        micro: MicroBatch,
        last: bool,
        fresh: int | None,
        tally: Tally,
    ) -> None:
        loss_config, real = self.config.loss, micro.weights > 0
        result = surrogate(self.config.correction, loss_config, logp, proximal, micro)
        objective = result.loss
        with torch.set_grad_enabled(loss_config.entropy_coefficient > 0):
            entropy = losses.entropy(logits)
        if loss_config.entropy_coefficient > 0:
            objective = objective - loss_config.entropy_coefficient * entropy
        if self.reference is not None:
            distance = losses.k3(logp, self._reference_logprobs(micro))
            objective = objective + loss_config.kl_coefficient * distance
            tally.add(kl_reference=distance.detach()[real].sum().item())
        loss = (micro.weights * objective).sum()
        self.policy.accumulate(loss, last)
        with torch.no_grad():
            tally.add(
                loss=loss.item(),
                generated=real.sum().item(),
                entropy=entropy[real].sum().item(),
                clipped=(result.clipped & real).sum().item(),
                masked=(result.masked & real).sum().item(),
                ratio=result.ratio[real].sum().item(),
                weight=result.weight[real].sum().item(),
                weight_squared=result.weight[real].square().sum().item(),
                kl=losses.k3(logp, micro.behaviour)[real].sum().item(),
            )
            if real.any():
                tally.top(ratio_max=result.ratio[real].max().item())
                tally.top(weight_max=result.weight[real].max().item())
            if fresh is not None:
                tally.top(mismatch=_mismatch(logp, micro, fresh))

    @torch.no_grad()
    def _proximal(
        self,
        samples: Sequence[Sample],
        minibatches: Sequence[np.ndarray],
        k: int,
        tally: Tally,
        progress: Progress,
    ) -> dict[int, np.ndarray]:
        """Log-probs of the version the batch began with, by index, of this rank's samples in each minibatch."""
        progress(f"training iteration {k}: proximal log-probs")
        found: dict[int, np.ndarray] = {}
        for minibatch in minibatches:
            chosen = [samples[i] for i in minibatch]
            for micro, _, within in self._indexed_micro_batches(chosen, np.ones(len(chosen)), Tally()):
                logits = self.policy.logits(micro.tokens, micro.positions) / self.config.rollout.temperature
                logp = token_logprobs(logits, micro.targets)
                tally.top(mismatch=_mismatch(logp, micro, k))
                ends = np.cumsum([len(chosen[i].positions) for i in within])
                for i, values in zip(within, np.split(logp.cpu().numpy(), ends[:-1]), strict=False):
                    found[int(minibatch[i])] = values
        return found

    @torch.no_grad()
    def _reference_logprobs(self, micro: MicroBatch) -> Tensor:
        assert self.reference is not None
        logits = self.reference(micro.tokens, micro.positions) / self.config.rollout.temperature
        return token_logprobs(logits, micro.targets)

    def _indexed_micro_batches(self, samples: Sequence[Sample], weights: np.ndarray, tally: Tally):
        """This rank's micro-batches, whether each is the last, and the places of its samples."""
        lengths = [len(s.tokens) for s in samples]
        mine = plan(lengths, self.config.trainer.tokens_per_micro_batch, self.ranks)[self.rank]
        for number, indices in enumerate(mine):
            tally.add(
                real=sum(lengths[i] for i in indices),
                padded=len(indices) * max((lengths[i] for i in indices), default=0),
            )
            micro = collate([samples[i] for i in indices], [weights[i] for i in indices], self.policy.device)
            yield micro, number == len(mine) - 1, indices

    def _micro_batches(self, samples: Sequence[Sample], weights: np.ndarray, tally: Tally):
        return ((micro, last) for micro, last, _ in self._indexed_micro_batches(samples, weights, tally))

    def _step(self, rate: float) -> float:
        self.steps += 1
        return self.policy.step(rate)

    def _scheduled_rate(self) -> float:
        trainer = self.config.trainer
        total = self.config.iterations * trainer.epochs * trainer.minibatches
        return learning_rate(trainer.learning_rate, self.steps, trainer.warmup_steps, trainer.schedule, total)

    def _common(
        self, total: Metrics, norms: list[float], seconds: float, rate: float, samples: Sequence[Sample]
    ) -> Metrics:
        real, padded = total.get("real", 0.0), total.get("padded", 0.0)
        return {
            "train/grad_norm": float(np.mean(norms)) if norms else 0.0,
            "train/padding_fraction": 1 - real / padded if padded else 0.0,
            "train/tokens": real,
            "train/tokens_per_s": real / seconds,
            "train/learning_rate": rate,
            "train/sequences": float(len(samples)),
            "time/train": seconds,
        }


def surrogate(
    correction: Correction, loss: LossConfig, logp: Tensor, proximal: Tensor, micro: MicroBatch
) -> losses.Surrogate:
    """The surrogate of the correction in force; see `losses` for each."""
    behaviour, advantages, clip = micro.behaviour, micro.advantages, (loss.clip_low, loss.clip_high)
    match correction:
        case "none":
            return losses.ppo(logp, behaviour, advantages, *clip)
        case "truncated":
            return losses.truncated(logp, behaviour, advantages, loss.truncation_cap)
        case "decoupled":
            return losses.decoupled(logp, proximal, behaviour, advantages, *clip, loss.truncation_cap)
        case "icepop":
            bounds = (loss.icepop_low, loss.icepop_high)
            return losses.icepop(logp, proximal, behaviour, advantages, clip, bounds)
        case "dppo":
            return losses.dppo(logp, behaviour, advantages, loss.dppo_bound)
        case "gspo":
            low, high = loss.gspo_clip_low, loss.gspo_clip_high
            return losses.gspo(logp, behaviour, advantages, micro.sequences, low, high)


def _weight_metrics(total: Metrics, tokens: float) -> Metrics:
    """Mean, spread and maximum of the off-policy weights before their bound; 1, 0 and 1 if nothing was trained."""
    if "weight" not in total:
        return {"train/weight_mean": 1.0, "train/weight_std": 0.0, "train/weight_max": 1.0}
    mean = total["weight"] / tokens
    variance = max(0.0, total["weight_squared"] / tokens - mean**2)
    return {
        "train/weight_mean": mean,
        "train/weight_std": math.sqrt(variance),
        "train/weight_max": total["weight_max"],
    }


def _mismatch(logp: Tensor, micro: MicroBatch, k: int) -> float:
    """Largest |trainer - engine| log-prob among generated tokens of version `k`; 0 if there are none."""
    chosen = (micro.versions == k) & (micro.weights > 0)
    return (logp.detach() - micro.behaviour)[chosen].abs().max().item() if chosen.any() else 0.0
