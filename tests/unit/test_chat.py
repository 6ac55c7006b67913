from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tasks.config import PolicyConfig
from tasks.errors import UserError
from tasks.rollout.chat import ChatRenderer
from tasks.training.policy import tiny_policy, vocabulary

# As Qwen3's: a thought of the past is dropped when history is rendered, the last answer gets an empty one.
QWEN = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- if loop.index0 > ns.last %}
            {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + content + '<|im_end|>\\n' }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def qwen(template: str = QWEN, **settings: object) -> ChatRenderer:
    """A byte-level tokenizer (each byte a token) with a chat template as Qwen's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    config = {"chat_template": template, "eos_token": "<|im_end|>", **settings}
    return ChatRenderer({
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "generation_config.json": b'{"eos_token_id": [258, 256]}',
    })  # fmt: skip


def tiny() -> ChatRenderer:
    files = tiny_policy(PolicyConfig(), vocabulary(["frozenlake", "arithmetic"]))
    return ChatRenderer({name: data for name, data in files.items() if isinstance(data, bytes)})


RENDERERS = {"tiny": tiny(), "qwen": qwen()}
texts = st.text(st.characters(codec="utf-8", exclude_characters="<|>"), max_size=30)


@pytest.mark.parametrize("name", RENDERERS)
@settings(max_examples=60, deadline=None)
@given(
    system=texts,
    turns=st.lists(
        st.tuples(texts, st.lists(st.integers(0, 20), max_size=8), st.booleans()), min_size=1, max_size=5
    ),
)
def test_the_tokens_of_a_turn_are_a_prefix_of_the_next_turns(name, system, turns):
    chat = RENDERERS[name]
    tokens: list[int] = []
    last_closed = True
    for number, (observation, generated, closed) in enumerate(turns):
        before = list(tokens)
        if number == 0:
            tokens += chat.open(system, observation)
        else:
            tokens += chat.reply(observation, closed=last_closed)
        prompt = list(tokens)
        tokens += [*generated, chat.stop_token_ids[0]] if closed else generated
        last_closed = closed
        assert tokens[: len(prompt)] == prompt and prompt[: len(before)] == before
        if name == "qwen" and before:
            # what the policy wrote stands between the frames as it was, for any ids
            frame = chat.decode_all(prompt[len(before) :])
            opened = f"\n<|im_start|>user\n{observation}<|im_end|>\n<|im_start|>assistant\n"
            assert frame == (opened if turns[number - 1][2] else f"<|im_end|>{opened}")


def test_a_conversation_reads_as_the_template_would_have_written_it():
    chat = RENDERERS["qwen"]
    tokens = chat.open("Be brief.", "2+2?")
    tokens += chat.answer("4")
    tokens += chat.reply("3+3?")
    assert chat.decode_all(tokens) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\n3+3?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_thought_stays_in_the_tokens_though_the_template_drops_it_from_history():
    chat = RENDERERS["qwen"]
    tokens = chat.open("", "2+2?") + chat.answer("<think>hm</think>4") + chat.reply("3+3?")
    assert "<think>hm</think>4<|im_end|>\n<|im_start|>user" in chat.decode_all(tokens)


def test_an_answer_cut_by_its_token_limit_is_closed_for_the_policy():
    chat = RENDERERS["qwen"]
    assert chat.reply("x", closed=False) == [258, *chat.reply("x")]


def test_stop_tokens_are_those_of_the_template_and_of_the_folder():
    assert RENDERERS["qwen"].stop_token_ids == [256, 258]
    assert RENDERERS["tiny"].stop_token_ids == [2]


def test_what_is_decoded_is_what_was_said():
    assert RENDERERS["qwen"].decode(RENDERERS["qwen"].answer("héllo <x>")) == "héllo <x>"
    assert RENDERERS["tiny"].decode(RENDERERS["tiny"].answer("7 _ = 12 ;")) == "7 _ = 12 ;"


@pytest.mark.parametrize("name", RENDERERS)
def test_an_answer_without_words_is_an_empty_text(name):
    chat = RENDERERS[name]
    assert chat.decode([]) == chat.decode(chat.stop_token_ids) == chat.decode(chat.answer("")) == ""


def test_special_tokens_reach_the_template_as_text():
    chat = qwen("{{ bos_token }}" + QWEN, bos_token={"content": "<|endoftext|>", "special": True})
    assert chat.open("", "x")[0] == 256


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", "no chat template"),
        ("{% if %}", "not valid"),
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "drops answers"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "no special token"),
        ("{{ ''.__class__.__mro__ }}", "fails"),
    ],
)
def test_a_folder_that_cannot_chat_is_named(template, message):
    with pytest.raises(UserError, match=f"policy.model: .*{message}"):
        qwen(template)
