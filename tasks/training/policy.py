"""The `policy/` folder of a run: a Hugging Face folder without weights, from which engines and trainer start.

`policy.model = "tiny"` makes a Qwen3 architecture with a word-level tokenizer whose vocabulary is collected
from the run's environments; anything else is a Hugging Face folder or a name on the hub. This module
imports no torch: the initial weights are made by the trainer.

The chat template of the tiny policy opens each message with one token for its role and closes only what the
policy wrote: `<|user|> ... <|assistant|> up <|im_end|>`, three tokens a turn beside the words themselves,
because in a small agent's episode the frame of the turns is a large part of all tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tasks.config import PolicyConfig, RunConfig, stored_config
from tasks.errors import UserError
from tasks.services import store_parser
from tasks.store import Store
from tasks.training.model_folder import check_model_folder

PREFIX = "policy"
END = "<|im_end|>"
SPECIAL_TOKENS = ["<pad>", "<unk>", END, "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
POLICY_FILES = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
]  # fmt: skip


def publish_policy(store: Store, config: RunConfig) -> dict[str, Any]:
    """Write `policy/` of a run, if it is not there yet; returns its manifest.

    Raises UserError for `policy.model` that is no model or has no chat template.
    """
    if (existing := store.manifest(PREFIX)) is not None:
        return existing
    if config.policy.model == "tiny":
        objects = tiny_policy(config.policy, vocabulary(task.name for task in config.tasks))
    else:
        objects = policy_files(model_folder(config.policy.model, weights=False))
    return store.put(PREFIX, objects, model=config.policy.model)


def vocabulary(tasks: Iterable[str]) -> list[str]:
    """The words of all these tasks' environments, sorted, each once, after the special tokens.

    The environments are those the run names, so a policy depends on its own configuration alone.
    """
    from tasks.environments import environment_class

    words = {word for task in tasks for word in environment_class(task).vocabulary}
    return [*SPECIAL_TOKENS, *sorted(words - set(SPECIAL_TOKENS))]


def tiny_policy(policy: PolicyConfig, words: list[str]) -> dict[str, bytes | Path]:
    """The files of the tiny policy; a word's token id is its place in `words`."""
    end, pad = words.index(END), words.index("<pad>")
    architecture = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": len(words),
        "hidden_size": policy.hidden_size, "num_hidden_layers": policy.layers,
        "num_attention_heads": policy.heads, "num_key_value_heads": policy.kv_heads,
        "head_dim": policy.hidden_size // policy.heads, "intermediate_size": policy.intermediate_size,
        "max_position_embeddings": policy.context_limit, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rope_theta": 10000.0,
        "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True,
        "tie_word_embeddings": False,  # engines keep their old output head when a tied one is left out of an update
        "dtype": "float32", "eos_token_id": end, "pad_token_id": pad, "bos_token_id": None,
    }  # fmt: skip
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": policy.context_limit,
        "eos_token": END, "pad_token": "<pad>", "unk_token": "<unk>", "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    return {
        "config.json": _json(architecture),
        "generation_config.json": _json({"eos_token_id": end, "pad_token_id": pad}),
        "tokenizer.json": word_tokenizer(words).encode(),
        "tokenizer_config.json": _json(tokenizer),
    }


def word_tokenizer(words: list[str]) -> str:
    """A word-level tokenizer as tokenizer.json.

    Words are separated by whitespace and each digit is a token of its own; decoding puts one space between
    words and none between digits, so that `12 + 30` comes back as it was.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(Regex(r"$"), " "),
            decoders.Fuse(),
            decoders.Replace(Regex(r"(?<=\d) (?=\d)"), ""),
            decoders.Replace(Regex(r" $"), ""),  # not Strip, which panics on an empty text
        ]
    )
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer.to_str(pretty=True)


def model_folder(model: str, weights: bool = True) -> Path:
    """The local folder of a Hugging Face folder or hub name, downloaded if it is the latter.

    Raises UserError if it is neither.
    """
    if Path(model).expanduser().is_dir() or model.startswith((".", "/", "~")):
        check_model_folder(Path(model).expanduser())
        return Path(model).expanduser()
    from huggingface_hub import snapshot_download

    patterns = [*POLICY_FILES, *(["*.safetensors", "*.safetensors.index.json"] if weights else [])]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many kinds: unknown name, no network, no access
        reason = str(error).strip().splitlines()[0]
        fix = "give a Hugging Face folder, the name of a model on the hub, or 'tiny'"
        raise UserError("policy.model", f"{model!r} cannot be had from the hub ({reason})", fix) from None


def policy_files(folder: Path) -> dict[str, bytes | Path]:
    """The files of a Hugging Face folder that describe the policy, without its weights.

    The chat template is put into tokenizer_config.json, so that readers look in one place.
    """
    found: dict[str, bytes | Path] = {
        name: folder / name for name in POLICY_FILES if (folder / name).is_file()
    }
    for name in ("config.json", "tokenizer.json"):
        if name not in found:
            raise UserError("policy.model", f"{folder} has no {name}", "give a model with a fast tokenizer")
    settings: dict[str, Any] = {}
    if "tokenizer_config.json" in found:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
    if "chat_template.jinja" in found:
        settings["chat_template"] = (folder / "chat_template.jinja").read_text()
    if not settings.get("chat_template"):
        raise UserError("policy.model", f"{folder} has no chat template", "take an instruction-tuned model")
    return {**found, "tokenizer_config.json": _json(settings)}


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()


def main(argv: list[str] | None = None) -> int:
    """Make the policy folder of the run at --store."""
    arguments = store_parser("tasks.training.policy", main.__doc__).parse_args(argv)
    store = Store(arguments.store, arguments.endpoint_url)
    try:
        publish_policy(store, stored_config(store))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
