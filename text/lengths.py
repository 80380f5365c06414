# SPDX-License-Identifier: Apache-2.0
"""How many tokens a model takes, and who says so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headswap.convert.modules import listed_modules, transformer_settings
from headswap.text.rope import scaled_length

SENTINEL = 10**8
"""Tokenizers without a limit store a huge number in its place (10**30 in transformers); the longest
published tables have some ten million positions (Llama 4: 10485760)."""
_POSITIONS = ("max_position_embeddings", "n_positions")
_TABLES = ("max_seq_len", "seq_length", "max_target_positions", "max_sequence_length",
           "max_seq_length", "model_max_length")  # fmt: skip
_TABLE = re.compile(r"(^|_)(positions?|pos|wpe)(_|$)")


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest number of tokens; None where nothing limits it. `source` says what does."""

    value: int | None
    source: str


def usable_length(model: Any, tokenizer: Any, folder: Path | None = None) -> Limit:
    """The smallest real limit of a model's positions, of its tokenizer, and of
    sentence-transformers' files in `folder`.

    A RoBERTa-like table keeps its first rows for pads, so fewer are usable; RoPE scaling makes more
    usable (see `headswap.text.rope`). The tokenizer's limit counts for models with absolute
    positions, and where sentence-transformers saved the folder, since it keeps its own limit there.
    """
    config = model.config.get_text_config()
    found = [*_of_config(model, config), *_of_files(folder)]
    stored = getattr(tokenizer, "model_max_length", None)
    if _absolute(model, config) or (folder is not None and listed_modules(folder)):
        found += _real(stored, "tokenizer.model_max_length")
    return min(found, key=lambda limit: limit.value or 0, default=Limit(None, "nothing"))


def _real(value: Any, source: str) -> list[Limit]:
    """`value` as a limit, unless it is a sentinel or no number."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return [Limit(int(value), source)] if number and 0 < value < SENTINEL else []


def _of_config(model: Any, config: Any) -> Iterator[Limit]:
    offset = _offset(model)
    for name in _POSITIONS:
        for limit in _real(getattr(config, name, None), f"config.{name}"):
            length, why = scaled_length(config, limit.value or 0)
            source = limit.source + (f", {why}" if why else "") + (f" - {offset}" if offset else "")
            yield Limit(length - offset, source)
    for name in _TABLES:
        yield from _real(getattr(config, name, None), f"config.{name}")


def _of_files(folder: Path | None) -> list[Limit]:
    listed = listed_modules(folder) if folder is not None else []
    if not listed:
        return []
    length = transformer_settings(listed[0][1]).get("max_seq_length")
    return _real(length, "sentence-transformers' max_seq_length")


def _backbone(model: Any) -> Any:
    return getattr(model, "backbone", None) or getattr(model, "base_model", model)


def _offset(model: Any) -> int:
    from headswap.convert.inputs import position_offset

    return position_offset(_backbone(model))


def _absolute(model: Any, config: Any) -> bool:
    """Whether a token's place is looked up in a table: neither the config's fields nor the modules
    say that it is rotated, relative, or not told at all.

    transformers 5 has dropped `position_embedding_type`, so no single field tells.
    """
    fields = vars(config)
    kind = fields.get("position_embedding_type")
    if kind is not None:
        return bool(kind == "absolute")
    rotary = [n for n in fields if ("rope" in n or "rotary" in n) and fields[n] is not None]
    if rotary or fields.get("alibi") or fields.get("position_biased_input") is False:
        return False
    names = [name.rpartition(".")[2] for name, _ in _backbone(model).named_modules() if name]
    return not names or any(_TABLE.search(name) for name in names)
