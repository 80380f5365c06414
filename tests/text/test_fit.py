# SPDX-License-Identifier: Apache-2.0
"""Fitted heads: the optimum by the objective's own gradient, and the stock class's logits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import tiny, word_tokenizer
from torch.nn import functional as F

import headswap
from headswap.registry.errors import (
    ConversionError,
    InputError,
    LabelError,
    UnsupportedHeadError,
)
from headswap.text import Classifier
from headswap.text.logistic import best_temperature, choose_penalty, fit_linear, split

NAMES = ("calm", "glad", "sad")


def model(kind: str, labels: int = 3, **options: Any) -> Any:
    """A converted tiny model: a decoder with a score head, or BERT under its own pooler."""
    source = tiny(kind, "AutoModel" if kind == "bert" else "AutoModelForCausalLM")
    return headswap.as_seq_cls_model(source, num_labels=labels, **options)


def fit(*given: Any, **options: Any) -> Any:
    """`fit_head` with two penalties, since the whole grid takes a while."""
    return headswap.fit_head(*given, **{"penalties": (1e-1, 1e-2), **options})


def sentences(n: int = 150, noise: float = 0.0) -> tuple[list[str], list[str]]:
    """Texts whose first and last words tell the label, but for a share of `noise`."""
    draw = random.Random(0)
    texts, labels = [], []
    for i in range(n):
        kind = i % 3
        ends = [f"w{2 * kind + draw.randrange(2)}" for _ in range(2)]
        middle = [f"w{draw.randrange(10, 90)}" for _ in range(draw.randrange(1, 8))]
        texts.append(" ".join([ends[0], *middle, ends[1]]))
        labels.append(NAMES[draw.randrange(3) if draw.random() < noise else kind])
    return texts, labels


@torch.no_grad()
def stock(folder: Path, texts: list[str]) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """transformers' own class on what was saved: itself, its logits and what its output layer was
    given, text by text."""
    again = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    layer = again.score if hasattr(again, "score") else again.classifier
    seen: list[torch.Tensor] = []
    layer.register_forward_hook(lambda _, given, __: seen.append(given[0]))
    tokens = word_tokenizer()
    logits = [again(torch.tensor([tokens(text)["input_ids"]])).logits for text in texts]
    # A score head runs on every token; the last one is pooled.
    rows = [one[:, -1] if one.dim() == 3 else one for one in seen]
    return again, torch.cat(logits), torch.cat(rows).double()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_a_fitted_head_tells_the_labels_and_says_how_well(kind: str) -> None:
    texts, labels = sentences()
    source = model(kind)
    assert source.untrained_head
    found = fit(source, word_tokenizer(), texts, labels)
    assert found.model is source
    assert not source.untrained_head
    assert (found.n, found.held_out, found.labels) == (150, 30, NAMES)
    assert found.accuracy >= 0.9
    assert found.bias == (kind == "bert")
    answers = Classifier(source, tokenizer=word_tokenizer()).classify(texts)
    assert sum(a.label == label for a, label in zip(answers, labels, strict=True)) >= 140


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_what_is_saved_gives_the_stock_class_the_same_logits(kind: str, tmp_path: Path) -> None:
    texts, labels = sentences()
    found = fit(model(kind), word_tokenizer(), texts, labels)
    found.model.save_pretrained(tmp_path)
    again, logits, _ = stock(tmp_path, texts[:20])
    answers = Classifier(found.model, tokenizer=word_tokenizer()).classify(texts[:20])
    ours = torch.tensor([answer.logits for answer in answers])
    torch.testing.assert_close(ours, logits, atol=1e-5, rtol=1e-5)
    assert again.config.id2label == dict(enumerate(NAMES))
    assert not hasattr(type(again), "conversion")


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_the_objectives_gradient_is_zero_at_the_fit(kind: str, tmp_path: Path) -> None:
    """Written out again over unscaled weights, with the states that the stock class computes."""
    texts, labels = sentences(noise=0.3)
    found = fit(model(kind), word_tokenizer(), texts, labels)
    found.model.save_pretrained(tmp_path)
    again, _, states = stock(tmp_path, texts)
    columns = [NAMES.index(label) for label in labels]
    chosen, _ = split(columns, 0.2, 0)
    x, y = states[chosen], torch.tensor(columns)[chosen]
    layer = again.classifier if kind == "bert" else again.score
    weight = layer.weight.detach().double().requires_grad_()
    bias = layer.bias.detach().double().requires_grad_() if kind == "bert" else None
    size = x.std(dim=0, correction=0) if kind == "bert" else x.square().mean(dim=0).sqrt()
    loss = F.cross_entropy(x @ weight.T + (0 if bias is None else bias), y)
    loss = loss + found.penalty / 2 * (weight * size).square().sum()
    loss.backward()
    assert weight.grad is not None
    assert float(weight.grad.abs().max()) < 2e-6
    assert bias is None or float(bias.grad.abs().max()) < 2e-6  # type: ignore[union-attr]
    off = F.cross_entropy(1.01 * x @ weight.T + (0 if bias is None else bias), y)
    off = off + found.penalty / 2 * (1.01 * weight * size).square().sum()
    assert off.item() > loss.item()


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_the_figures_are_those_of_the_model_on_the_held_out_texts(kind: str) -> None:
    texts, labels = sentences(noise=0.4)
    found = fit(model(kind), word_tokenizer(), texts, labels, seed=3)
    columns = [NAMES.index(label) for label in labels]
    _, held = split(columns, 0.2, 3)
    chosen = [texts[i] for i in held]
    answers = Classifier(found.model, tokenizer=word_tokenizer()).classify(chosen)
    logits = torch.tensor([answer.logits for answer in answers])
    truth = torch.tensor(columns)[held]
    assert found.held_out == len(held)
    assert found.accuracy == pytest.approx(float((logits.argmax(1) == truth).double().mean()))
    assert found.log_loss == pytest.approx(float(F.cross_entropy(logits, truth)), abs=1e-5)
    assert found.temperature is not None
    assert found.calibrated_log_loss is not None
    at = {t: float(F.cross_entropy(logits / t, truth)) for t in
          (found.temperature * f for f in (0.9, 1.0, 1.1))}  # fmt: skip
    assert min(at, key=lambda t: at[t]) == found.temperature
    assert found.calibrated_log_loss == pytest.approx(at[found.temperature], abs=1e-5)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_folded_temperature_divides_weight_and_bias(kind: str) -> None:
    texts, labels = sentences(noise=0.4)
    plain, folded = (
        fit(model(kind), word_tokenizer(), texts, labels, fold_temperature=fold)
        for fold in (False, True)
    )
    assert plain.temperature == folded.temperature
    ones, others = (
        Classifier(f.model, tokenizer=word_tokenizer()).classify(texts[:9]) for f in (plain, folded)
    )
    for one, other in zip(ones, others, strict=True):
        expected = [value / plain.temperature for value in one.logits]
        assert other.logits == pytest.approx(expected, abs=1e-5)


def test_a_stored_temperature_divides_the_logits_and_leaves_them_raw(tmp_path: Path) -> None:
    texts, labels = sentences(noise=0.4)
    plain = fit(model("bert"), word_tokenizer(), texts, labels)
    kept = fit(model("bert"), word_tokenizer(), texts, labels, store_temperature=True)
    assert plain.temperature == kept.temperature != 1.0
    kept.model.save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    raw = Classifier(plain.model, tokenizer=word_tokenizer()).classify(texts[:9])
    again = Classifier(tmp_path)
    assert again.calibration.source == "headswap"
    for one, other in zip(raw, again.classify(texts[:9]), strict=True):
        assert other.logits == pytest.approx(one.logits, abs=1e-5)
        wanted = torch.softmax(torch.tensor(one.logits) / plain.temperature, -1).tolist()
        assert list(other.scores.values()) == pytest.approx(wanted, abs=1e-5)
    with pytest.raises(ConversionError, match="not both"):
        fit(model("bert"), word_tokenizer(), texts, labels, store_temperature=True,
            fold_temperature=True)  # fmt: skip


def test_a_new_head_has_no_earlier_heads_calibration() -> None:
    texts, labels = sentences(noise=0.4)
    source = model("bert")
    source.config.logit_mean = 5.0
    fit(source, word_tokenizer(), texts, labels, store_temperature=True)
    assert Classifier(source, tokenizer=word_tokenizer()).calibration.mean == 0.0
    fit(source, word_tokenizer(), texts, labels)
    found = Classifier(source, tokenizer=word_tokenizer()).calibration
    assert (found.mean, found.sigma, found.temperature) == (0.0, 1.0, 1.0)


def test_only_the_output_layer_and_the_labels_change() -> None:
    texts, labels = sentences()
    source = model("bert").train()
    before = {name: value.clone() for name, value in source.state_dict().items()}
    fit(source, word_tokenizer(), texts, labels)
    changed = {n for n, v in source.state_dict().items() if not torch.equal(v, before[n])}
    assert changed == {"classifier.weight", "classifier.bias"}
    assert all(module.training for module in source.modules())
    assert not any(parameter.grad is not None for parameter in source.parameters())


def test_a_seed_decides_the_fit() -> None:
    texts, labels = sentences(noise=0.3)
    weights = [
        fit(model("llama"), word_tokenizer(), texts, labels, seed=seed).model.score
        for seed in (0, 0, 1)
    ]
    assert torch.equal(weights[0].weight, weights[1].weight)
    assert not torch.equal(weights[0].weight, weights[2].weight)


def test_late_pooling_fits_the_mean_of_the_tokens_logits() -> None:
    texts, labels = sentences()
    late = fit(model("llama", pooling="late"), word_tokenizer(), texts, labels)
    mean = fit(model("llama", pooling="mean"), word_tokenizer(), texts, labels)
    torch.testing.assert_close(late.model.score.weight, mean.model.score.weight,
                               atol=1e-4, rtol=1e-4)  # fmt: skip


def test_a_template_is_stored_with_the_model() -> None:
    texts, labels = sentences(60)
    found = fit(model("llama"), word_tokenizer(), texts, labels, template="good {text} yes")
    assert Classifier(found.model, tokenizer=word_tokenizer()).template == "good {text} yes"


# -- labels ---------------------------------------------------------------------------------------


def test_names_that_the_model_has_keep_their_columns() -> None:
    texts, labels = sentences()
    names = ["sad", "calm", "glad"]
    found = fit(model("llama", id2label=names), word_tokenizer(), texts, labels)
    assert found.labels == tuple(names)
    assert found.accuracy >= 0.9
    assert found.model.config.label2id == {"sad": 0, "calm": 1, "glad": 2}


def test_numbers_are_columns_and_keep_the_models_names() -> None:
    texts, labels = sentences()
    columns = torch.tensor([NAMES.index(label) for label in labels])
    found = fit(model("llama"), word_tokenizer(), texts, columns)  # type: ignore[arg-type]
    assert found.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert found.accuracy >= 0.9


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (lambda labels: labels[:-1], {}, "150 texts and 149 labels"),
        (lambda labels: ["calm"] * 150, {}, "Every text is labelled 'calm'"),
        (lambda labels: [0] * 150, {}, "'LABEL_1': 0"),
        (lambda labels: labels, {"labels": 4}, "convert with num_labels=3"),
        (lambda labels: [3, *range(149)], {}, "Label 3 is no column"),
        (lambda labels: [True, *labels[1:]], {}, "Label True is no column"),
        (lambda labels: [0.5, *labels[1:]], {}, "all names, or all columns"),
        (lambda labels: labels, {"id2label": ["a", "b", "c"]}, "the model's are a, b, c"),
        (lambda labels: ["glad" if n == "sad" and i > 8 else n for i, n in enumerate(labels)], {},
         "'sad': 3"),
        (lambda labels: labels, {"labels": 1}, "fits a softmax"),
        (lambda labels: labels, {"problem_type": "multi_label_classification"}, "sigmoid scores"),
    ],
)  # fmt: skip
def test_labels_that_do_not_fit_are_refused(change: Any, options: Any, said: str) -> None:
    texts, labels = sentences()
    source = model("llama", **options)
    with pytest.raises(LabelError, match=said):
        fit(source, word_tokenizer(), texts, change(labels))
    assert source.untrained_head


# -- what can't be fitted -------------------------------------------------------------------------


def test_a_random_pooler_is_refused_and_a_stored_one_is_not(tmp_path: Path) -> None:
    texts, labels = sentences()
    bare = transformers.BertModel(tiny("bert", "AutoModel").config, add_pooling_layer=False)
    for source in (
        headswap.as_seq_cls_model(bare, num_labels=3),
        _loaded(bare, tmp_path),
    ):
        with pytest.raises(UnsupportedHeadError, match="head='score'") as caught:
            fit(source, word_tokenizer(), texts, labels)
        assert caught.value.tensors == ("bert.pooler.dense.bias", "bert.pooler.dense.weight")
    score = headswap.as_seq_cls_model(bare, num_labels=3, head="score", pooling="mean")
    assert fit(score, word_tokenizer(), texts, labels).accuracy >= 0.9


def _loaded(source: Any, folder: Path) -> Any:
    source.save_pretrained(folder)
    return headswap.load(folder, task="classify", num_labels=3, allow_untrained_head=True)


def test_a_mark_without_names_counts_for_the_whole_head() -> None:
    texts, labels = sentences()
    source = model("bert")
    source.config.headswap = {"untrained_head": True}
    with pytest.raises(UnsupportedHeadError, match=r"bert\.pooler\.dense"):
        fit(source, word_tokenizer(), texts, labels)


def test_a_pooler_with_a_bias_of_zeros_is_said() -> None:
    texts, labels = sentences()
    source = model("bert")
    torch.nn.init.zeros_(source.bert.pooler.dense.bias)
    with pytest.warns(UserWarning, match=r"bert\.pooler\.dense is zero throughout"):
        fit(source, word_tokenizer(), texts, labels)


def test_models_without_a_plain_last_layer_are_refused() -> None:
    texts, labels = sentences()
    causal = tiny("gemma2")
    capped = headswap.as_seq_cls_model(causal, label_tokens=[4, 5, 6])
    with pytest.raises(UnsupportedHeadError, match="Softcap"):
        fit(capped, word_tokenizer(), texts, labels)
    for other in (causal, headswap.as_embedding_model(causal), headswap.as_reward_model(causal)):
        with pytest.raises(ConversionError, match="needs a classifier that headswap made"):
            fit(other, word_tokenizer(), texts, labels)


def test_states_that_are_not_finite_are_refused_with_their_rows() -> None:
    texts, labels = sentences()
    source = model("llama")
    token = word_tokenizer().convert_tokens_to_ids("w5")
    with torch.no_grad():
        source.model.embed_tokens.weight[token] = float("nan")
    hit = tuple(i for i, text in enumerate(texts) if "w5" in text.split())
    with pytest.raises(InputError, match="not finite") as caught:
        fit(source, word_tokenizer(), texts, labels)
    assert caught.value.rows == hit
    assert source.untrained_head


@pytest.mark.parametrize(
    "options", [{"held_out": 0.0}, {"held_out": 1.0}, {"penalties": []}, {"penalties": [0.0]}]
)
def test_options_out_of_range_are_refused(options: Any) -> None:
    texts, labels = sentences(30)
    with pytest.raises(ConversionError, match=next(iter(options))):
        fit(model("llama"), word_tokenizer(), texts, labels, **options)


# -- the mathematics ------------------------------------------------------------------------------


def test_noise_takes_the_strongest_penalty_and_a_clear_rule_a_weak_one() -> None:
    states = torch.randn(300, 20, dtype=torch.float64)
    noise, rule = torch.randint(2, (300,)), (states[:, 0] > 0).long()
    assert choose_penalty(states, noise, 2, [1e-3, 1.0, 1e-1], bias=True) == 1.0
    assert choose_penalty(states, rule, 2, [1e-3, 1.0, 1e-1], bias=True) == 1e-3


@pytest.mark.parametrize("bias", [True, False])
def test_the_units_of_a_column_do_not_matter(bias: bool) -> None:
    states = torch.randn(100, 5, dtype=torch.float64) + 3
    columns = (states[:, 0] + torch.randn(100) > 3).long()
    units = torch.tensor([1e-3, 1.0, 50.0, 1e4, 0.2], dtype=torch.float64)
    one = fit_linear(states, columns, 2, 0.01, bias)
    other = fit_linear(states * units, columns, 2, 0.01, bias)
    torch.testing.assert_close(one(states), other(states * units), atol=1e-6, rtol=1e-6)


def test_a_column_that_never_changes_has_no_effect_beside_a_bias() -> None:
    states = torch.randn(100, 3, dtype=torch.float64)
    columns = (states[:, 0] > 0).long()
    constant = torch.full((100, 1), 0.1, dtype=torch.float64)
    found = fit_linear(torch.cat([states, constant], 1), columns, 2, 0.01, bias=True)
    assert float(found.weight[:, -1].abs().max()) < 1e-9


def test_a_temperature_is_the_lowest_log_loss_or_none() -> None:
    logits = torch.randn(400, 3, dtype=torch.float64)
    columns = torch.multinomial((logits / 2).softmax(1), 1).flatten()
    found = best_temperature(logits * 5, columns)
    assert found is not None
    grid = torch.arange(1.0, 40.0, 0.01).tolist()
    best = min(grid, key=lambda t: float(F.cross_entropy(logits * 5 / t, columns)))
    assert found == pytest.approx(best, abs=0.02)
    assert best_temperature(logits, logits.argmax(1)) is None
    assert best_temperature(-logits, logits.argmax(1)) is None


def test_a_split_takes_its_share_of_every_label() -> None:
    columns = [0] * 80 + [1] * 15 + [2] * 4
    chosen, held = split(columns, 0.2, 0)
    assert sorted(chosen + held) == list(range(99))
    assert [sum(columns[i] == c for i in held) for c in range(3)] == [16, 3, 1]
