# SPDX-License-Identifier: Apache-2.0
"""Decoders whose config asks for no causal mask (`is_causal: false`): honoured, or refused."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch

from headswap.convert.derive import probe_ids
from headswap.registry import global_registry
from headswap.registry.errors import UnsupportedHeadError

# What bidirectional decoders call their pooling in config.json.
_POOLINGS = {"avg": "mean", "mean": "mean", "cls": "first", "last": "last", "eos": "last"}


def is_bidirectional(config: Any) -> bool:
    """Whether `config` asks for a causal type to be run without its causal mask."""
    asked = getattr(config, "is_causal", None) is False
    return asked and global_registry.is_causal(config.model_type)


def bidirectional_pooling(config: Any) -> str | None:
    """The pooling that the config of a bidirectional decoder names; None where it names none.

    Raises `UnsupportedHeadError` for a word that headswap does not know.
    """
    named = getattr(config, "pooling", None)
    if named is None or not is_bidirectional(config):
        return None
    if named not in _POOLINGS:
        raise UnsupportedHeadError(
            f"The config has is_causal=false and pooling={named!r}; headswap knows "
            f"{', '.join(_POOLINGS)}. Pass pooling=.",
            pooling=named,
        )
    return _POOLINGS[named]


@torch.no_grad()
def check_bidirectional(model: Any) -> None:
    """Refuse a model that is to see the whole text and whose first state does not see its end."""
    if not is_bidirectional(model.config):
        return
    ids = probe_ids(model.config.get_text_config().vocab_size, model.device)
    other = ids.clone()
    other[0, -1] = ids[0, 0]
    mask = torch.ones_like(ids)
    first, changed = (
        model.backbone(input_ids=i, attention_mask=mask)[0][:, 0] for i in (ids, other)
    )
    if torch.equal(first, changed):
        raise UnsupportedHeadError(
            f"The config has is_causal=false, but {type(model.backbone).__name__} of the installed "
            f"transformers {version('transformers')} runs causally all the same. Use a newer "
            "release, or remove the field if the model is causal.",
            field="is_causal",
        )
