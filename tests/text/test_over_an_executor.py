# SPDX-License-Identifier: Apache-2.0
"""Texts over an executor give what they give over the model, in every task."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny, word_tokenizer

import headswap
from headswap.spyre import Executor
from headswap.text import Classifier, Embedder, Reranker, RewardModel

TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10", "w4", "good w1"]
HOW: list[dict[str, Any]] = [{}, {"shapes": [(2, 64)]}]


def bert(labels: int) -> Any:
    torch.manual_seed(0)
    return headswap.as_seq_cls_model(tiny("bert", "AutoModel"), num_labels=labels).eval()


@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_classifier(how: dict[str, Any]) -> None:
    model = bert(3)
    plain = Classifier(model, tokenizer=word_tokenizer())
    over = Classifier(Executor(model, backend="eager", **how), tokenizer=word_tokenizer())
    for one, two in zip(plain.classify(TEXTS), over.classify(TEXTS), strict=True):
        assert one.label == two.label
        np.testing.assert_allclose(one.logits, two.logits, atol=1e-5, rtol=0)
    assert over.classify([]) == []


@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_reranker_with_its_segments(how: dict[str, Any]) -> None:
    model = bert(1)
    tokenizer = word_tokenizer()
    tokenizer.backend_tokenizer.post_processor = pair_scheme()
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    plain = Reranker(model, tokenizer=tokenizer)
    over = Reranker(Executor(model, backend="eager", **how), tokenizer=tokenizer)
    rows = plain.encode("w1 w2", TEXTS)
    assert any(row.types and 1 in row.types for row in rows)
    wanted = plain.score("w1 w2", TEXTS)
    np.testing.assert_allclose(over.score("w1 w2", TEXTS), wanted, atol=1e-5, rtol=0)


def pair_scheme() -> Any:
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1",
                              special_tokens=[("<s>", 0), ("</s>", 2)])  # fmt: skip


@pytest.mark.parametrize("how", HOW, ids=str)
def test_an_embedder(how: dict[str, Any]) -> None:
    model = headswap.as_embedding_model(tiny("qwen3", "AutoModel"), pooling="mean").eval()
    plain = Embedder(model, tokenizer=word_tokenizer())
    over = Embedder(Executor(model, backend="eager", **how), tokenizer=word_tokenizer())
    np.testing.assert_allclose(over.embed(TEXTS), plain.embed(TEXTS), atol=1e-5, rtol=0)


@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_reward_model(how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = headswap.as_reward_model(tiny("llama")).eval()
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    talks = [[{"role": "user", "content": text}] for text in TEXTS]
    plain = RewardModel(model, tokenizer=tokenizer)
    over = RewardModel(Executor(model, backend="eager", **how), tokenizer=tokenizer)
    np.testing.assert_allclose(over.reward(talks), plain.reward(talks), atol=1e-5, rtol=0)


def test_ids_that_the_model_does_not_know_are_refused_over_an_executor_too() -> None:
    over = Classifier(Executor(bert(2), backend="eager"), tokenizer=word_tokenizer())
    with pytest.raises(headswap.InputError, match="token id 70000"):
        over.classify([[5, 70000]])


@pytest.mark.parametrize("how", HOW, ids=str)
def test_progress_is_told_after_each_run_and_counts_equal_texts_too(how: dict[str, Any]) -> None:
    over = Classifier(Executor(bert(2), backend="eager", **how), tokenizer=word_tokenizer())
    texts = [*TEXTS, *(f"w1 w{i % 60} {'w2 ' * (i % 50)}" for i in range(300))]
    seen: list[tuple[int, int]] = []
    over.classify(texts, progress=lambda done, total: seen.append((done, total)))
    assert [total for _, total in seen] == [len(texts)] * len(seen)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert len(seen) > 1
    assert seen[-1][0] == len(texts)
