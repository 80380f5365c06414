# SPDX-License-Identifier: Apache-2.0
"""A last layer for the pooled rows alone gives what the whole layer gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from spyre_models import FAMILIES, MAJOR, OWN, converted, expected
from tiny_models import rows, tiny

import headswap
from headswap.spyre import Executor

# GPT-2 gives its states the shape of its ids, so its last layer runs for every row.
WHOLE = (*OWN, "gpt2")


@pytest.mark.parametrize("kind", FAMILIES)
def test_pooled_rows_alone_equal_the_whole_layer(kind: str) -> None:
    model, ids = converted(kind), rows((5, 61, 30, 1, 90))
    executor = Executor(model, backend="eager")
    found = executor.logits(ids)
    torch.testing.assert_close(found, expected(model, ids), atol=1e-5, rtol=0)
    if MAJOR > 4:
        assert executor.prepared.prunes is (kind not in WHOLE)
    executor.prepared.prunes = False
    torch.testing.assert_close(executor.logits(ids), found, atol=1e-5, rtol=0)


@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
def test_every_pooling_rule(pooling: str) -> None:
    model = headswap.as_seq_cls_model(
        tiny("gemma2"), num_labels=2, pooling=pooling
    ).eval()  # fmt: skip
    ids = rows((5, 33, 1))
    found = Executor(model, backend="eager").logits(ids)
    torch.testing.assert_close(found, expected(model, ids), atol=1e-5, rtol=0)


def test_the_last_layers_feed_forward_sees_pooled_rows_only() -> None:
    model, ids = converted("llama"), rows((5, 9, 4))
    executor = Executor(model, backend="eager")
    seen: list[int] = []
    layers: Any = executor.prepared.backbone
    for layer in layers.layers:
        layer.mlp.register_forward_pre_hook(lambda m, a: seen.append(a[0].shape[1]))
    executor.logits(ids)
    assert seen == [18, 3]
