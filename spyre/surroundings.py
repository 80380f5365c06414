# SPDX-License-Identifier: Apache-2.0
"""What stays on the host around a backbone's layers, as found on this model.

Only layers are compiled, so embeddings, positions, masks, rotation tables and heads need no pass of
their own to be on the host; each check here says what it found there, and where a model differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from headswap.spyre.compiling import outer_layers
from headswap.spyre.prepare import PassReport, Prepared
from headswap.spyre.traced import dtype_name


def surroundings(made: Prepared) -> list[PassReport]:
    """One report a check, in the order in which a text passes."""
    checks = (_embeddings, _positions, _segments, _rotation, _head)
    names = ("embeddings", "positions", "segments", "rotation", "head")
    return [PassReport(name, check(made)) for name, check in zip(names, checks, strict=True)]


def _inside(made: Prepared) -> set[int]:
    """The modules in layers, by identity."""
    return {id(m) for layer in outer_layers(made.backbone) for m in layer.modules()}


def _listed(found: Iterable[tuple[str, Tensor]]) -> str:
    sizes = (f"{name} {' x '.join(map(str, t.shape))} {dtype_name(t.dtype)}" for name, t in found)
    return ", ".join(sizes)


def _embeddings(made: Prepared) -> str:
    inside, tables = _inside(made), list(_tables(made.backbone))
    if not tables:
        return "no plain tables"
    outer = _listed((name, table.weight) for name, table in tables if id(table) not in inside)
    inner = _listed((name, table.weight) for name, table in tables if id(table) in inside)
    return "; ".join(
        f"{where}: {found}" for where, found in (("on the host", outer), ("in layers", inner))
        if found
    )  # fmt: skip


def _tables(backbone: nn.Module) -> Iterator[tuple[str, nn.Embedding]]:
    for name, module in backbone.named_modules():
        if isinstance(module, nn.Embedding):
            yield name.rpartition(".")[2], module


def _positions(made: Prepared) -> str:
    limit = made.lengths.table
    known = "no table" if limit is None else f"a table for {limit} tokens"
    if not made.hooked:
        return f"by the backbone's own rule, {known}"
    if not made.offset:
        return f"from the host, from 0, {known}"
    return f"from the host, from {made.offset} (behind the pad id), pads not counted, {known}"


def _segments(made: Prepared) -> str:
    if not made.segments:
        return "none"
    kinds = made.backbone.config.type_vocab_size  # type: ignore[union-attr]
    who = "the host" if made.hooked else "the backbone"
    return f"{kinds} kind{'s' * (kinds != 1)}, as a caller gives them, else 0 by {who}"


def _rotation(made: Prepared) -> str:
    inside = _inside(made)
    turns = [
        (id(m) in inside, name, t)
        for name, m in made.backbone.named_modules()
        for key, t in m.named_buffers(recurse=False)
        if key.endswith("inv_freq") and "original" not in key
    ]
    if not turns:
        return "none"
    where = "in each layer" if any(within for within, _, _ in turns) else "on the host, once a run"
    _, name, first = turns[0]
    return (
        f"tables of {first.numel()} frequencies ({dtype_name(first.dtype)}) made {where}, "
        f"by {name.rpartition('.')[2]}{'' if len(turns) == 1 else f' and {len(turns) - 1} more'}"
    )


def _head(made: Prepared) -> str:
    own = {id(p) for p in made.backbone.parameters()}
    model: Any = made.model
    found = [(name, p) for name, p in model.named_parameters() if id(p) not in own]
    if made.head_spec is None:
        output = model.get_output_embeddings()
        if output is None:
            return "none"
        tied = "" if any(p is output.weight for _, p in found) else ", tied to the embeddings"
        return f"on the host: {_listed([('output', output.weight)])}{tied}"
    rows = f"rows pooled by {made.head_spec.pooling!r}" if made.pools else "every token"
    return f"on the host, in float32, on {rows}: {_listed(found) or 'no weights'}"
