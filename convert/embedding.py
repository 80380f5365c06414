# SPDX-License-Identifier: Apache-2.0
"""Which pooling an embedding checkpoint wants: sentence-transformers' own file, else a default."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from headswap.convert.checkpoint import Checkpoint
from headswap.convert.weights import parsed_json, read_json
from headswap.heads import Pooling
from headswap.registry import global_registry
from headswap.registry.errors import CheckpointError, UnsupportedHeadError

# sentence-transformers' words for a pooling mode, in its old (flags) and new (name) spelling.
_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "cls": "first",
    "mean": "mean",
    "lasttoken": "last",
}


def stored_pooling(checkpoint: Checkpoint) -> Pooling:
    """The pooling that `modules.json` lists, else the last token for a causal model and the mean
    over real tokens for an encoder (sentence-transformers' own default).

    Raises `UnsupportedHeadError` for a mode that headswap does not have, and for several at once.
    """
    modules = checkpoint.folder / "modules.json"
    if not modules.exists():
        return default_pooling(checkpoint.config.model_type)
    for module in _modules(modules):
        if str(module.get("type", "")).endswith("Pooling"):
            return _mode(checkpoint.folder / str(module.get("path", "")) / "config.json")
    return default_pooling(checkpoint.config.model_type)


def _modules(file: Path) -> list[dict[str, Any]]:
    """What modules.json lists; `CheckpointError` if it is no list of objects within the folder."""
    found = parsed_json(file)
    if not isinstance(found, list) or not all(isinstance(module, dict) for module in found):
        raise CheckpointError(f"{file} holds no list of objects.", path=str(file))
    for module in found:
        path = PurePosixPath(str(module.get("path", "")))
        if path.is_absolute() or ".." in path.parts:
            raise CheckpointError(f"{file} names {path}, outside its folder.", path=str(file))
    return found


def _mode(file: Path) -> Pooling:
    config = read_json(file)
    flags = [key for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
    named = config.get("pooling_mode")
    chosen = flags or ([named] if isinstance(named, str) else list(named or []))
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise UnsupportedHeadError(
            f"{file} asks for the pooling {chosen}; headswap has one of {sorted(set(_MODES))}.",
            pooling=chosen,
        )
    return _MODES[chosen[0]]


def default_pooling(model_type: str) -> Pooling:
    """ "last" for model types that are causal only, "mean" for encoders."""
    return "last" if global_registry.is_causal(model_type) else "mean"
