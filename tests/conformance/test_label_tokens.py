# SPDX-License-Identifier: Apache-2.0
"""Heads from output rows, for every causal class: the class's own token logits, or a refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zoo import CAUSAL, batch, zoo_model
from zoo_sizes import NO_CAUSAL_HERE, NO_MASK, TRANSFORMS_STATE

import headswap
from headswap.convert.serving import REFUSED

TOLERANCE = 1e-5
TOKENS = [7, 11, 13]


@pytest.mark.parametrize("model_type", sorted(CAUSAL))
@torch.no_grad()
def test_the_class_s_own_token_logits(model_type: str, counted: Any) -> None:
    if model_type in NO_CAUSAL_HERE:
        counted("label tokens", NO_CAUSAL_HERE[model_type])
        return
    source = zoo_model(model_type, CAUSAL)
    if type(source).__name__ in REFUSED:
        counted("label tokens", f"refused, since {REFUSED[type(source).__name__]}")
        return
    if model_type in TRANSFORMS_STATE:
        counted("label tokens", "refused, since layers stand before its output rows")
        with pytest.raises(headswap.UnsupportedHeadError):
            headswap.as_seq_cls_model(source, label_tokens=TOKENS)
        return
    counted("label tokens")
    rows, _ = batch()
    alone = [torch.tensor([row]) for row in rows[: 1 if model_type in NO_MASK else None]]
    wanted = torch.cat(
        [source(ids, attention_mask=torch.ones_like(ids)).logits[:, -1, TOKENS] for ids in alone]
    )
    model = headswap.as_seq_cls_model(source, label_tokens=TOKENS)
    found = torch.cat([model(ids, attention_mask=torch.ones_like(ids)).logits for ids in alone])
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)
    one = headswap.as_seq_cls_model(source, label_tokens=TOKENS[:2], method="difference")
    difference = wanted[:, [1]] - wanted[:, [0]]
    first = one(alone[0], attention_mask=torch.ones_like(alone[0])).logits
    torch.testing.assert_close(first, difference[:1], atol=TOLERANCE, rtol=0)
