# SPDX-License-Identifier: Apache-2.0
"""Conversations in, the head's own number out."""

from __future__ import annotations

import json
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
    for role, content in ((None, "w1"), ("w1", None), ("w1", 5), ("w1", b"w2")):
        with pytest.raises(headswap.InputError, match="Message 0 of conversation 1 has a role"):
            rewards.reward([CHATS[0], [{"role": role, "content": content}]])
    called = {"role": "w1", "content": None, "tool_calls": [{"type": "function"}]}
    assert len(rewards.reward([called])) == 1
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


# -- cutting, and a number at every token ---------------------------------------------------------


def test_a_conversations_beginning_is_cut_by_name_and_its_start_mark_stays(
    model: Any, words: Any
) -> None:
    own = tokenizer(words)
    whole = RewardModel(model, tokenizer=own).encode(CHATS)
    rewards = RewardModel(model, tokenizer=own, max_length=6, truncation="left")
    with pytest.warns(UserWarning, match="beginnings of 1 of 2 conversations were cut, to 6"):
        rows = rewards.encode(CHATS)
    assert rows[0].ids == [own.bos_token_id, *whole[0].ids[-5:]]
    assert (rows[0].truncated, rows[1].truncated) == (True, False)
    with pytest.warns(UserWarning, match="were cut"):
        found = rewards.reward(CHATS)
    assert found == pytest.approx(alone(model, [r.ids for r in rows])[:, 0].tolist(), abs=1e-5)
    for wrong in (True, "right", "middle"):
        with pytest.raises(headswap.ConversionError, match="'left'"):
            RewardModel(model, tokenizer=own, truncation=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_a_reward_at_every_token_is_that_of_the_text_up_to_it(
    batch_size: int, model: Any, words: Any
) -> None:
    rewards = RewardModel(model, tokenizer=tokenizer(words), batch_size=batch_size)
    chats = [*CHATS, CHATS[0][1:], CHATS[1] * 3, CHATS[0]]
    rows = rewards.encode(chats)
    found = rewards.token_rewards(chats)
    assert [len(values) for values in found] == [len(row.ids) for row in rows]
    assert len({len(values) for values in found}) > 2
    for row, values in zip(rows, found, strict=True):
        wanted = [alone(model, [row.ids[: n + 1]])[0, 0].item() for n in range(len(row.ids))]
        assert values == pytest.approx(wanted, abs=1e-5)
    assert [values[-1] for values in found] == pytest.approx(rewards.reward(chats), abs=1e-5)
    assert json.loads(json.dumps(found)) == found
    assert rewards.token_rewards([]) == []


def test_rewards_at_step_marks_are_those_tokens_own(model: Any, words: Any) -> None:
    own = tokenizer(words)
    rewards = RewardModel(model, tokenizer=own)
    every, rows = rewards.token_rewards(CHATS), rewards.encode(CHATS)
    mark = own.convert_tokens_to_ids("<|im_end|>")
    wanted = [[value for value, i in zip(values, row.ids, strict=True) if i == mark]
              for values, row in zip(every, rows, strict=True)]  # fmt: skip
    assert [len(values) for values in wanted] == [2, 1]
    for given in ("<|im_end|>", mark):
        assert rewards.token_rewards(CHATS, step_mark=given) == wanted
    with pytest.raises(headswap.ConversionError, match="no single token"):
        rewards.token_rewards(CHATS, step_mark="w1 w2")
    with pytest.raises(headswap.InputError, match="Conversation 1 has no step mark") as caught:
        rewards.token_rewards(CHATS, step_mark="w7")
    assert caught.value.rows == (1,)


def test_a_converted_model_rates_every_token_and_keeps_its_mode(words: Any, model: Any) -> None:
    converted = headswap.as_reward_model(tiny("qwen3"), label_tokens=[5, 6], method="difference")
    rewards = RewardModel(converted, tokenizer=tokenizer(words))
    found = rewards.token_rewards(CHATS)
    assert [values[-1] for values in found] == pytest.approx(rewards.reward(CHATS), abs=1e-5)
    model.train()
    RewardModel(model, tokenizer=tokenizer(words)).token_rewards(CHATS)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_a_head_that_pools_otherwise_has_no_number_for_a_token(pooling: Any, words: Any) -> None:
    model = headswap.as_seq_cls_model(tiny("qwen3"), num_labels=1, pooling=pooling)
    rewards = RewardModel(model, tokenizer=tokenizer(words))
    assert len(rewards.reward(CHATS)) == 2
    with pytest.raises(headswap.UnsupportedHeadError, match=f"pools by '{pooling}'"):
        rewards.token_rewards(CHATS)


def test_the_callers_tokenizer_is_left_as_it_was_and_its_stored_cut_is_not_applied(
    model: Any, words: Any
) -> None:
    own = tokenizer(words)
    own.backend_tokenizer.enable_truncation(4)
    wanted = RewardModel(model, tokenizer=tokenizer(words)).reward(CHATS)
    assert RewardModel(model, tokenizer=own).reward(CHATS) == wanted
    assert own.backend_tokenizer.truncation["max_length"] == 4


# -- two labels, and heads that classify tokens ---------------------------------------------------

NAMES = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("auto", [SEQ, "AutoModelForTokenClassification"])
def test_a_process_reward_model_with_two_labels_gives_the_log_odds_of_the_good_one(
    auto: str, stored: bool, words: Any, tmp_path: Path
) -> None:
    two, own = tiny("qwen3", auto, **NAMES), tokenizer(words)
    two.save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    source: dict[str, Any] = {"tokenizer": own}
    rewards = RewardModel(tmp_path if stored else two, label="good", **({} if stored else source))
    rows = rewards.encode(CHATS)
    mark = own.convert_tokens_to_ids("<|im_end|>")
    found = rewards.token_rewards(CHATS, step_mark="<|im_end|>")
    for row, values in zip(rows, found, strict=True):
        places = [place for place, i in enumerate(row.ids) if i == mark]
        with torch.no_grad():
            if auto == SEQ:
                logits = torch.cat([alone(two, [row.ids[: place + 1]]) for place in places])
            else:
                logits = two(torch.tensor([row.ids])).logits[0, places]
        assert values == pytest.approx((logits[:, 1] - logits[:, 0]).tolist(), abs=1e-5)
        probabilities = torch.tensor(values).sigmoid()
        assert probabilities.tolist() == pytest.approx(logits.softmax(-1)[:, 1].tolist(), abs=1e-6)
    other = RewardModel(two, label="bad", tokenizer=own).token_rewards(CHATS, step_mark=mark)
    assert other[0] == pytest.approx([-value for value in found[0]], abs=1e-6)


def test_two_labels_need_the_name_of_the_good_one(words: Any, tmp_path: Path) -> None:
    two, own = tiny("qwen3", SEQ, **NAMES), tokenizer(words)
    two.save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    for source in (tmp_path, two):
        with pytest.raises(headswap.ConversionError, match="so label="):
            RewardModel(source, **({} if source == tmp_path else {"tokenizer": own}))
    for wrong in ("fine", 1):
        with pytest.raises(headswap.ConversionError, match="bad, good"):
            RewardModel(tmp_path, label=wrong)  # type: ignore[arg-type]
    with pytest.raises(headswap.ConversionError, match="3 labels"):
        RewardModel(tiny("qwen3", SEQ, num_labels=3), label="LABEL_1", tokenizer=own)
    rewards = RewardModel(tmp_path, label="good")
    logits = alone(two, [row.ids for row in rewards.encode(CHATS)])
    wanted = (logits[:, 1] - logits[:, 0]).tolist()
    assert rewards.reward(CHATS) == pytest.approx(wanted, abs=1e-5)


def test_a_head_that_classifies_tokens_has_no_number_for_a_conversation(words: Any) -> None:
    one = tiny("qwen3", "AutoModelForTokenClassification", num_labels=1)
    rewards = RewardModel(one, tokenizer=tokenizer(words))
    (values,) = rewards.token_rewards(CHATS[1])
    with torch.no_grad():
        ids = torch.tensor([rewards.encode(CHATS[1])[0].ids])
        assert values == pytest.approx(one(ids).logits[0, :, 0].tolist(), abs=1e-5)
    with pytest.raises(headswap.ConversionError, match="use token_rewards"):
        rewards.reward(CHATS)


def test_qwens_process_reward_models_are_their_two_layers(words: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny("qwen2", tie_word_embeddings=False).save_pretrained(tmp_path)
    tokenizer(words).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored.pop("lm_head.weight")
    torch.manual_seed(3)
    head = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    stored.update({f"score.{name}": value for name, value in head.state_dict().items()})
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config.update(architectures=["Qwen2ForProcessRewardModel"], num_labels=2, **NAMES)
    file.write_text(json.dumps(config))
    rewards = RewardModel(tmp_path, label="good")
    (row,) = rewards.encode(CHATS[0])
    with torch.no_grad():
        states = tiny("qwen2", tie_word_embeddings=False).model(torch.tensor([row.ids]))[0][0]
        logits = head(states)
    (found,) = rewards.token_rewards(CHATS[0])
    assert found == pytest.approx((logits[:, 1] - logits[:, 0]).tolist(), abs=1e-5)


def test_a_chat_template_may_be_given_for_a_model_and_for_a_call(model: Any, words: Any) -> None:
    own = words("chat", chat=True)
    rewards = RewardModel(model, tokenizer=own, chat_template=BODY)
    assert rewards.chat_template == BODY
    assert own.chat_template is None
    usual = RewardModel(model, tokenizer=tokenizer(words))
    assert rewards.encode(CHATS) == usual.encode(CHATS)
    other = "w9 " + BODY
    (row,) = rewards.encode(CHATS[1], chat_template=other)
    assert row.ids == own("w9 <|im_start|> w1 w8 <|im_end|>")["input_ids"]
    wanted = alone(model, [row.ids])[:, 0].tolist()
    assert rewards.reward(CHATS[1], chat_template=other) == pytest.approx(wanted, abs=1e-5)
    assert rewards.token_rewards(CHATS[1], chat_template=other)[0][-1] == pytest.approx(
        wanted[0], abs=1e-5
    )
