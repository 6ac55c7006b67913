"""The chat template, rendered incrementally: token ids that are only ever appended to.

Invariant: the token list of a turn is a prefix of the next turn's, whatever the template does to a
conversation's history, because history is never rendered again: each new user turn is rendered against a
fixed dummy conversation, and only what follows the dummy's answer is kept. Needs `tokenizers` and `jinja2`
alone, so that it runs where there is no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from tasks.errors import UserError
from tasks.store import Store

_ANSWER = "An answer that no one gave."  # the dummy's; found again by its text
_PREFIX = "policy"
_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


class ChatRenderer:
    """Text turns to token ids and back, by a Hugging Face tokenizer folder. Safe to share between threads."""

    def __init__(self, files: dict[str, bytes]):
        """`files` holds tokenizer.json, tokenizer_config.json, and, where the folder has them,
        chat_template.jinja and generation_config.json. Raises UserError for a folder that cannot chat.
        """
        if "tokenizer.json" not in files:
            raise UserError("policy.model", "has no tokenizer.json", "use a model with a fast tokenizer")
        self._tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        self._config = json.loads(files.get("tokenizer_config.json", b"{}"))
        self._specials = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in self._config.items()
            if name.endswith("_token") and isinstance(value, dict | str)
        }
        self._template = _compile(_template_text(files, self._config))
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {token for token, about in added.items() if about.special}
        self._end_of_turn = self._find_end_of_turn()
        self.stop_token_ids = sorted({self._end_of_turn, *self._eos(files)})
        # Small environments say the same things again and again.
        self._cached_reply_ids = lru_cache(maxsize=16384)(self._reply_ids)
        self._cached_encode = lru_cache(maxsize=16384)(self._encode)

    @classmethod
    def from_store(cls, store: Store) -> ChatRenderer:
        """The renderer of a run, from its `policy/` folder."""
        manifest = store.manifest(_PREFIX)
        if manifest is None:
            raise FileNotFoundError(f"{store.uri}/{_PREFIX}/manifest.json")
        return cls({name: store.get(_PREFIX, name) for name in _FILES if name in manifest["files"]})

    def open(self, system: str, user: str) -> list[int]:
        """Ids of the first prompt, up to and including the generation prompt. `system` may be empty."""
        opening = [{"role": "system", "content": system}] if system else []
        return self._encode(self._render([*opening, {"role": "user", "content": user}], prompt=True))

    def reply(self, user: str, *, closed: bool = True) -> list[int]:
        """Ids to append after the policy's answer: the rest of its turn, the user's turn, the next
        generation prompt. `closed` says that the answer ended with a stop token.
        """
        ids = self._cached_reply_ids(user)
        return list(ids[1:] if closed else ids)

    def answer(self, text: str) -> list[int]:
        """Ids of an answer as the policy would generate it, its end-of-turn token included."""
        return [*self._cached_encode(text), self._end_of_turn]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        # Special tokens go before decoding: decoders that strip the end panic on a text that is empty.
        words = [token for token in map(int, ids) if token not in self._special_ids]
        return self._tokenizer.decode(words) if words else ""

    def decode_all(self, ids: Sequence[int]) -> str:
        """The text of ids with special tokens, for a person to look at."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _reply_ids(self, user: str) -> tuple[int, ...]:
        """Ids from the end of the assistant's turn up to the next generation prompt."""
        dummy = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": _ANSWER}]
        text = self._render([*dummy, {"role": "user", "content": user}], prompt=True)
        return tuple(self._encode(self._after_answer(text)))

    def _find_end_of_turn(self) -> int:
        """The special token that closes an assistant's turn."""
        ids = self._reply_ids("Another question.")
        if not ids or ids[0] not in self._tokenizer.get_added_tokens_decoder():
            first = self._tokenizer.id_to_token(ids[0]) if ids else None
            problem = f"has a chat template that ends an answer with {first!r}, which is no special token"
            raise UserError("policy.model", problem, "use a chat model with an end-of-turn token")
        return ids[0]

    def _after_answer(self, text: str) -> str:
        _, found, after = text.partition(_ANSWER)
        if not found:
            raise UserError("policy.model", "has a chat template that drops answers", "use a chat model")
        return after

    def _eos(self, files: dict[str, bytes]) -> list[int]:
        """The end tokens that the folder names."""
        named = json.loads(files.get("generation_config.json", b"{}")).get("eos_token_id") or []
        ids = [named] if isinstance(named, int) else list(named)
        eos = self._tokenizer.token_to_id(self._specials.get("eos_token", ""))
        return ids if eos is None else [*ids, eos]

    def _render(self, messages: list[dict[str, str]], *, prompt: bool) -> str:
        try:
            return self._template.render(messages=messages, add_generation_prompt=prompt, **self._specials)
        except TemplateError as error:
            raise UserError("policy.model", f"its chat template fails: {error}", "use a chat model") from None

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _template_text(files: dict[str, bytes], config: dict[str, Any]) -> str:
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    if not template:
        raise UserError("policy.model", "has no chat template", "use a chat (instruct) model")
    return template


def _compile(text: str) -> Any:
    """The template in the environment that Hugging Face templates are written for, sandboxed."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _raise
    try:
        return environment.from_string(text)
    except TemplateError as error:
        raise UserError(
            "policy.model", f"its chat template is not valid: {error}", "use a chat model"
        ) from None


def _raise(message: str) -> None:
    raise TemplateError(message)
