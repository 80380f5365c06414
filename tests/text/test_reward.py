# SPDX-License-Identifier: Apache-2.0
"""Conversations in, the head's own number out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import alone, tiny

import headswap
from headswap.text import RewardModel

SEQ = "AutoModelForSequenceClassification"
BODY = "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
CHATS = [
    [{"role": "w1", "content": "w3 w4"}, {"role": "w2", "content": "w5 w6 w7"}],
    [{"role": "w1", "content": "w8"}],
]


@pytest.fixture
def model() -> Any:
    return tiny("qwen3", SEQ, num_labels=1)


def tokenizer(words: Any, template: str = BODY) -> Any:
    own = words("chat", chat=True)
    own.chat_template = template
    return own


@pytest.mark.parametrize("template", [BODY, "{{ bos_token }} " + BODY, "<s> <s> " + BODY])
def test_a_reward_is_the_heads_own_number_behind_one_start_mark(
    template: str, model: Any, words: Any
) -> None:
    own = tokenizer(words, template)
    found = RewardModel(model, tokenizer=own)
    texts = ["<|im_start|> w1 w3 w4 <|im_end|> <|im_start|> w2 w5 w6 w7 <|im_end|>",
             "<|im_start|> w1 w8 <|im_end|>"]  # fmt: skip
    rows = [own(text)["input_ids"] for text in texts]
    assert [row[0] for row in rows] == [own.bos_token_id] * 2
    assert [row.ids for row in found.encode(CHATS)] == rows
    wanted = alone(model, rows)[:, 0].tolist()
    assert found.reward(CHATS) == pytest.approx(wanted, abs=1e-5)
    assert found.reward(CHATS[1]) == pytest.approx(wanted[1:], abs=1e-5)
    assert found.reward([]) == []


@pytest.mark.parametrize("problem", [None, "regression", "multi_label_classification"])
def test_no_function_is_applied_whatever_the_config_says(
    problem: str | None, model: Any, words: Any, tmp_path: Path
) -> None:
    wanted = RewardModel(model, tokenizer=tokenizer(words)).reward(CHATS)
    model.config.problem_type = problem
    model.save_pretrained(tmp_path)
    tokenizer(words).save_pretrained(tmp_path)
    assert RewardModel(tmp_path).reward(CHATS) == pytest.approx(wanted, abs=1e-5)
    with torch.no_grad():
        model.score.weight *= 1000.0
    scaled = RewardModel(model, tokenizer=tokenizer(words)).reward(CHATS)
    assert scaled == pytest.approx([1000 * value for value in wanted], rel=1e-4)


def test_what_is_no_conversation_is_refused(model: Any, words: Any) -> None:
    rewards = RewardModel(model, tokenizer=tokenizer(words))
    for wrong in ("w1 w2", ["w1"], [[]], [[{"role": "w1"}]]):
        with pytest.raises(headswap.InputError, match="Conversation 0 is not a list"):
            rewards.reward(wrong)  # type: ignore[arg-type]
    picky = tokenizer(words, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(headswap.InputError, match="roles must alternate"):
        RewardModel(model, tokenizer=picky).reward(CHATS)


def test_a_conversation_beyond_the_limit_is_refused_and_never_cut(model: Any, words: Any) -> None:
    rewards = RewardModel(model, tokenizer=tokenizer(words), max_length=6)
    with pytest.raises(
        headswap.InputError, match="Conversation 0 has 12 tokens, and the limit is 6"
    ):
        rewards.reward(CHATS)
    assert len(rewards.reward(CHATS[1])) == 1


def test_a_tokenizer_without_a_chat_template_is_refused(model: Any, words: Any) -> None:
    with pytest.raises(headswap.ConversionError, match="no chat template"):
        RewardModel(model, tokenizer=words("chat"))


def test_several_labels_are_no_reward(words: Any) -> None:
    several = tiny("qwen3", SEQ, num_labels=3)
    with pytest.raises(headswap.ConversionError, match=r"no reward .*one label; this one has 3"):
        RewardModel(several, tokenizer=tokenizer(words))
