# SPDX-License-Identifier: Apache-2.0
"""A number at every token: the head of the last token, put on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headswap.convert.model import SequenceClassificationModel
from headswap.heads import native_family, run_head
from headswap.registry.errors import ConversionError, InputError, UnsupportedHeadError


def token_function(model: Any) -> Callable[[dict[str, Tensor]], Tensor]:
    """A function from a batch, padded behind the texts, to numbers `[batch, length, labels]`, fp32.

    Raises `UnsupportedHeadError` for a head that pools anything but one token's state at the end,
    or the mean of the tokens' numbers.
    """
    own = getattr(model, "_orig_mod", model)
    if isinstance(own, SequenceClassificationModel):
        spec = own.head_spec
    else:
        rows = native_family(own.config.model_type, type(own), "classify")
        spec = rows.spec(own.config, base=own.base_model_prefix)
    if spec.pooling not in ("last", "eos", "late"):
        raise UnsupportedHeadError(
            f"The head {spec.family!r} pools by {spec.pooling!r}, so a single token has no number; "
            "per-token rewards need a head on the last token.",
            head=spec.family,
        )

    def function(batch: dict[str, Tensor]) -> Tensor:
        ours = isinstance(own, SequenceClassificationModel)
        states = (own.rows(batch).output if ours else own.base_model(**batch))[0]
        if states.shape[:2] != batch["input_ids"].shape:
            raise UnsupportedHeadError(
                f"The backbone gives {states.shape[1]} states for "
                f"{batch['input_ids'].shape[1]} tokens, so they are not one to one.",
                head=spec.family,
            )
        numbers: Tensor = run_head(own, spec, states)
        return numbers

    return function


def token_logits(model: Any) -> Callable[[dict[str, Tensor]], Tensor]:
    """The same for a model that classifies tokens, whose own logits they are."""

    def function(batch: dict[str, Tensor]) -> Tensor:
        numbers: Tensor = model(**batch).logits
        return numbers

    return function


def mark_id(tokenizer: Any, mark: str | int) -> int:
    """The id of a step mark. Raises `ConversionError` for a word that is not one token."""
    if isinstance(mark, int):
        return mark
    known = tokenizer.convert_tokens_to_ids(mark) if isinstance(mark, str) else None
    if known is None or tokenizer.convert_ids_to_tokens(known) != mark:
        raise ConversionError(
            f"step_mark={mark!r} is no single token of the tokenizer; give one, or its id.",
            step_mark=mark,
        )
    return int(known)


def steps(ids: list[int], mark: int | None, row: int) -> Tensor:
    """The places of `mark` in `ids`, or all of them, int64; `InputError` where it never stands."""
    found = [place for place, each in enumerate(ids) if mark is None or each == mark]
    if not found:
        raise InputError(
            f"Conversation {row} has no step mark (token id {mark}) in it, so no step to rate.",
            rows=(row,),
        )
    return torch.tensor(found)
