# SPDX-License-Identifier: Apache-2.0
"""Heads under the names that trainers and old conversions gave them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import alone, rows, tiny
from zoo import SEQUENCE, zoo_model

import headswap

SEQ = "AutoModelForSequenceClassification"


def stored(folder: Path, source: Any, **extra: torch.Tensor) -> None:
    """`source` saved, with the tensors of `extra` in place of its own head."""
    source.save_pretrained(folder)
    file = folder / "model.safetensors"
    state = load_file(file)
    state.pop("score.weight", None)
    state |= {name.replace("__", "."): tensor for name, tensor in extra.items()}
    save_file(state, file, metadata={"format": "pt"})


@pytest.mark.parametrize("stem", ["scores", "classifier", "value_head", "v_head__summary"])
@pytest.mark.parametrize("auto", [SEQ, "AutoModelForCausalLM"])
def test_a_linear_head_is_found_by_its_alias(tmp_path: Path, stem: str, auto: str) -> None:
    reference = tiny("llama", SEQ, num_labels=1)
    source = reference if auto == SEQ else tiny("llama")
    if auto != SEQ:
        reference.model.load_state_dict(source.model.state_dict())
    stored(tmp_path, source, **{f"{stem}__weight": reference.score.weight.detach().clone()})
    wanted = alone(reference, rows())
    model = headswap.load(tmp_path)
    torch.testing.assert_close(alone(model, rows()), wanted, atol=1e-5, rtol=0)
    assert headswap.plan(tmp_path).ok
    headswap.convert_checkpoint(tmp_path, tmp_path / "out")
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert stock.config.num_labels == 1
    torch.testing.assert_close(alone(stock.eval(), rows()), wanted, atol=1e-5, rtol=0)


def test_the_bias_of_a_value_head_counts(tmp_path: Path) -> None:
    reference = tiny("llama", SEQ, num_labels=1)
    weight, bias = reference.score.weight.detach().clone(), torch.tensor([0.75])
    stored(tmp_path, reference, v_head__summary__weight=weight, v_head__summary__bias=bias)
    model = headswap.load(tmp_path)
    wanted = alone(reference, rows()) + bias
    torch.testing.assert_close(alone(model, rows()), wanted, atol=1e-5, rtol=0)
    model.save_pretrained(tmp_path / "again")
    again = headswap.load(tmp_path / "again")
    torch.testing.assert_close(alone(again, rows()), wanted, atol=1e-5, rtol=0)
    with pytest.raises(headswap.UnsupportedHeadError, match="bias"):  # a stock class has none
        headswap.convert_checkpoint(tmp_path, tmp_path / "out")


def test_the_rows_of_an_alias_must_fit_the_labels(tmp_path: Path) -> None:
    stored(tmp_path, tiny("llama", SEQ, num_labels=4), scores__weight=torch.ones(3, 32))
    with pytest.raises(headswap.LabelError, match=r"scores\.weight has 3 rows.*4 labels"):
        headswap.load(tmp_path)


def test_two_heads_are_refused_by_name(tmp_path: Path) -> None:
    head = torch.ones(1, 32)
    reference = tiny("llama", SEQ, num_labels=1)
    stored(tmp_path, reference, scores__weight=head, v_head__summary__weight=head * 2)
    with pytest.raises(headswap.WeightError, match=r"scores\.weight and v_head\.summary\.weight"):
        headswap.load(tmp_path)


def mlp(folder: Path, architecture: str) -> Any:
    """A Qwen2 checkpoint with the two linears of a reward model, and its own computation."""
    source = tiny("qwen2", SEQ, num_labels=1)
    torch.manual_seed(1)
    head = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    state = {
        f"score__{name.replace('.', '__')}": t.clone() for name, t in head.state_dict().items()
    }
    stored(folder, source, **state)
    file = folder / "config.json"
    text = file.read_text("utf-8").replace("Qwen2ForSequenceClassification", architecture)
    file.write_text(text, "utf-8")
    with torch.no_grad():
        states = [source.model(torch.tensor([row]))[0][:, -1] for row in rows()]
        return head(torch.cat(states)).detach()


def test_a_reward_model_of_two_linears_is_computed_in_full(tmp_path: Path) -> None:
    wanted = mlp(tmp_path, "Qwen2ForRewardModel")
    model = headswap.load(tmp_path)
    torch.testing.assert_close(alone(model, rows()), wanted, atol=1e-5, rtol=0)
    model.save_pretrained(tmp_path / "again")
    again = headswap.load(tmp_path / "again")
    torch.testing.assert_close(alone(again, rows()), wanted, atol=1e-5, rtol=0)


def test_the_same_tensors_in_another_class_are_refused_unless_named(tmp_path: Path) -> None:
    wanted = mlp(tmp_path, "Qwen2ForSequenceClassification")
    with pytest.raises(headswap.HeadswapError, match=r"score\.0\.(weight|bias)"):
        headswap.load(tmp_path)
    model = headswap.load(tmp_path, head="score-mlp")
    torch.testing.assert_close(alone(model, rows()), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "bert", "distilbert"])
def test_an_embedder_leaves_a_classifier_s_head_out(tmp_path: Path, kind: str) -> None:
    source = zoo_model(kind, SEQUENCE, num_labels=2)
    source.save_pretrained(tmp_path)
    plan = headswap.plan(tmp_path, task="embed")
    assert plan.ok
    assert any("embedder" in tensor.reason for tensor in plan.tensors)
    model = headswap.load(tmp_path, task="embed")
    ids = torch.tensor([rows()[0]])
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        backbone = getattr(source, source.base_model_prefix)
        wanted = backbone(input_ids=ids, attention_mask=torch.ones_like(ids))[0]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
