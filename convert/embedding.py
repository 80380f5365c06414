# SPDX-License-Identifier: Apache-2.0
"""Which pooling an embedding checkpoint wants: sentence-transformers' own file, else a default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headswap.convert.checkpoint import Checkpoint
from headswap.convert.modules import read_modules
from headswap.heads import Pooling
from headswap.registry import global_registry
from headswap.registry.errors import UnsupportedHeadError

# sentence-transformers' old spelling, a flag a mode, in the order in which it joins the vectors.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
MODES = tuple(_FLAGS.values())
"""Every pooling mode of sentence-transformers, by its newer name."""
_OURS: dict[str, Pooling] = {"cls": "first", "mean": "mean", "lasttoken": "last"}


@dataclass(frozen=True, slots=True)
class StoredPooling:
    """Pooling modes whose vectors are joined in order, and whether a prompt's tokens count."""

    modes: tuple[str, ...]
    include_prompt: bool = True


def read_pooling(config: Mapping[str, Any], name: str) -> StoredPooling:
    """What a Pooling module's config (of the file `name`) asks for, in either spelling.

    Raises `UnsupportedHeadError` for a mode that sentence-transformers does not have either.
    """
    named = config.get("pooling_mode")
    flags = [mode for key, mode in _FLAGS.items() if config.get(key)]
    unknown = [k for k, on in config.items() if k.startswith("pooling_mode_") and on is True
               and k not in _FLAGS]  # fmt: skip
    modes = unknown + (flags if named is None else [named] if isinstance(named, str) else [*named])
    if not modes or any(mode not in MODES for mode in modes):
        raise UnsupportedHeadError(
            f"{name} asks for the pooling {modes}; headswap has {', '.join(MODES)}.", pooling=modes
        )
    return StoredPooling(tuple(modes), bool(config.get("include_prompt", True)))


def stored_pooling(checkpoint: Checkpoint) -> Pooling:
    """The pooling that `modules.json` lists, else the last token for a causal model and the mean
    over real tokens for an encoder (sentence-transformers' own default).

    Raises `UnsupportedHeadError` for a mode that a model by itself does not have, and for several
    at once; `headswap.text.Embedder` has all of them.
    """
    for module in read_modules(checkpoint.beside("modules.json")):
        if module.kind == "Pooling":
            return _one(read_pooling(module.config, str(module.folder / "config.json")).modes)
    return default_pooling(checkpoint.config.model_type)


def _one(modes: tuple[str, ...]) -> Pooling:
    if len(modes) != 1 or modes[0] not in _OURS:
        raise UnsupportedHeadError(
            f"The checkpoint asks for the pooling {list(modes)}; a model by itself pools by one of "
            f"{sorted(set(_OURS))}. headswap.text.Embedder has every mode.",
            pooling=modes,
        )
    return _OURS[modes[0]]


def default_pooling(model_type: str) -> Pooling:
    """ "last" for model types that are causal only, "mean" for encoders."""
    return "last" if global_registry.is_causal(model_type) else "mean"
