"""Text FrozenLake: Gymnasium's lake on random solvable maps, one word a move.

The observation is the grid, one letter a cell, with the player's cell shown as P: `S` start, `F` frozen,
`H` hole, `G` goal. Reward 1 on reaching the goal, else 0.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, is_valid

from tasks.environments.base import Split, Step, TextEnvironment, derive_seed, split_of
from tasks.environments.registry import register

ACTIONS = ("left", "down", "right", "up")  # in the order of Gymnasium's action numbers
_MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))

INSTRUCTIONS = (
    "You cross a frozen lake. Each turn you see the grid: P you, S start, F frozen, H hole, G goal."
    " Reach G, do not step on H. Answer with one word: left, down, right or up."
)


@register
class FrozenLake(TextEnvironment):
    """Options: `size`; `frozen_share` of cells; `slippery`, and then the `success_rate` of a move;
    `max_turns`; `instructions` puts the rules into a system prompt, for a policy that can read them.
    """

    name = "frozenlake"
    vocabulary = ("S", "F", "H", "G", "P", *ACTIONS)
    max_turns = 8
    max_action_tokens = 4

    def __init__(
        self,
        *,
        split: Split = "train",
        size: int = 4,
        frozen_share: float = 0.8,
        slippery: bool = False,
        success_rate: float = 0.8,
        max_turns: int = 8,
        instructions: bool = False,
    ):
        if not (isinstance(size, int) and 2 <= size <= 16):
            raise ValueError(f"size must be 2 to 16, but it is {size}")
        if not 0 < frozen_share < 1:
            raise ValueError(f"frozen_share must be between 0 and 1, but it is {frozen_share}")
        if not 0 < success_rate <= 1:
            raise ValueError(f"success_rate must be above 0 and at most 1, but it is {success_rate}")
        if not (isinstance(max_turns, int) and max_turns >= 1):
            raise ValueError(f"max_turns must be 1 or more, but it is {max_turns}")
        self.split, self.size, self.frozen_share = split, size, frozen_share
        self.slippery, self.success_rate, self.max_turns = slippery, success_rate, max_turns
        self.system_prompt = INSTRUCTIONS if instructions else ""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self.map = lake_map(seed, self.split, self.size, self.frozen_share)
        self._lake = _lake(self.map, self.slippery, self.success_rate)
        # One lake serves many episodes at once, so the state and the dice are this object's own.
        self._state, self._turn = 0, 0
        self._rng = random.Random(derive_seed("slip", seed))
        return self._show(), {"map": self.map}

    def step(self, action: str) -> Step:
        self._turn += 1
        reward, terminated = 0.0, False
        word = action.strip().lower()
        if word in ACTIONS:
            outcomes = self._lake.P[self._state][ACTIONS.index(word)]
            _, state, gain, terminated = self._rng.choices(outcomes, [outcome[0] for outcome in outcomes])[0]
            self._state, reward = int(state), float(gain)
        truncated = not terminated and self._turn >= self.max_turns
        return self._show(), reward, terminated, truncated, {"success": reward > 0}

    @classmethod
    def blind_success(cls, seeds: Sequence[int], **options: Any) -> float:
        """Success of the best fixed path on the held-out maps of `seeds`."""
        return best_fixed_path(seeds, **options)[1]

    def demonstrate(self, rng: random.Random, noise: float) -> str:
        """A shortest way's next move (breadth-first search); a share `noise` of moves is random."""
        if rng.random() < noise:
            return rng.choice(ACTIONS)
        return ACTIONS[_shortest_way(self.map, self._state)]

    def _show(self) -> str:
        cells = "".join(self.map)
        cells = f"{cells[: self._state]}P{cells[self._state + 1 :]}"
        rows = (cells[start : start + self.size] for start in range(0, len(cells), self.size))
        return "\n".join(map(" ".join, rows))


def lake_map(seed: int, split: Split, size: int = 4, frozen_share: float = 0.8) -> tuple[str, ...]:
    """The first solvable random map of `seed` whose content is in `split`: Gymnasium's distribution of maps,
    conditioned on the split.
    """
    rng = random.Random(derive_seed("map", seed))
    while True:
        cells = ["F" if rng.random() < frozen_share else "H" for _ in range(size * size)]
        cells[0], cells[-1] = "S", "G"
        rows = tuple("".join(cells[start : start + size]) for start in range(0, size * size, size))
        if split_of("/".join(rows)) == split and is_valid([list(row) for row in rows], size):
            return rows


@lru_cache(maxsize=4096)
def _lake(rows: tuple[str, ...], slippery: bool, success_rate: float) -> FrozenLakeEnv:
    """Gymnasium's lake, whose transition table `P` is the whole of its dynamics."""
    return FrozenLakeEnv(desc=list(rows), is_slippery=slippery, success_rate=success_rate)


@lru_cache(maxsize=65536)
def _shortest_way(rows: tuple[str, ...], state: int) -> int:
    """The number of the first move of a shortest way to the goal; 0 where there is none."""
    size = len(rows)
    queue: deque[tuple[int, int, int]] = deque([(*divmod(state, size), -1)])
    seen = {divmod(state, size)}
    while queue:
        row, column, first = queue.popleft()
        if rows[row][column] == "G":
            return max(first, 0)
        for action, (down, right) in enumerate(_MOVES):
            cell = (row + down, column + right)
            inside = 0 <= cell[0] < size and 0 <= cell[1] < size
            if inside and cell not in seen and rows[cell[0]][cell[1]] != "H":
                seen.add(cell)
                queue.append((*cell, action if first < 0 else first))
    return 0


def best_fixed_path(
    seeds: Iterable[int], *, split: Split = "held_out", **options: Any
) -> tuple[Sequence[str], float]:
    """The best sequence of moves that ignores the grid, and its success on the maps of `seeds`.

    A policy that is no better has not been shown to read. Exact over all shortest ways from start to goal;
    takes the environment's options. With slipping, the success is the expected one.
    """
    lake = FrozenLake(split=split, **options)
    tables = []
    for seed in seeds:
        lake.reset(seed)
        tables.append(_transitions(lake._lake, lake.size**2))
    stacked = np.stack(tables)  # [maps, actions, states, states]
    moves = 2 * (lake.size - 1)
    best: tuple[Sequence[str], float] = ((), 0.0)
    for downs in combinations(range(moves), moves // 2):
        actions = [1 if position in downs else 2 for position in range(moves)][: lake.max_turns]
        belief = np.zeros((len(stacked), lake.size**2))
        belief[:, 0] = 1.0
        for action in actions:
            belief = np.einsum("ms,mst->mt", belief, stacked[:, action])
        success = float(belief[:, -1].mean())
        if success > best[1]:
            best = ([ACTIONS[action] for action in actions], success)
    return best


def _transitions(lake: FrozenLakeEnv, states: int) -> np.ndarray:
    table = np.zeros((4, states, states))
    for state, actions in lake.P.items():
        for action, outcomes in actions.items():
            for probability, target, _, _ in outcomes:
                table[action, state, target] += probability
    return table
