# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose names stand under another prefix, or under none, give the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import alone, rows, tiny

import headswap
from headswap.convert.layouts import OUTER

SEQ = "AutoModelForSequenceClassification"
LABELS = [7, 41]


def saved(folder: Path, model: Any, rename: Callable[[str], str]) -> None:
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    state = {rename(name): tensor for name, tensor in load_file(file).items()}
    save_file(state, file, metadata={"format": "pt"})


def under(outer: str, backbone: str) -> Callable[[str], str]:
    """`outer` before every name; a multimodal model's prefix stands in place of the backbone's."""
    if outer == "model.language_model.":
        return lambda name: outer + name.removeprefix(backbone) if backbone in name else name
    return lambda name: outer + name


@pytest.mark.parametrize("outer", ["", *OUTER])
@pytest.mark.parametrize(("model_type", "backbone"), [
    ("llama", "model."), ("gpt2", "transformer."), ("mixtral", "model."), ("bert", "bert."),
])  # fmt: skip
def test_a_classifier_under_any_prefix(
    tmp_path: Path, model_type: str, backbone: str, outer: str
) -> None:
    reference = tiny(model_type, SEQ, num_labels=3)
    bare = not outer
    rename = (lambda name: name.removeprefix(backbone)) if bare else under(outer, backbone)
    saved(tmp_path, reference, rename)
    assert headswap.plan(tmp_path).ok
    found = alone(headswap.load(tmp_path), rows())
    torch.testing.assert_close(found, alone(reference, rows()), atol=1e-5, rtol=0)
    headswap.convert_checkpoint(tmp_path, tmp_path / "out")
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(alone(stock.eval(), rows()), found, atol=1e-5, rtol=0)


@pytest.mark.parametrize("outer", ["", *OUTER])
@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_under_any_prefix(tmp_path: Path, outer: str, tied: bool) -> None:
    source = tiny("llama", tie_word_embeddings=tied)
    rename = under(outer, "model.") if outer else lambda name: name.removeprefix("model.")
    saved(tmp_path, source, rename)
    assert headswap.plan(tmp_path, label_tokens=LABELS).ok
    model = headswap.load(tmp_path, label_tokens=LABELS)
    with torch.no_grad():
        logits = torch.cat([source(torch.tensor([row])).logits[:, -1] for row in rows()])
    torch.testing.assert_close(alone(model, rows()), logits[:, LABELS], atol=1e-5, rtol=0)


def test_one_tensor_under_two_prefixes_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, tiny("llama", SEQ, num_labels=2), lambda name: f"module.{name}")
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    save_file({**state, "norm.weight": state["module.model.norm.weight"].clone()}, file,
              metadata={"format": "pt"})  # fmt: skip
    with pytest.raises(headswap.WeightError, match=r"norm\.weight"):
        headswap.load(tmp_path)


def test_names_that_fit_nothing_are_still_an_error(tmp_path: Path) -> None:
    saved(tmp_path, tiny("llama", SEQ, num_labels=2), lambda name: f"something.{name}")
    with pytest.raises(headswap.HeadswapError, match="register_weight_rule"):
        headswap.load(tmp_path)
