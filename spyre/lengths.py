# SPDX-License-Identifier: Apache-2.0
"""How long a text may be for a backbone, and up to which length it does not matter to others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

TABLES = ("position_embeddings", "position_embedding", "embed_positions", "wpe")
"""How transformers' families call their tables of learned positions."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens; None where there is no such bound.

    table      rows of the table of positions
    longrope, dynamic
               up to here RoPE turns a text as it does alone: "longrope" picks its frequencies, and
               "dynamic" computes and keeps them, by the largest position of a whole run
               (transformers, `dynamic_rope_update`)
    """

    table: int | None
    longrope: int | None
    dynamic: int | None

    @classmethod
    def of(cls, backbone: nn.Module) -> Lengths:
        """What the modules of `backbone` say."""
        return cls(
            _table(backbone),
            _alike_up_to(backbone, "longrope"),
            _alike_up_to(backbone, "dynamic"),
        )

    @property
    def alike(self) -> int | None:
        """The smaller of the two RoPE bounds."""
        return min((b for b in (self.longrope, self.dynamic) if b is not None), default=None)


def _table(backbone: nn.Module) -> int | None:
    """How many tokens the backbone's table of positions has room for; None without a table."""
    sizes = [
        int(module.num_embeddings) - _before_first(module)
        for name, module in backbone.named_modules()
        if isinstance(module, nn.Embedding)
        and name.rpartition(".")[2] in TABLES
        and not any(part in name for part in ("vision", "visual", "image", "audio"))
    ]
    return min(sizes, default=None)


def _alike_up_to(backbone: nn.Module, kind: str) -> int | None:
    """Tokens up to which RoPE turns a text as it does alone, whatever runs beside it; None where
    no module's type is of this kind."""
    sizes: list[int] = []
    for module in backbone.modules():
        found: Any = getattr(module, "rope_type", None)
        names = found.values() if isinstance(found, dict) else (found,)
        if any(isinstance(name, str) and kind in name for name in names):
            sizes += _original(getattr(module, "config", None))
            sizes.append(getattr(module, "original_max_seq_len", None) or sizes[-1])
    return min(sizes, default=None)


def _original(config: Any) -> list[int]:
    """What a config calls the length before scaling; 5 keeps it with the other parameters."""
    tables = [vars(config), getattr(config, "rope_parameters", None) or {}]
    tables += [each for each in tables[1].values() if isinstance(each, dict)]
    found = [table.get("original_max_position_embeddings") for table in tables]
    return [size for size in found if isinstance(size, int)]


def _before_first(table: Any) -> int:
    """Rows of a table of positions that stand before the first token's."""
    pad = table.padding_idx
    return max(0 if pad is None else pad + 1, getattr(table, "offset", 0))
