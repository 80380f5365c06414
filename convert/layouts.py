# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose tensors stand under another prefix than their class has them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import init_empty_weights

from headswap.convert.checkpoint import Checkpoint
from headswap.heads import release
from headswap.registry.errors import WeightError

# What training wrappers (DDP, torch.compile, PEFT) and multimodal models put before names.
OUTER = ("module.", "_orig_mod.", "base_model.model.", "language_model.", "model.language_model.")


def empty_model(cls: Any, config: Any) -> Any:
    """An fp32 `cls` model in eval mode, with real buffers and parameters that take no memory."""
    config = copy.deepcopy(config)
    config.dtype = config.get_text_config().dtype = torch.float32
    with init_empty_weights(include_buffers=False):
        return cls(config).eval()


def renamed_layout(checkpoint: Checkpoint, cls: Any, config: Any) -> Mapping[str, str]:
    """Stored name -> the name that class `cls` has for it, for a file with another prefix before
    its names, or (on 4.57, which takes that for a damaged file) with none before the backbone's.

    {} where transformers reads the file as it is. Raises `WeightError` for two names that become
    one.
    """
    stored, prefix = checkpoint.headers, f"{cls.backbone_name}."
    if not stored or not _is_foreign(stored, prefix):
        return {}
    needed = empty_model(cls.lm_class or cls, config).state_dict().keys()
    backbone = {name for name in needed if name.startswith(prefix)}
    if not backbone.isdisjoint(stored):
        return {}
    found = [_read_as(stored, outer, prefix, needed) for outer in ("", *OUTER)]
    best = max(found, key=lambda names: len(backbone & set(names.values())))
    if len(backbone & set(best.values())) * 2 < len(backbone):
        return {}
    if best is found[0] and not _chokes(stored, cls, needed):
        return {}
    _check_distinct(checkpoint, best)
    return best


def _is_foreign(stored: Mapping[str, Any], prefix: str) -> bool:
    """Whether the names may need another prefix, before a model is built to see it."""
    inner = f"{prefix}language_model."
    return not any(n.startswith(prefix) and not n.startswith(inner) for n in stored)


def _read_as(stored: Mapping[str, Any], outer: str, prefix: str, needed: Any) -> dict[str, str]:
    names = {}
    for name in stored:
        core = name.removeprefix(outer)
        names[name] = prefix + core if core not in needed and prefix + core in needed else core
    return names


def _chokes(stored: Mapping[str, Any], cls: Any, needed: Any) -> bool:
    """Whether the installed transformers refuses bare names: 4.57, beside one that fits as it is,
    unless the class has renamings of its own."""
    renames = getattr(cls.source_class, "_checkpoint_conversion_mapping", None)
    return release() < 5 and not renames and any(name in needed for name in stored)


def _check_distinct(checkpoint: Checkpoint, names: Mapping[str, str]) -> None:
    first: dict[str, str] = {}
    for name, read in names.items():
        if first.setdefault(read, name) != name:
            raise WeightError(
                f"{checkpoint.name} stores {first[read]} and {name}, which are one tensor under "
                "two prefixes; remove one.",
                missing=(),
                unexpected=(name,),
            )
