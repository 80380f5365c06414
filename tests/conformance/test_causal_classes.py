# SPDX-License-Identifier: Apache-2.0
"""Every causal class of the installed transformers becomes a classifier: score times the state that
the class feeds its own output embedding, or the head that transformers' own class has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zoo import CAUSAL, batch, zoo_model
from zoo_sizes import NO_CAUSAL_HERE, NO_MASK, PADS_COUNT

import headswap
from headswap.convert.serving import REFUSED

TOLERANCE = 1e-5
OWN_STATE = {"minicpm3"}
"""Types whose causal class scales its state first, and whose classification class does not."""
SCORE_HEADS = {"score", "score-by-count", "ctrl", "cohere-compass", "inkling"}


def fed_states(source: Any, rows: list[list[int]]) -> torch.Tensor:
    """What `source` feeds its output embedding at the last token of each row, alone."""
    fed: list[torch.Tensor] = []
    hook = source.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: fed.append(inputs[0])
    )
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row])
            source(input_ids=ids, attention_mask=torch.ones_like(ids))
    hook.remove()
    return torch.cat([states[:, -1] for states in fed])


def own_logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """What transformers' own class gives for the tensors of `model`."""
    reference = type(model).source_class(model.config).eval()
    reference.load_state_dict(model.state_dict())
    return reference(**inputs).logits


@pytest.mark.parametrize("model_type", sorted(CAUSAL))
@torch.no_grad()
def test_a_causal_model_becomes_a_classifier(model_type: str, counted: Any) -> None:
    if model_type in NO_CAUSAL_HERE:
        counted("causal classes", NO_CAUSAL_HERE[model_type])
        return
    source = zoo_model(model_type, CAUSAL)
    name = type(source).__name__
    if name in REFUSED:
        counted("causal classes", f"refused, since {REFUSED[name]}")
        with pytest.raises(headswap.HeadswapError, match=name):
            headswap.as_seq_cls_model(source, num_labels=3)
        return
    counted("causal classes")
    model = headswap.as_seq_cls_model(source, num_labels=3).eval()
    rows, right = batch()
    _, left = batch(left=True)
    if model_type in NO_MASK:
        rows = rows[:1]
        left = right = {"input_ids": torch.tensor(rows)}
    found = model(**right).logits
    torch.testing.assert_close(model(**left).logits, found, atol=TOLERANCE, rtol=0)
    spec = model.head_spec
    if type(model).native:
        wanted = own_logits(model, left if model_type == "xlnet" else right)
        torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)
    if spec.family in SCORE_HEADS and model_type not in OWN_STATE | PADS_COUNT:
        weight = model.get_submodule(spec.output.path).weight
        wanted = fed_states(source, rows) @ weight.T
        torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)
