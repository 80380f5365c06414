# SPDX-License-Identifier: Apache-2.0
"""What an executor is given: rows of ids, looked at before any work, and which run together."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from headswap.registry.errors import InputError
from headswap.spyre.errors import DeviceError, NonFiniteError, ShapeError
from headswap.spyre.prepare import Prepared
from headswap.spyre.shapes import LENGTH_STEP

Key = tuple[bytes, bytes | None]
"""A row's ids and segments, 8 bytes each."""


def checked_rows(made: Prepared, ids: Any, segments: Any = None, new: int = 0) -> tuple[Any, Any]:
    """Rows of ids, and their segments, as lists.

    Raises `ShapeError` naming the row for one that is empty, holds something else than whole
    numbers, or is longer, with `new` tokens, than the model's table of positions.
    """
    if made.weights is not None:
        made.weights.refuse_change()
    rows = [_row(each, i) for i, each in enumerate(ids)]
    kinds = None if segments is None else [_row(each, i) for i, each in enumerate(segments)]
    if kinds is not None and [*map(len, kinds)] != [*map(len, rows)]:
        raise ShapeError("token_type_ids and ids differ in their lengths.", rows=())
    _refuse_unknown("id", rows, _known(made))
    if kinds is not None:
        if "token_type_ids" not in made.inputs:
            raise InputError(
                f"token_type_ids was given, but {type(made.backbone).__name__} takes none."
            )
        size = getattr(made.backbone.config, "type_vocab_size", None) if made.segments else None
        _refuse_unknown("token_type_id", kinds, size or _known(made))
    empty = tuple(i for i, row in enumerate(rows) if not row)
    if empty:
        raise ShapeError(f"Row {empty[0]} has no token.", rows=empty, value=0, limit=1)
    limit = made.lengths.table
    over = tuple(i for i, row in enumerate(rows) if limit is not None and len(row) + new > limit)
    if over:
        found = len(rows[over[0]]) + new
        raise ShapeError(
            f"Row {over[0]} has {found} tokens{' with the new ones' * bool(new)}; the model takes "
            f"{limit}.",
            rows=over, value=found, limit=limit,
        )  # fmt: skip
    most = made.lengths.dynamic
    over = tuple(i for i, row in enumerate(rows) if most is not None and len(row) + new > most)
    if over:
        found = len(rows[over[0]]) + new
        raise ShapeError(
            f"Row {over[0]} has {found} tokens{' with the new ones' * bool(new)}. Dynamic RoPE "
            f"changes every number beyond {most} tokens by the longest text that ran before, so no "
            "row has numbers of its own there. Cut it, or set another rope_type.",
            rows=over, value=found, limit=most,
        )  # fmt: skip
    return rows, kinds


def _row(ids: Any, row: int) -> list[int]:
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if not isinstance(ids, Sequence):
        raise ShapeError(
            f"Row {row} is {ids!r} and no row of ids. Give a list of rows, also for a single one: "
            "[[5, 6, 7]].", rows=(row,),
        )  # fmt: skip
    values = list(ids)
    if not all(type(value) is int for value in values):
        raise ShapeError(f"Row {row} holds something else than whole numbers.", rows=(row,))
    return values


def _refuse_unknown(what: str, rows: list[list[int]], size: int | None) -> None:
    """Raise `ShapeError` naming the row with an id that a table of `size` has no vector for."""
    for row, values in enumerate(rows):
        if size is None or not values or (min(values) >= 0 and max(values) < size):
            continue
        bad = min(values) if min(values) < 0 else max(values)
        raise ShapeError(
            f"Row {row} holds the {what} {bad}; the model knows 0 to {size - 1}.",
            rows=(row,), value=bad, limit=size,
        )  # fmt: skip


def _known(made: Prepared) -> int | None:
    """Ids that the backbone's embedding has vectors for, where that is a plain table."""
    try:
        table = made.backbone.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):  # CANINE hashes any number
        return None
    return table.num_embeddings if type(table) is nn.Embedding else None


def distinct(rows: Any, kinds: Any) -> tuple[list[Key], list[int], list[int]]:
    """The different rows as keys, where each stands first, and which of those each row is: equal
    rows run once."""
    known: dict[Key, int] = {}
    first: list[int] = []
    index: list[int] = []
    for i, row in enumerate(rows):
        key = (_bytes(row), None if kinds is None else _bytes(kinds[i]))
        if key not in known:
            known[key] = len(first)
            first.append(i)
        index.append(known[key])
    return list(known), first, index


def _bytes(row: list[int]) -> bytes:
    return array("q", row).tobytes()


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


def most_together(made: Prepared, tokens: int) -> int:
    """`tokens` of a pack, or fewer: a row that RoPE turns by its length runs alone."""
    return min(tokens, made.lengths.longrope or tokens)


def refuse_plan(made: Prepared, longest: int) -> None:
    """Raise `DeviceError` for a model that cannot run in rectangles of `longest` tokens."""
    name, table = type(made.model).__name__, made.lengths.table
    if not made.padded:
        raise DeviceError(
            f"{name} gives other numbers for a text with pads behind it, "
            "so it cannot run in rectangles. backend='eager' without shapes= runs texts of "
            "one length together."
        )
    if not made.hooked and table is not None and longest > table:
        raise DeviceError(
            f"A shape of {longest} tokens is planned, and {name} has positions for {table}, which "
            "pads take too. Plan shorter shapes.", value=longest, limit=table,
        )  # fmt: skip
    if made.head_spec is None and longest <= LENGTH_STEP:
        raise DeviceError(
            f"Shapes up to {longest} tokens are planned, and {name} would generate: a prompt "
            f"counts in whole steps of {LENGTH_STEP}, and new tokens come on top. Plan a longer "
            "shape.",
            value=longest, limit=LENGTH_STEP,
        )  # fmt: skip
    most = made.lengths.alike
    if most is not None and longest > most:
        raise DeviceError(
            f"A shape of {longest} tokens is planned. Beyond {most} tokens {name}'s RoPE turns all "
            "rows of a run by the longest one. Plan shorter shapes, or none on backend='eager'.",
            value=longest, limit=most,
        )  # fmt: skip


def plain_ids(config: Any) -> list[int]:
    """Small ids that no field of the config calls special; one at least."""
    text = config.get_text_config()
    special = {v for k, v in vars(text).items() if k.endswith("_token_id") and type(v) is int}
    size = getattr(text, "vocab_size", None) or 8
    return [i for i in range(min(size, 256)) if i not in special] or [0]
