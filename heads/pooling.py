# SPDX-License-Identifier: Apache-2.0
"""Which rows of the hidden states are pooled, and where a row's real tokens stand.

The attention mask decides. The pad id is searched only when there is no mask, or when a
checkpoint asks for the reference rule (`HeadSpec.compat`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headswap.heads.spec import PadRule, Pooling
from headswap.registry.errors import InputError


def check_mask(mask: Tensor, shape: tuple[int, ...] | None = None) -> None:
    """Refuse a mask `[batch, length]` that no pooling rule can honour.

    Raises `InputError` for another shape than the inputs' (`shape`), for values other than 0 and 1
    (an additive mask would be read the wrong way round), for a row without any real token, and for
    one with a hole (padding between two real tokens), naming the rows.
    """
    wanted = "[batch, length]" if shape is None else str(list(shape))
    if mask.dim() != 2 or (shape is not None and tuple(mask.shape) != tuple(shape)):
        raise InputError(
            f"attention_mask has shape {list(mask.shape)}; expected {wanted}.", rows=()
        )
    real = mask != 0
    _refuse((real & (mask != 1)).any(dim=1), "hold values other than 0 and 1 in attention_mask")
    _refuse(~real.any(dim=1), "have no real token (attention_mask is 0 everywhere)")
    span = last_index(real) - first_index(real) + 1
    _refuse(real.sum(dim=1) != span, "have padding between real tokens (1 0 1 in attention_mask)")


def _refuse(bad: Tensor, what: str) -> None:
    rows = tuple(int(row) for row in bad.nonzero().flatten())
    if rows:
        raise InputError(f"Rows {list(rows)} {what}; remove them or mend the mask.", rows=rows)


def end_marks(config: Any) -> tuple[int, ...]:
    """The ids of end marks that the text part of `config` names."""
    found = getattr(config.get_text_config(), "eos_token_id", None)
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)


def first_index(real: Tensor) -> Tensor:
    """Position of each row's first true entry, `[batch]` int64; 0 where there is none."""
    return real.to(torch.int32).argmax(dim=1)


def last_index(real: Tensor) -> Tensor:
    """Position of each row's last true entry, `[batch]` int64; 0 where there is none."""
    positions = torch.arange(real.shape[1], device=real.device)
    return (positions * real).argmax(dim=1)


def moved_left(mask: Tensor) -> Tensor | None:
    """Index `[batch, length]` that moves each row's real tokens to the front and its pads behind
    them; None where they stand there already. `index.argsort(1)` moves them back.
    """
    shift = first_index(mask != 0)
    if not bool(shift.any()):
        return None
    length = mask.shape[1]
    return (torch.arange(length, device=mask.device) + shift.unsqueeze(1)) % length


def take(tensor: Tensor, index: Tensor) -> Tensor:
    """`tensor` `[batch, length, ...]` with the positions of each row in the order of `index`."""
    rows = torch.arange(index.shape[0], device=tensor.device).unsqueeze(1)
    return tensor[rows, index.to(tensor.device)]


def real_by_rule(ids: Tensor, rule: PadRule, pad: int | None) -> Tensor:
    """Which positions `[batch, length]` of `ids` a reference class takes for real tokens."""
    if rule == "position" or pad is None:
        return torch.ones_like(ids, dtype=torch.bool)
    real = ids != pad
    if rule == "pad id":
        return real
    positions = torch.arange(ids.shape[1], device=ids.device)
    return positions < real.sum(dim=1, keepdim=True)


def pooled_index(
    pooling: Pooling, real: Tensor, ids: Tensor | None = None, eos: Sequence[int] = ()
) -> Tensor | None:
    """The pooled position of each row, `[batch]` int64, out of `real` `[batch, length]` (bool);
    None for a rule that pools no single position.

    Raises `InputError` where "eos" finds no end mark (one of `eos`) in a row.
    """
    if pooling == "first":
        return first_index(real)
    if pooling == "last":
        return last_index(real)
    if pooling == "next":
        return (last_index(real) + 1).clamp(max=real.shape[1] - 1)
    if pooling != "eos":
        return None
    if ids is None or not eos:
        what = "inputs_embeds have no end mark" if eos else "the config has no eos_token_id"
        raise InputError(f"Pooling 'eos' needs input_ids and an end mark, but {what}.", rows=())
    marks = real & torch.isin(ids, torch.tensor(tuple(eos), device=ids.device))
    if not torch.compiler.is_compiling():
        _refuse(~marks.any(dim=1), f"hold no end mark ({', '.join(map(str, eos))})")
    return last_index(marks)


def pool(hidden: Tensor, real: Tensor, pooling: Pooling, index: Tensor | None = None) -> Tensor:
    """Rows of `hidden` `[batch, length, hidden]`, pooled by `real` `[batch, length]` (bool).

    Returns `[batch, hidden]` (the row at `index`, or the mean over real tokens), or `hidden` itself
    for a rule that pools nothing. The mean runs in fp32, since an fp16 sum over a long row loses
    its last digits, and comes back in fp32.
    """
    if pooling == "mean":
        # Left out and not multiplied by zero: what stands on a pad may be inf or NaN.
        kept = hidden.float().masked_fill(~real.unsqueeze(-1), 0.0)
        return kept.sum(dim=1) / real.sum(dim=1, keepdim=True).clamp(min=1)
    index = pooled_index(pooling, real) if index is None else index
    if index is None:
        return hidden
    rows = torch.arange(hidden.shape[0], device=hidden.device) * hidden.shape[1]
    # Two indices at once are an operator that a card's compiler lacks.
    return hidden.flatten(0, 1).index_select(0, rows + index.to(hidden.device))
