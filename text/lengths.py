# SPDX-License-Identifier: Apache-2.0
"""How many tokens a model takes, and who says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SENTINEL = 10**6
"""Tokenizers without a limit store a huge number in its place (10**30 in transformers)."""
_TABLES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest number of tokens; None where nothing limits it. `source` says what does."""

    value: int | None
    source: str


def usable_length(model: Any, tokenizer: Any) -> Limit:
    """The smallest real limit of a model's position table and its tokenizer.

    A RoBERTa-like table keeps its first rows for pads, so fewer are usable. The tokenizer's
    limit counts for models with absolute positions only.
    """
    config = model.config.get_text_config()
    found: list[Limit] = []
    for name in _TABLES:
        value = getattr(config, name, None)
        if isinstance(value, int) and 0 < value < SENTINEL:
            offset = _offset(model)
            why = f"config.{name}" + (f" - {offset}" if offset else "")
            found.append(Limit(value - offset, why))
            break
    stored = getattr(tokenizer, "model_max_length", None)
    if _absolute(config) and isinstance(stored, int | float) and 0 < stored < SENTINEL:
        found.append(Limit(int(stored), "tokenizer.model_max_length"))
    return min(found, key=lambda limit: limit.value or 0, default=Limit(None, "nothing"))


def _offset(model: Any) -> int:
    from headswap.convert.inputs import position_offset

    backbone = getattr(model, "backbone", None) or getattr(model, "base_model", model)
    return position_offset(backbone)


def _absolute(config: Any) -> bool:
    """Whether positions come from a table of learned vectors: no rotary field says otherwise."""
    rotary = ("rope_theta", "rope_parameters", "rotary_pct", "alibi", "rotary_dim")
    kind = getattr(config, "position_embedding_type", "absolute") or "absolute"
    return kind == "absolute" and not any(getattr(config, name, None) for name in rotary)
