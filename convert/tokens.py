# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a batch are real, and where the reference class would see it otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headswap.convert.conversion import text_field
from headswap.heads import HeadSpec, check_mask, end_marks, pooled_index, real_by_rule
from headswap.registry.errors import InputError


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ids and mask as given (`[batch, length]` or None), and the positions taken for real."""

    ids: Tensor | None
    mask: Tensor | None
    real: Tensor


def real_tokens(
    spec: HeadSpec, config: Any, ids: Tensor | None, mask: Tensor | None, embeds: Tensor | None
) -> Tensor:
    """Which positions `[batch, length]` are real: by the mask, else by the reference's rule.

    Raises `InputError` for a mask that can't be honoured, and where neither tells.
    """
    given = [tensor for tensor in (ids, embeds) if tensor is not None]
    _check_shape(given[0], "input_ids" if embeds is None else "inputs_embeds", mask)
    shape, device = given[0].shape[:2], given[0].device
    if mask is not None and not torch.compiler.is_compiling():
        check_mask(mask, tuple(shape))
    if mask is not None and not (spec.compat and spec.reference_rule):
        return mask != 0
    if ids is None or spec.reference_rule in (None, "position"):
        return torch.ones(shape, dtype=torch.bool, device=device)
    pad = text_field(config, "pad_token_id")
    if pad is None and shape[0] > 1:
        raise InputError(
            f"{shape[0]} rows were given without attention_mask and the config has no "
            "pad_token_id, so the last real token is unknown. Pass attention_mask, or set "
            "model.config.pad_token_id.",
            rows=(),
        )
    return real_by_rule(ids, spec.reference_rule, pad)


def _check_shape(given: Tensor, name: str, mask: Any) -> None:
    wanted = 2 if name == "input_ids" else 3
    if given.dim() != wanted or 0 in given.shape:
        shape = "[batch, length]" if wanted == 2 else "[batch, length, hidden]"
        raise InputError(
            f"{name} has shape {list(given.shape)}; expected {shape} with a token at least.",
            rows=(),
        )
    if mask is not None and not isinstance(mask, Tensor):
        raise InputError(f"attention_mask is a {type(mask).__name__}; pass a tensor.", rows=())


def difference(spec: HeadSpec, config: Any, tokens: Tokens, index: Tensor) -> str | None:
    """What to say if the reference class would pool another token of the text than `index`
    `[batch]`; None where it agrees, or would pool a pad (nothing was trained on that)."""
    if spec.compat or tokens.ids is None or tokens.mask is None or spec.reference_rule is None:
        return None
    pad = text_field(config, "pad_token_id")
    taken = real_by_rule(tokens.ids, spec.reference_rule, pad)
    theirs = pooled_index(spec.pooling, taken, tokens.ids, end_marks(config))
    if theirs is None:
        return None
    other = (theirs != index) & tokens.real.gather(1, theirs.unsqueeze(1)).squeeze(1)
    for row in other.nonzero().flatten().tolist():
        return (
            f"Row {row}: by the attention mask, token {int(index[row])} is the one to pool; "
            f"transformers' own class would pool token {int(theirs[row])}, since it goes by the "
            f"pad id ({pad}). If the checkpoint was trained that way, use pooling='compat'. "
            "This is said once."
        )
    return None
