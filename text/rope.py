# SPDX-License-Identifier: Apache-2.0
"""The length that RoPE scaling makes usable, from every spelling of it in a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# By the meaning of `max_position_embeddings`, as the formulas in transformers'
# modeling_rope_utils and published checkpoints use it. Stretched types: the length before scaling,
# unless `original_max_position_embeddings` names that. Extended types: the length after it.
_STRETCHED = ("linear", "dynamic", "ntk", "yarn", "deepseek_yarn")
_EXTENDED = ("llama3", "longrope", "su")


def scaled_length(config: Any, length: int) -> tuple[int, str]:
    """The usable length of a model with `length` positions in its config, and why it is another.

    Read are `rope_parameters` (transformers 5) and `rope_scaling` (before), with the type as
    `rope_type` or `type`, of the whole model or by layer type, of which the smallest counts. The
    factor is applied once. Where a config says by `rope_local_base_freq` that some layers have a
    rotation of their own (Gemma 3), these are not scaled, and its length is that after scaling.
    """
    name, parts = _parts(config)
    found = [(_scaled(part, config, length), part) for part in parts]
    if not found or getattr(config, "rope_local_base_freq", None) is not None:
        return length, ""
    best, part = min(found, key=lambda pair: pair[0])
    why = f"scaled by config.{name} ({_kind(part)}, factor {part.get('factor')})"
    return best, "" if best == length else why


def _parts(config: Any) -> tuple[str, list[Mapping[str, Any]]]:
    """The field with the settings, and they: one, or one for each type of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        found = getattr(config, name, None)
        if isinstance(found, Mapping) and found:
            inner = [part for part in found.values() if isinstance(part, Mapping)]
            return name, inner or [found]
    return "", []


def _kind(part: Mapping[str, Any]) -> str:
    return str(part.get("rope_type") or part.get("type") or "default")


def _scaled(part: Mapping[str, Any], config: Any, length: int) -> int:
    factor = part.get("factor")
    if not isinstance(factor, int | float) or not factor > 0:
        return length
    given = part.get("original_max_position_embeddings")
    original = given or getattr(config, "original_max_position_embeddings", None)
    original = original if isinstance(original, int | float) and original > 0 else length
    if _kind(part) in _EXTENDED:
        return length if length > original else int(original * factor)
    return int(original * factor) if _kind(part) in _STRETCHED else length
