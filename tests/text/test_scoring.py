# SPDX-License-Identifier: Apache-2.0
"""Calibration and activation of classifiers, rerankers and reward models: one raw number, and one
rule for what is made of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny, word_tokenizer

import headswap
from headswap.text import Calibration, Classifier, Reranker, RewardModel

SEQ = "AutoModelForSequenceClassification"
PAIRS = [("w1 w2", "w3 w4"), ("w1 w2", "w5"), ("w1 w2", "w6 w7 w8")]
Save = Callable[..., Path]


@pytest.fixture
def saved(words: Any, tmp_path: Path) -> Save:
    """`saved(labels, **config)`: a tiny BERT classifier's folder, with fields in its config."""

    def make(labels: int, **fields: Any) -> Path:
        tiny("bert", SEQ, num_labels=labels, pad_token_id=0).save_pretrained(tmp_path)
        words("bert", chat=True).save_pretrained(tmp_path)
        file = tmp_path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **fields}), "utf-8")
        return tmp_path

    return make


def logits(answers: list[Any]) -> torch.Tensor:
    return torch.tensor([answer.logits for answer in answers])


def scores(answers: list[Any]) -> torch.Tensor:
    return torch.tensor([list(answer.scores.values()) for answer in answers])


@pytest.mark.parametrize("fields", [
    {"logit_mean": 0.25, "logit_sigma": 0.5}, {"pooler_config": {"logit_mean": 0.25,
                                                                 "logit_sigma": 0.5}},
    {"pooler_config": {"logit_bias": 0.25, "logit_scale": 2.0}},
])  # fmt: skip
def test_a_saved_calibration_acts_on_every_route_and_raw_logits_stay(
    fields: dict[str, Any], saved: Save
) -> None:
    folder = saved(1, **fields)
    loaded = headswap.load(folder)
    for source, more in ((folder, {}), (loaded, {"tokenizer": Classifier(folder)._encoder._full})):
        classifier, reranker = Classifier(source, **more), Reranker(source, **more)
        assert classifier.calibration == reranker.calibration
        assert classifier.calibration.source == "checkpoint"
        answers = classifier.classify(PAIRS)
        raw = logits(answers)
        assert raw.std() > 1e-3
        wanted = torch.sigmoid((raw - 0.25) / 0.5)
        torch.testing.assert_close(scores(answers), wanted, atol=1e-6, rtol=0)
        given = [second for _, second in PAIRS]
        assert reranker.score("w1 w2", given) == pytest.approx(wanted.flatten().tolist(), abs=1e-6)
        untouched = reranker.score("w1 w2", given, activation="identity", calibration={})
        assert untouched == pytest.approx(raw.flatten().tolist(), abs=1e-6)
        ranked = {hit.index: hit.logit for hit in reranker.rank("w1 w2", given)}
        assert [ranked[i] for i in range(3)] == pytest.approx(untouched, abs=1e-6)


def test_constructor_and_call_stand_before_what_was_saved(saved: Save) -> None:
    folder = saved(3, temperature=2.0)
    plain = Classifier(folder)
    assert (plain.calibration.temperature, plain.calibration.source) == (2.0, "checkpoint")
    raw = logits(plain.classify(PAIRS))
    torch.testing.assert_close(scores(plain.classify(PAIRS)), torch.softmax(raw / 2, -1))
    own = Classifier(folder, calibration=Calibration(temperature=0.5))
    assert own.calibration.source == "call"
    torch.testing.assert_close(scores(own.classify(PAIRS)), torch.softmax(raw / 0.5, -1))
    call = own.classify(PAIRS, calibration={"temperature": 4.0}, activation="sigmoid")
    torch.testing.assert_close(scores(call), torch.sigmoid(raw / 4))
    torch.testing.assert_close(logits(call), raw, atol=0, rtol=0)
    torch.testing.assert_close(scores(own.classify(PAIRS)), torch.softmax(raw / 0.5, -1))


def test_a_sigma_of_nought_is_refused_before_any_text_is_read(saved: Save) -> None:
    with pytest.raises(headswap.ConversionError, match="above 0"):
        Classifier(saved(3, logit_sigma=0))
    classifier = Classifier(saved(3))
    with pytest.raises(headswap.ConversionError, match="above 0"):
        classifier.classify([None], calibration={"sigma": 0.0})  # type: ignore[list-item]


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize(("problem", "one", "several"), [
    (None, "sigmoid", "softmax"), ("regression", "identity", "identity"),
    ("single_label_classification", "sigmoid", "softmax"),
    ("multi_label_classification", "sigmoid", "sigmoid"),
])  # fmt: skip
def test_classify_and_score_agree_on_raw_values_and_on_the_function(
    problem: str | None, one: str, several: str, labels: int, saved: Save
) -> None:
    if (problem, labels) == ("single_label_classification", 1):
        pytest.skip("transformers 5 reads no such config; tests/heads has the rule")
    folder = saved(labels, **({} if problem is None else {"problem_type": problem}))
    name = one if labels == 1 else several
    function = {"identity": torch.nn.Identity(), "sigmoid": torch.nn.Sigmoid(),
                "softmax": torch.nn.Softmax(-1)}[name]  # fmt: skip
    classifier = Classifier(folder)
    relevance = classifier.labels[-1] if labels > 1 else None
    reranker = Reranker(folder, relevance=relevance)
    assert classifier.activation == reranker.activation
    assert classifier.activation.name == name
    answers = classifier.classify(PAIRS)
    raw = logits(answers)
    torch.testing.assert_close(scores(answers), function(raw))
    given = [second for _, second in PAIRS]
    wanted = function(raw)[:, -1].tolist()
    assert reranker.score("w1 w2", given) == pytest.approx(wanted, abs=1e-6)
    found = reranker.score("w1 w2", given, activation="identity")
    assert found == pytest.approx(raw[:, -1].tolist(), abs=1e-6)


def test_a_reward_is_the_raw_number_that_classify_and_score_start_from(words: Any) -> None:
    own = words("chat", chat=True)
    own.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    model = tiny("qwen3", SEQ, num_labels=1)
    model.config.logit_mean, model.config.logit_sigma = 3.0, 0.1
    model.config.problem_type = "multi_label_classification"
    reward = RewardModel(model, tokenizer=own).reward([{"role": "user", "content": "w1 w2"}])
    (answer,) = Classifier(model, tokenizer=own).classify("w1 w2")
    assert reward == pytest.approx(answer.logits, abs=1e-6)
    wanted = torch.sigmoid((torch.tensor(reward[0]) - 3.0) / 0.1).item()
    assert answer.score == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("function", ["foo", "Softmax"])
@pytest.mark.parametrize("field", ["problem_type", "function_to_apply"])
def test_an_unknown_saved_function_is_refused_by_all(
    field: str, function: str, words: Any, saved: Save
) -> None:
    model = tiny("bert", SEQ, num_labels=1)
    object.__setattr__(model.config, field, function)
    for kind in (Classifier, Reranker):
        with pytest.raises(headswap.ConversionError, match=f"Unknown {field} '{function}'; known"):
            kind(model, tokenizer=words("bert"))


def test_the_temperature_of_writing_text_divides_no_logits(tmp_path: Path) -> None:
    model = tiny("llama")
    model.save_pretrained(tmp_path / "lm")
    word_tokenizer().save_pretrained(tmp_path / "lm")
    file = tmp_path / "lm" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), "temperature": 0.6}))
    loaded = headswap.load(tmp_path / "lm", label_tokens=["no", "yes"])
    loaded.save_pretrained(tmp_path / "memory")
    headswap.convert_checkpoint(tmp_path / "lm", tmp_path / "files", label_tokens=["no", "yes"])
    word_tokenizer().save_pretrained(tmp_path / "memory")
    for folder in ("memory", "files"):
        classifier = Classifier(tmp_path / folder)
        assert classifier.calibration.source == "default"
        (answer,) = classifier.classify("w1 w2")
        wanted = torch.softmax(torch.tensor(answer.logits), -1).tolist()
        assert list(answer.scores.values()) == pytest.approx(wanted, abs=1e-6)


def test_a_score_that_is_no_finite_number_is_refused_and_never_the_best(saved: Save) -> None:
    folder = saved(3)
    classifier = Classifier(folder)
    for extreme in ({"mean": 1e39}, {"sigma": 1e-60}):
        with pytest.raises(headswap.InputError, match="calibration is too extreme"):
            classifier.classify("w1", calibration=extreme)
    with torch.no_grad():
        classifier.model.classifier.bias[1] = float("nan")
    with pytest.raises(headswap.InputError, match=r"Text 0 has the scores .*nan") as caught:
        classifier.classify(["w1", "w2"])
    assert caught.value.rows == (0, 1)
    ranker = Reranker(classifier.model, tokenizer=classifier._encoder._full, relevance="LABEL_0")
    with pytest.raises(headswap.InputError, match=r"Text 0 has the scores .*nan"):
        ranker.rank("w1", ["w2", "w3"])
