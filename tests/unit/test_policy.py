"""The policy folder: tokenizer, chat template, vocabulary, and the checks of a given model folder."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from tasks.config import PolicyConfig, parse_config
from tasks.environments import environment_class
from tasks.errors import UserError
from tasks.store import Store
from tasks.training import policy
from tasks.training.model_folder import check_model_folder

WORDS = [
    *policy.SPECIAL_TOKENS,
    *[
        "up",
        "down",
        "left",
        "right",
        "S",
        "F",
        "H",
        "G",
        "+",
        "=",
        "0",
        "1",
        "2",
        "3",
        "4",
        "5",
        "6",
        "7",
        "8",
        "9",
    ],
]
TOKENIZER = Tokenizer.from_str(policy.word_tokenizer(WORDS))


@given(st.lists(st.sampled_from(["up", "down", "S", "F", "+", "=", "0", "12", "907"]), max_size=20))
def test_decoding_gives_the_encoded_text_back(words):
    text = " ".join(
        word for i, word in enumerate(words) if not (word.isdigit() and i and words[i - 1].isdigit())
    )
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


def test_a_digit_is_one_token():
    assert TOKENIZER.encode("12 + 3").tokens == ["1", "2", "+", "3"]


def test_a_turn_costs_three_tokens_beside_its_words():
    template = Environment().from_string(policy.CHAT_TEMPLATE)
    messages = [{"role": "user", "content": "S F"}, {"role": "assistant", "content": "up"}]
    tokens = TOKENIZER.encode(template.render(messages=messages)).tokens
    assert tokens == ["<|user|>", "S", "F", "<|assistant|>", "up", "<|im_end|>"]


def test_rendering_is_incremental():
    template = Environment().from_string(policy.CHAT_TEMPLATE)
    messages = [
        {"role": r, "content": c}
        for r, c in [("user", "S"), ("assistant", "up"), ("user", "F"), ("assistant", "up")]
    ]
    whole = template.render(messages=messages)
    for n in (1, 3):
        assert whole.startswith(template.render(messages=messages[:n], add_generation_prompt=True))


def test_the_vocabulary_holds_each_word_of_the_tasks_once_in_a_fixed_order():
    words = policy.vocabulary(["frozenlake", "arithmetic"])
    assert len(set(words)) == len(words)
    assert set(words) == set(policy.SPECIAL_TOKENS).union(
        environment_class("frozenlake").vocabulary, environment_class("arithmetic").vocabulary
    )
    assert words == policy.vocabulary(["arithmetic", "frozenlake"])


def test_publishing_the_policy_again_changes_nothing(tmp_path):
    store, config = Store(str(tmp_path)), parse_config({"policy": {"hidden_size": 64, "heads": 2}})
    first = policy.publish_policy(store, config)
    assert policy.publish_policy(store, config) == first
    assert set(first["files"]) == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert "chat_template" in store.read_json("policy/tokenizer_config.json")


@pytest.fixture
def folder(tmp_path):
    """A small but whole Hugging Face folder."""
    for name, content in policy.tiny_policy(PolicyConfig(), WORDS).items():
        (tmp_path / name).write_bytes(content)
    save_file(
        {"a": np.zeros((4, 3), np.float32), "b": np.ones(2, np.float16)}, tmp_path / "model.safetensors"
    )
    return tmp_path


def test_a_whole_model_folder_passes_and_is_published_with_its_template(folder, tmp_path_factory):
    check_model_folder(folder)
    store = Store(str(tmp_path_factory.mktemp("run")))
    manifest = policy.publish_policy(store, parse_config({"policy": {"model": str(folder)}}))
    assert "model.safetensors" not in manifest["files"]
    assert store.read_json("policy/tokenizer_config.json")["chat_template"] == policy.CHAT_TEMPLATE


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_without_a_needed_file_is_refused_by_name(folder, name):
    (folder / name).unlink()
    with pytest.raises(UserError, match=name):
        check_model_folder(folder)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"policy\.model.*does not exist"):
        check_model_folder(tmp_path / "none")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:5],
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:9] + b"\xff" + data[10:],
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data.replace(b"[4,3]", b"[4,4]"),
    ],
    ids=["no header", "short", "long", "header not JSON", "header length absurd", "shape not its bytes"],
)
def test_corrupt_safetensors_are_refused_by_name(folder, damage):
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UserError, match=r"model\.safetensors is corrupt"):
        check_model_folder(folder)


def test_a_shard_that_the_index_names_must_be_there(folder):
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors"}})
    )
    with pytest.raises(UserError, match=r"model-1\.safetensors is missing"):
        check_model_folder(folder)


def test_the_checks_and_the_policy_import_no_torch():
    code = "import sys, tasks.training.model_folder, tasks.training.policy; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
