# SPDX-License-Identifier: Apache-2.0
"""Classifiers id for id and score for score against transformers' own text-classification
pipeline: one text and two, cut and whole, with pads on either side."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_models import tiny

import headswap
from headswap.text import Classifier, Reranker

SEQ = "AutoModelForSequenceClassification"
FAMILY = {"bert": "bert", "roberta": "xlm-roberta", "llama": "chat", "qwen3": "ends"}
LENGTHS = (3, 21, 1, 12, 7)
PAD = {"bert": 0, "roberta": 1, "llama": 1, "qwen3": 0}


def made(model_type: str, labels: int = 3, **fields: Any) -> Any:
    model = tiny(model_type, SEQ, num_labels=labels, pad_token_id=PAD[model_type])
    for name, value in fields.items():
        setattr(model.config, name, value)
    return model


def pipeline_of(model: Any, tokenizer: Any) -> Any:
    return transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)


def as_dicts(texts: Sequence[Any]) -> list[Any]:
    """Texts as the pipeline takes them."""
    return [each if isinstance(each, str) else {"text": each[0], "text_pair": each[1]}
            for each in texts]  # fmt: skip


def by_label(answers: list[list[dict[str, Any]]]) -> list[dict[str, float]]:
    return [{each["label"]: each["score"] for each in one} for one in answers]


def check_scores(found: Sequence[Any], wanted: list[dict[str, float]]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.scores == pytest.approx(other, abs=1e-5)
        assert one.label == max(other, key=other.__getitem__)


@pytest.mark.parametrize("limit", [None, 9])
@pytest.mark.parametrize("cut", ["left", "right"])
@pytest.mark.parametrize(("model_type", "pair"), [
    ("bert", False), ("bert", True), ("roberta", False), ("roberta", True), ("llama", False),
    ("qwen3", False),
])  # fmt: skip
def test_ids_segments_and_scores_are_the_pipelines(
    model_type: str, pair: bool, cut: str, limit: int | None, words: Any, sentence: Any, spied: Any
) -> None:
    own = words(FAMILY[model_type], truncation_side=cut)
    texts: list[Any] = [sentence(n, n) for n in LENGTHS]
    if pair:
        texts = [(text, sentence(1 + 5 * n % 17, 100 + n)) for n, text in enumerate(texts)]
    model = made(model_type)
    pipe = pipeline_of(model, own)
    classifier = Classifier(made(model_type), tokenizer=own, max_length=limit, batch_size=2)
    given, seen = spied(pipe.model), spied(classifier.model)
    more = {} if limit is None else {"truncation": True, "max_length": limit}
    wanted = by_label(pipe(as_dicts(texts), top_k=None, **more))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*were cut")
        found = classifier.classify(texts)
    assert sorted(seen) == sorted(given)
    assert [answer.tokens for answer in found] == [len(ids) for ids, _ in given]
    if limit is not None:
        assert any(answer.truncated for answer in found)
    check_scores(found, wanted)


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_pipelines_batches_padded_on_either_side_answer_alike(
    model_type: str,
    side: str,
    ours: bool,
    words: Any,
    sentence: Any,
    spied: Any,
    tmp_path: Path,
) -> None:
    own = words(FAMILY[model_type], padding_side=side)
    texts = [sentence(n, n) for n in LENGTHS]
    pipe = pipeline_of(made(model_type), own)
    given = spied(pipe.model)
    wanted = by_label(pipe(texts, top_k=None, batch_size=3))
    source = made(model_type)
    source.save_pretrained(tmp_path)
    model = headswap.load(tmp_path) if ours else source
    assert hasattr(model, "head_spec") == ours
    classifier = Classifier(model, tokenizer=own, batch_size=3)
    seen = spied(model)
    check_scores(classifier.classify(texts), wanted)
    assert sorted(seen) == sorted(given)


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("problem", [
    None, "regression", "single_label_classification", "multi_label_classification"
])  # fmt: skip
def test_the_function_is_the_pipelines_for_every_problem_type(
    problem: str | None, labels: int, words: Any, sentence: Any
) -> None:
    if (labels, problem) == (1, "single_label_classification"):
        pytest.skip("a softmax over one label; refused by transformers 5, a sigmoid here")
    model, own = made("bert", labels, problem_type=problem), words("bert")
    texts = [sentence(n, n) for n in LENGTHS]
    classifier = Classifier(model, tokenizer=own)
    pipe = pipeline_of(model, own)
    found = classifier.classify(texts)
    check_scores(found, by_label(pipe(texts, top_k=None)))
    assert len({round(answer.score, 4) for answer in found}) > 1
    for name, ours in (("none", "identity"), ("sigmoid", "sigmoid"), ("softmax", "softmax")):
        if (labels, name) == (1, "softmax"):
            continue
        wanted = by_label(pipe(texts, top_k=None, function_to_apply=name))
        check_scores(classifier.classify(texts, activation=ours), wanted)


@pytest.mark.parametrize("model_type", ["bert", "roberta"])
def test_a_rerankers_scores_are_those_of_the_pipelines_pairs(
    model_type: str, words: Any, sentence: Any, spied: Any
) -> None:
    own = words(FAMILY[model_type])
    pipe = pipeline_of(made(model_type, 1), own)
    reranker = Reranker(made(model_type, 1), tokenizer=own, batch_size=2)
    given, seen = spied(pipe.model), spied(reranker.model)
    documents = [sentence(n, n) for n in LENGTHS]
    wanted = pipe(as_dicts([("w1 w2", each) for each in documents]), top_k=None)
    found = reranker.score("w1 w2", documents)
    assert found == pytest.approx([one[0]["score"] for one in wanted], abs=1e-5)
    assert sorted(seen) == sorted(given)


@pytest.mark.parametrize("text", [" w1", "w1 ", "  w1  w2 ", "w1\n", "\tw1", "w1  w2"])
def test_blanks_around_and_inside_a_text_are_left_to_the_tokenizer(
    text: str, byte_pairs: Any, spied: Any
) -> None:
    own = byte_pairs("bert")
    model = tiny("bert", SEQ, num_labels=3, pad_token_id=0, vocab_size=330)
    pipe = pipeline_of(model, own)
    seen = spied(model)
    wanted = by_label(pipe(as_dicts([(text, text)]), top_k=None))
    check_scores(Classifier(model, tokenizer=own).classify([(text, text)]), wanted)
    assert seen[0] == seen[1]
    assert own.decode(seen[0][0]).count(text) == 2
