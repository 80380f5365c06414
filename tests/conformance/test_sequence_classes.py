# SPDX-License-Identifier: Apache-2.0
"""Every sequence-classification class of the installed transformers, against `headswap.load`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zoo import SEQUENCE, batch, check_dropout, zoo_model
from zoo_sizes import NO_CLASS_HERE, PADS_COUNT

import headswap

TOLERANCE = 1e-5


def logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**inputs).logits
    return found


@pytest.mark.parametrize("model_type", sorted(SEQUENCE))
def test_the_class_s_own_logits(model_type: str, tmp_path: Any, counted: Any) -> None:
    if model_type in NO_CLASS_HERE:
        counted("sequence classes", NO_CLASS_HERE[model_type])
        return
    counted("sequence classes")
    reference = zoo_model(model_type, SEQUENCE, num_labels=3)
    reference.save_pretrained(tmp_path)
    reference = type(reference).from_pretrained(tmp_path, dtype=torch.float32).eval()
    model = headswap.load(tmp_path)
    check_dropout(reference, model)
    rows, right = batch()
    _, left = batch(left=True)
    if model_type == "fnet":  # takes no mask: pads are text to it
        del right["attention_mask"]
        found = logits(model, right)
        torch.testing.assert_close(found, logits(reference, right), atol=TOLERANCE, rtol=0)
        return
    # XLNet's class pools the last position, which is a token under left padding only.
    wanted = logits(reference, left if model_type == "xlnet" else right)
    found = logits(model, right)
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(logits(model, left), found, atol=TOLERANCE, rtol=0)
    if model_type not in PADS_COUNT:
        alone = torch.cat([logits(model, {"input_ids": torch.tensor([row]),
                                                    "attention_mask": torch.ones(1, len(row))})
                           for row in rows])  # fmt: skip
        torch.testing.assert_close(found, alone, atol=TOLERANCE, rtol=0)
