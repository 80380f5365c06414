# SPDX-License-Identifier: Apache-2.0
"""How long a text may be, who says so, and what a request beyond it gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import tiny

import headswap
from headswap.text import Classifier
from headswap.text.lengths import SENTINEL, Limit, usable_length

SEQ = "AutoModelForSequenceClassification"


def model_of(**fields: Any) -> Any:
    """As much of a model as limits are read from."""
    config = SimpleNamespace(**fields)
    config.get_text_config = lambda: config
    return SimpleNamespace(config=config, backbone=torch.nn.Module())


def tokenizer_of(limit: Any) -> Any:
    return SimpleNamespace(model_max_length=limit)


@pytest.mark.parametrize("field", ["max_position_embeddings", "n_positions", "max_seq_len",
                                   "seq_length"])  # fmt: skip
def test_every_name_of_a_position_table_counts(field: str) -> None:
    found = usable_length(model_of(**{field: 48}), tokenizer_of(int(1e30)))
    assert found == Limit(48, f"config.{field}")


@pytest.mark.parametrize("stored", [1_010_000, 1_048_576, 10_485_760])
def test_a_table_of_millions_is_a_real_limit(stored: int) -> None:
    found = usable_length(model_of(max_position_embeddings=stored), tokenizer_of(10**30))
    assert found == Limit(stored, "config.max_position_embeddings")


@pytest.mark.parametrize("stored", [10**30, 1e30, float(SENTINEL), SENTINEL, None, 0, -1])
def test_a_tokenizers_sentinel_is_no_limit(stored: Any) -> None:
    model = model_of(max_position_embeddings=64)
    assert usable_length(model, tokenizer_of(stored)) == Limit(64, "config.max_position_embeddings")


@pytest.mark.parametrize("stored", [0, -1, None, SENTINEL])
def test_a_config_without_a_real_table_leaves_the_tokenizers_limit(stored: Any) -> None:
    model = model_of(max_position_embeddings=stored)
    assert usable_length(model, tokenizer_of(40)) == Limit(40, "tokenizer.model_max_length")


def test_nothing_limits_where_nothing_says_so() -> None:
    assert usable_length(model_of(), tokenizer_of(int(1e30))) == Limit(None, "nothing")
    assert usable_length(model_of(), SimpleNamespace()) == Limit(None, "nothing")


@pytest.mark.parametrize(("stored", "value", "source"), [
    (40, 40, "tokenizer.model_max_length"),
    (40.0, 40, "tokenizer.model_max_length"),
    (64, 64, "config.max_position_embeddings"),
    (90, 64, "config.max_position_embeddings"),
])  # fmt: skip
def test_the_smaller_limit_wins_for_learned_positions(stored: Any, value: int, source: str) -> None:
    found = usable_length(model_of(max_position_embeddings=64), tokenizer_of(stored))
    assert found == Limit(value, source)
    assert isinstance(found.value, int)


@pytest.mark.parametrize("fields", [
    {"rope_theta": 10000.0}, {"rope_parameters": {"rope_theta": 10000.0}}, {"rotary_pct": 0.25},
    {"alibi": True}, {"rotary_dim": 4}, {"position_embedding_type": "rotary"},
    {"position_embedding_type": "relative_key"},
])  # fmt: skip
def test_a_tokenizers_limit_is_no_matter_without_learned_positions(fields: dict[str, Any]) -> None:
    model = model_of(max_position_embeddings=64, **fields)
    assert usable_length(model, tokenizer_of(40)) == Limit(64, "config.max_position_embeddings")


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt_neox", "phi", "mistral"])
def test_a_tokenizers_limit_is_no_matter_to_rotary_models(model_type: str, words: Any) -> None:
    found = usable_length(tiny(model_type), words("chat", model_max_length=16))
    assert found == Limit(64, "config.max_position_embeddings")


@pytest.mark.parametrize(("model_type", "auto"), [("bert", SEQ), ("gpt2", SEQ)])
def test_a_tokenizers_limit_counts_for_learned_tables(
    model_type: str, auto: str, words: Any
) -> None:
    model = tiny(model_type, auto, num_labels=2)
    found = usable_length(model, words("bert", model_max_length=16))
    assert found == Limit(16, "tokenizer.model_max_length")


@pytest.mark.parametrize("model_type", ["roberta", "xlm-roberta", "camembert"])
def test_rows_kept_for_pads_are_not_usable(model_type: str, words: Any) -> None:
    own = words("xlm-roberta")
    plain = tiny(model_type, SEQ, num_labels=2)
    wanted = Limit(62, "config.max_position_embeddings - 2")
    assert usable_length(plain, own) == wanted
    assert usable_length(headswap.as_seq_cls_model(plain), own) == wanted
    full = words("xlm-roberta", model_max_length=64)
    assert usable_length(plain, full) == wanted


@pytest.mark.parametrize("model_type", ["roberta", "bert", "gpt2"])
def test_a_text_that_fills_the_table_runs(model_type: str, words: Any, sentence: Any) -> None:
    family = {"roberta": "xlm-roberta"}.get(model_type, model_type)
    own = words(family)
    classifier = Classifier(tiny(model_type, SEQ, num_labels=2), tokenizer=own)
    marks = len(own("w1")["input_ids"]) - 1
    limit = {"roberta": 62}.get(model_type, 64)
    (full,) = classifier.classify(sentence(limit - marks, 0))
    assert (full.tokens, full.truncated) == (limit, False)
    with pytest.warns(UserWarning, match=rf"1 of 1 texts were cut to {limit} tokens"):
        (cut,) = classifier.classify(sentence(limit - marks + 1, 0))
    assert (cut.tokens, cut.truncated) == (limit, True)


def test_a_text_beyond_the_limit_is_refused_and_the_classifier_stays_usable(
    words: Any, sentence: Any
) -> None:
    classifier = Classifier(
        tiny("bert", SEQ, num_labels=3), tokenizer=words("bert"), truncation=False
    )
    (before,) = classifier.classify(sentence(8, 0))
    with pytest.raises(headswap.InputError, match=r"Text 1 has 65 tokens.*limit is 64") as caught:
        classifier.classify([sentence(8, 0), sentence(63, 1)])
    assert caught.value.rows == (1,)
    (after,) = classifier.classify(sentence(8, 0))
    assert after == before


@pytest.mark.parametrize(("length", "allowed"), [(0, 64), (-3, 64), (65, 64), (10**9, 64)])
def test_a_max_length_out_of_range_is_refused_with_the_range(
    length: int, allowed: int, words: Any
) -> None:
    model = tiny("llama", SEQ, num_labels=2)
    with pytest.raises(headswap.ConversionError, match=rf"max_length={length} .*1 to {allowed} "):
        Classifier(model, tokenizer=words("chat"), max_length=length)


@pytest.mark.parametrize("length", [2, 17, 64])
def test_a_max_length_in_range_is_the_limit(length: int, words: Any, sentence: Any) -> None:
    model = tiny("llama", SEQ, num_labels=2)
    classifier = Classifier(model, tokenizer=words("chat"), max_length=length)
    assert classifier.limit == Limit(length, "max_length")
    with pytest.warns(UserWarning, match="limit from max_length"):
        (found,) = classifier.classify(sentence(70, 0))
    assert found.tokens == length


def test_a_max_length_may_be_anything_where_nothing_limits(words: Any) -> None:
    model = tiny("llama", SEQ, num_labels=2)
    model.config.max_position_embeddings = 0
    classifier = Classifier(model, tokenizer=words("chat"), max_length=5000)
    assert classifier.limit.value == 5000
