"""Addition with worked steps: one turn, a short question, a long answer.

`47 + 85 =` is answered column by column from the right, each with the carry so far last and two digits
(carry, digit) as the result, then `#` and the sum: `7 + 5 + 0 = 12 ; 4 + 8 + 1 = 13 ; # 132`.
Reward 1 if the number after the last `#` is the sum, else 0; the steps themselves are free.
"""

from __future__ import annotations

import random
import re
from typing import Any

from tasks.environments.base import Split, Step, TextEnvironment, derive_seed, split_of
from tasks.environments.registry import register

INSTRUCTIONS = (
    "Add the numbers. Work column by column from the right, and write each column as digits + carry = result;"
    " end with # and the sum. Example: 47 + 85 = is answered 7 + 5 + 0 = 12 ; 4 + 8 + 1 = 13 ; # 132"
)
_ANSWER = re.compile(r"#\s*((?:\d\s*)+)$")


@register
class Arithmetic(TextEnvironment):
    """Options: `digits` of each number, how many `terms` are added; `instructions` puts the rules into a
    system prompt, for a policy that can read them.
    """

    name = "arithmetic"
    vocabulary = (*"0123456789", "+", "=", ";", "#")
    max_turns = 1
    max_action_tokens = 48

    def __init__(
        self, *, split: Split = "train", digits: int = 3, terms: int = 2, instructions: bool = False
    ):
        if not (isinstance(digits, int) and 1 <= digits <= 12):
            raise ValueError(f"digits must be 1 to 12, but it is {digits}")
        if not (isinstance(terms, int) and 2 <= terms <= 9):
            raise ValueError(f"terms must be 2 to 9, but it is {terms}")
        self.split, self.digits, self.terms = split, digits, terms
        self.system_prompt = INSTRUCTIONS if instructions else ""
        columns, answer = digits * (2 * terms + 5), 1 + (digits + 1) + 1
        self.max_action_tokens = columns + answer + 4

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        rng = random.Random(derive_seed("sum", seed))
        while True:
            self.numbers = [rng.randrange(10**self.digits) for _ in range(self.terms)]
            if split_of("+".join(map(str, self.numbers))) == self.split:
                break
        question = " + ".join(f"{number:0{self.digits}d}" for number in self.numbers)
        return f"{question} =", {"numbers": self.numbers}

    def step(self, action: str) -> Step:
        found = _ANSWER.search(action.strip())
        success = found is not None and int("".join(found[1].split())) == sum(self.numbers)
        return "", float(success), True, False, {"success": success}

    def demonstrate(self, rng: random.Random, noise: float) -> str:
        """The worked answer; in a share `noise` of the columns the result's last digit is wrong."""
        columns = zip(*(reversed(f"{number:0{self.digits}d}") for number in self.numbers), strict=True)
        carry, steps, answer = 0, [], []
        for column in columns:
            total = sum(map(int, column)) + carry
            digit = total % 10
            if rng.random() < noise:
                digit = (digit + rng.randint(1, 9)) % 10
            steps.append(f"{' + '.join(column)} + {carry} = {total // 10}{digit} ;")
            carry = total // 10
            answer.append(str(digit))
        return " ".join([*steps, "#", "".join([str(carry), *reversed(answer)])])
