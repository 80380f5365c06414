# SPDX-License-Identifier: Apache-2.0
"""Every token-classification class of the installed transformers, against `headswap.load`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zoo import TOKEN, batch, check_dropout, zoo_model
from zoo_sizes import NO_MASK, NO_TOKENS_HERE

import headswap

TOLERANCE = 1e-5


@pytest.mark.parametrize("model_type", sorted(TOKEN))
@torch.no_grad()
def test_the_class_s_own_logits(model_type: str, tmp_path: Any, counted: Any) -> None:
    if model_type in NO_TOKENS_HERE:
        counted("token classes", NO_TOKENS_HERE[model_type])
        if NO_TOKENS_HERE[model_type].startswith("refused"):
            zoo_model(model_type, TOKEN, num_labels=4).save_pretrained(tmp_path)
            with pytest.raises(headswap.UnsupportedHeadError, match=model_type):
                headswap.load(tmp_path)
        return
    counted("token classes")
    reference = zoo_model(model_type, TOKEN, num_labels=4)
    reference.save_pretrained(tmp_path)
    reference = type(reference).from_pretrained(tmp_path, dtype=torch.float32).eval()
    model = headswap.load(tmp_path)
    check_dropout(reference, model)
    (_, right), (_, left) = batch(), batch(left=True)
    real, moved = right["attention_mask"].bool(), left["attention_mask"].bool()
    if model_type in NO_MASK:
        del right["attention_mask"]
        left = right
        moved = real
    if model_type == "bros":  # its boxes are not optional
        right["bbox"] = left["bbox"] = torch.rand(*right["input_ids"].shape, 4)
        left = right
        moved = real
    wanted, found = reference(**right).logits, model(**right).logits
    torch.testing.assert_close(found[real], wanted[real], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(model(**left).logits[moved], found[real], atol=TOLERANCE, rtol=0)
