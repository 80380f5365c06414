# SPDX-License-Identifier: Apache-2.0
"""What an executor is given: rows of ids, looked at before any work, and which run together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from headswap.spyre.errors import NonFiniteError, ShapeError
from headswap.spyre.prepare import Prepared

TABLES = ("position_embeddings", "position_embedding", "embed_positions", "wpe")
"""How transformers' families call their tables of learned positions."""


def checked_rows(made: Prepared, ids: Any, segments: Any = None) -> tuple[Any, Any]:
    """Rows of ids, and their segments, as lists.

    Raises `ShapeError` naming the row for one that is empty, holds something else than whole
    numbers, or is longer than the model's table of positions.
    """
    rows = [_row(each, i) for i, each in enumerate(ids)]
    kinds = None if segments is None else [_row(each, i) for i, each in enumerate(segments)]
    if kinds is not None and [*map(len, kinds)] != [*map(len, rows)]:
        raise ShapeError("token_type_ids and ids differ in their lengths.", rows=())
    empty = tuple(i for i, row in enumerate(rows) if not row)
    if empty:
        raise ShapeError(f"Row {empty[0]} has no token.", rows=empty, value=0, limit=1)
    limit = positions_of(made)
    over = tuple(i for i, row in enumerate(rows) if limit is not None and len(row) > limit)
    if over:
        found = len(rows[over[0]])
        raise ShapeError(
            f"Row {over[0]} has {found} tokens; the model takes {limit}.",
            rows=over, value=found, limit=limit,
        )  # fmt: skip
    return rows, kinds


def _row(ids: Any, row: int) -> list[int]:
    values = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if not all(type(value) is int for value in values):
        raise ShapeError(f"Row {row} holds something else than whole numbers.", rows=(row,))
    return values


def distinct(rows: Any, kinds: Any) -> tuple[list[int], list[int]]:
    """Where each different row stands first, and which of those each row is: equal rows run
    once."""
    known: dict[Any, int] = {}
    first: list[int] = []
    index: list[int] = []
    for i, row in enumerate(rows):
        key = (tuple(row), None if kinds is None else tuple(kinds[i]))
        if key not in known:
            known[key] = len(first)
            first.append(i)
        index.append(known[key])
    return first, index


def refuse_non_finite(found: Tensor) -> None:
    """Raise `NonFiniteError` naming the rows of `found` that are not finite."""
    bad = (~found.isfinite().flatten(1).all(dim=1)).nonzero().flatten().tolist()
    if bad:
        raise NonFiniteError(
            f"Rows {bad} of {len(found)} gave numbers that are not finite; the other rows are good "
            "and stand in the error's .values. In low precision an overflow is likely: try a wider "
            "dtype.",
            rows=tuple(bad), values=found,
        )  # fmt: skip


def chosen(rows: Any, kinds: Any, index: Sequence[int]) -> tuple[Any, Any]:
    return [rows[i] for i in index], None if kinds is None else [kinds[i] for i in index]


def buckets(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Rows of one length together, as many as `tokens` allow: nothing is padded."""
    found: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        last = found[-1] if found else []
        if last and lengths[last[0]] == lengths[row] and (len(last) + 1) * lengths[row] <= tokens:
            last.append(row)
        else:
            found.append([row])
    return found


def positions_of(made: Prepared) -> int | None:
    """How many tokens the backbone's table of positions has room for; None without a table."""
    sizes = [
        int(module.num_embeddings) - _before_first(module)
        for name, module in made.backbone.named_modules()
        if isinstance(module, nn.Embedding)
        and name.rpartition(".")[2] in TABLES
        and not any(part in name for part in ("vision", "visual", "image", "audio"))
    ]
    return min(sizes, default=None)


def _before_first(table: Any) -> int:
    """Rows of a table of positions that stand before the first token's."""
    pad = table.padding_idx
    return max(0 if pad is None else pad + 1, getattr(table, "offset", 0))


def harmless_id(config: Any) -> int:
    """An id that no field of the config calls special (a stack may treat those in its own way)."""
    special = {v for k, v in vars(config).items() if k.endswith("_token_id") and type(v) is int}
    size = getattr(config.get_text_config(), "vocab_size", None) or 8
    return next((i for i in range(min(size, 64)) if i not in special), 0)
