"""Addition on a form of columns: one turn, a short question, a long answer.

The question is the form: for each column, least significant first, the digits of both numbers, and blanks for
the carry into it and its two-digit result. The answer is the form filled in. In base 10, 47 + 85 is asked as
`7 5 _ = _ _ ; 4 8 _ = _ _` and answered `7 5 0 = 1 2 ; 4 8 1 = 1 3`. The sum is read off the results: the last
digit of each column, and before them the first digit of the last one, here 132. Reward 1 if it is right,
else 0; whatever else the answer says is free.

Every blank depends on few tokens at fixed distances, and a column's facts are few in a small base: so a policy
with a million parameters learns it from some thousand demonstrations.
"""

from __future__ import annotations

import random
import re
from typing import Any

from tasks.environments.base import Split, Step, TextEnvironment, derive_seed, split_of
from tasks.environments.registry import register

INSTRUCTIONS = (
    "Add two numbers written in base {base}. You see one column of digits after the other, the least significant"
    " first, each with blanks for the carry and the two digits of its result. Answer with the columns filled in."
    " Example in base 10, for 47 + 85: 7 5 _ = _ _ ; 4 8 _ = _ _ is answered 7 5 0 = 1 2 ; 4 8 1 = 1 3"
)
_RESULT = re.compile(r"=\s*(\d)\s*(\d)\s*$")


@register
class Arithmetic(TextEnvironment):
    """Options: `digits` of each number, and their `base`; `instructions` puts the rules into a system prompt,
    for a policy that can read them.
    """

    name = "arithmetic"
    vocabulary = (*"0123456789", "_", "=", ";")
    max_turns = 1

    def __init__(self, *, split: Split = "train", digits: int = 4, base: int = 3, instructions: bool = False):
        if not (isinstance(digits, int) and 1 <= digits <= 12):
            raise ValueError(f"digits must be 1 to 12, but it is {digits}")
        if not (isinstance(base, int) and 2 <= base <= 10):
            raise ValueError(f"base must be 2 to 10, but it is {base}")
        self.split, self.digits, self.base = split, digits, base
        self.system_prompt = INSTRUCTIONS.format(base=base) if instructions else ""
        self.max_action_tokens = 7 * digits + 4  # a filled-in form, its end of turn, and some to spare

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        rng = random.Random(derive_seed("sum", seed))
        while True:
            self.numbers = [rng.randrange(self.base**self.digits) for _ in range(2)]
            # a + b and b + a are one instance, or the held-out sums would have twins in training.
            if split_of("+".join(map(str, sorted(self.numbers)))) == self.split:
                break
        return " ; ".join(f"{a} {b} _ = _ _" for a, b in self._columns()), {"numbers": self.numbers}

    def step(self, action: str) -> Step:
        results = [_RESULT.search(column) for column in action.split(";")]
        found = [int(result[2]) for result in results if result]
        if results[-1] and len(found) == len(results):
            found.append(int(results[-1][1]))
        success = found == _digits(sum(self.numbers), self.base, self.digits + 1)
        return "", float(success), True, False, {"success": success}

    def demonstrate(self, rng: random.Random, noise: float) -> str:
        """The form filled in; in a share `noise` of the columns the result's last digit is random."""
        carry, answer = 0, []
        for a, b in self._columns():
            total = a + b + carry
            last = rng.randrange(self.base) if rng.random() < noise else total % self.base
            answer.append(f"{a} {b} {carry} = {total // self.base} {last}")
            carry = total // self.base
        return " ; ".join(answer)

    def _columns(self) -> list[tuple[int, int]]:
        """The digits of both numbers, least significant first."""
        first, second = (_digits(number, self.base, self.digits) for number in self.numbers)
        return list(zip(first, second, strict=True))


def _digits(number: int, base: int, count: int) -> list[int]:
    """The last `count` digits of a number, least significant first."""
    return [number // base**place % base for place in range(count)]
