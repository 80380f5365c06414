# SPDX-License-Identifier: Apache-2.0
"""sentence-transformers' own files beside a checkpoint: its modules, and how they are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headswap.convert.weights import read_json
from headswap.registry.errors import CheckpointError, UnsupportedHeadError

_OURS = "sentence_transformers."
# The names that sentence-transformers gave the Transformer module's file over time.
_FILES = ("sentence_bert_config.json", "sentence_roberta_config.json",
          "sentence_distilbert_config.json", "sentence_camembert_config.json",
          "sentence_albert_config.json", "sentence_xlm-roberta_config.json",
          "sentence_xlnet_config.json")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Module:
    """One entry of modules.json: its class's bare name, its folder, and its config."""

    kind: str
    folder: Path
    config: Mapping[str, Any]


def read_modules(folder: Path) -> tuple[Module, ...]:
    """The modules that `folder`/modules.json lists, in order; () without that file.

    Raises `UnsupportedHeadError` for a class that is not sentence-transformers' own, whose code
    would have to be run, and `CheckpointError` for a file that can't be read.
    """
    found = []
    for kind, place in listed_modules(folder):
        if not kind.startswith(_OURS):
            raise UnsupportedHeadError(
                f"{folder}: modules.json lists {kind!r}, which is not a module of "
                "sentence-transformers; headswap runs no code of a checkpoint here.",
                module=kind,
            )
        config = read_json(place / "config.json", {}) if place != folder else {}
        found.append(Module(kind.rsplit(".", 1)[-1], place, config))
    return tuple(found)


def listed_modules(folder: Path) -> list[tuple[str, Path]]:
    """Class name and folder of each module, whoever's it is; [] without modules.json."""
    file = folder / "modules.json"
    listed = read_json(file, [])
    if not all(isinstance(entry, dict) for entry in listed):
        raise CheckpointError(f"{file} holds no list of objects.", path=str(file))
    return [(str(entry.get("type", "")), _inside(folder, str(entry.get("path", ""))))
            for entry in sorted(listed, key=_place)]  # fmt: skip


def _place(entry: Mapping[str, Any]) -> int:
    place = entry.get("idx", 0)
    return place if isinstance(place, int) else 0


def settings(folder: Path) -> dict[str, Any]:
    """config_sentence_transformers.json; {} without it."""
    return dict(read_json(folder / "config_sentence_transformers.json", {}))


def transformer_settings(folder: Path) -> dict[str, Any]:
    """The settings of the Transformer module in `folder`; {} without its file."""
    for file in _FILES:
        found = read_json(folder / file, {})
        if found:
            return dict(found)
    return {}


def cross_encoder_activation(folder: Path) -> str | None:
    """The activation that a CrossEncoder of sentence-transformers 6 saved beside its config."""
    found = settings(folder)
    path = found.get("activation_fn") if found.get("model_type") == "CrossEncoder" else None
    return None if path is None else str(path)


def _inside(folder: Path, path: str) -> Path:
    place = folder / path
    if not place.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(
            f"{folder / 'modules.json'} names {path!r}, outside its folder.", path=str(folder)
        )
    return place
