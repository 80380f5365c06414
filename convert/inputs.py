# SPDX-License-Identifier: Apache-2.0
"""What a backbone is fed: the inputs that it takes, in the order that it wants them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headswap.convert.conversion import text_field
from headswap.heads import take
from headswap.registry.errors import InputError

ALIGNED = frozenset({
    "input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids",
    "inputs",  # Perceiver's word for ids
    "bbox",  # LayoutLM and its kin: a box a token
    "xpath_tags_seq", "xpath_subs_seq",  # MarkupLM
    "input_shape_ids", "input_pronunciation_ids",  # RoCBert
    "task_type_ids",  # ERNIE
    "global_attention_mask",  # Longformer
    "langs",  # XLM
})  # fmt: skip
"""Inputs `[batch, length, ...]` that hold one entry a token, and so move along with the tokens."""


def accepted(backbone: nn.Module, inputs: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The given inputs, by the names that `backbone` knows.

    Raises `InputError` for one that it does not take, unless it says nothing (one segment, a mask
    without zeros).
    """
    known = inspect.signature(backbone.forward).parameters
    # forward(*args, **kwargs) hands everything on (decoder wrappers); **kwargs alone ignores.
    any_name = any(p.kind is p.VAR_POSITIONAL for p in known.values())
    given = {name: value for name, value in inputs.items() if value is not None}
    given.pop("use_cache", None)  # a classifier keeps none
    if "inputs" in known and "input_ids" not in known and "input_ids" in given:
        given["inputs"] = given.pop("input_ids")  # Perceiver
    for name in [n for n in given if n not in known]:
        value = given[name]
        if name == "token_type_ids" and not bool((value != 0).any()):
            del given[name]  # one segment is no segment
        elif name == "attention_mask" and not any_name and bool((value != 0).all()):
            del given[name]  # nothing is masked
        elif name in ("token_type_ids", "position_ids") or not any_name:
            raise InputError(
                f"{name} was given, but {type(backbone).__name__} takes none and its numbers would "
                f"not follow it; {_advice(name)}.",
                rows=(),
            )
    return given


def _advice(name: str) -> str:
    if name == "attention_mask":
        return "run rows of one length together, or leave it out: pads then count as text"
    return "leave it out"


def moved(inputs: Mapping[str, Tensor], order: Tensor) -> dict[str, Tensor]:
    """`inputs` with each row's tokens in the order of `order` `[batch, length]`.

    Raises `InputError` for an input that refers to positions in another way.
    """
    stuck = [name for name, value in inputs.items() if name not in ALIGNED and value.dim() > 1]
    if stuck:
        raise InputError(
            f"Rows are padded on the left, and {', '.join(stuck)} can't be moved along with the "
            "tokens; pad on the right.",
            rows=(),
        )
    return {n: _taken(n, value, order) if n in ALIGNED else value for n, value in inputs.items()}


def _taken(name: str, value: Tensor, order: Tensor) -> Tensor:
    if value.shape[:2] == (1, order.shape[1]):  # one row for all, as positions often are
        value = value.expand(order.shape[0], *value.shape[1:])
    if value.shape[:2] != order.shape:
        raise InputError(
            f"{name} has shape {list(value.shape)}; expected {list(order.shape)} at its start, "
            "since rows are padded on the left. Or pad on the right.",
            rows=(),
        )
    return take(value, order)


def moved_back(output: Any, back: Tensor) -> Any:
    """The backbone's `output` with the tokens of its states and attentions where the caller has
    them; what has not one entry a token stays."""
    for name in ("last_hidden_state", "hidden_states", "attentions", "decoder_hidden_states",
                 "decoder_attentions"):  # fmt: skip
        value = output.get(name) if isinstance(output, Mapping) else None
        if isinstance(value, Tensor):
            output[name] = _back(value, back)
        elif isinstance(value, tuple):
            output[name] = tuple(_back(v, back) if isinstance(v, Tensor) else v for v in value)
    return output


def _back(value: Tensor, back: Tensor) -> Tensor:
    if value.dim() == 3 and value.shape[:2] == back.shape:
        return take(value, back)
    if value.dim() == 4 and value.shape[2] == value.shape[3] == back.shape[1]:
        rows = back[:, None].expand(-1, value.shape[1], -1)
        value = value.gather(2, rows[..., None].expand(*value.shape))
        return value.gather(3, rows[:, :, None].expand(*value.shape))
    return value


def made(model: Any, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The inputs that a reference class makes by itself out of the ones `[batch, length]` that it
    is given, where the caller has not given them."""
    known = inspect.signature(model.backbone.forward).parameters
    ids = inputs.get("input_ids", inputs.get("inputs"))
    if "decoder_input_ids" in known and "decoder_input_ids" not in inputs:
        if ids is None and "decoder_inputs_embeds" not in inputs:
            raise InputError(
                f"{type(model.backbone).__name__} reads the text in its decoder too; pass "
                "input_ids, or decoder_input_ids beside inputs_embeds.",
                rows=(),
            )
        return {} if ids is None else _decoder_ids(model, ids)
    first = model.head_spec.pooling == "first" and model.head_spec.layers
    if first and "global_attention_mask" in known and "global_attention_mask" not in inputs:
        # Longformer's classifier lets the token that it pools attend to the whole text.
        like = inputs["inputs_embeds"][..., 0] if ids is None else ids
        attends = torch.zeros_like(like, dtype=torch.long)
        attends[:, 0] = 1
        return {"global_attention_mask": attends}
    return {}


def _decoder_ids(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """The ids, shifted to the right; nothing where the backbone shifts them (BART and its kin)."""
    # T5 and its kin have the first, T5Gemma 2 the second.
    for name in ("_shift_right", "prepare_decoder_input_ids_from_labels"):
        shift = getattr(model, name, None)
        if shift is not None:
            return {"decoder_input_ids": shift(ids)}
    return {}


def switches(model: Any, outputs: Mapping[str, bool | None]) -> dict[str, bool]:
    """The given flags, and no cache where the backbone of `model` could keep one.

    Gemma 3n and its kin share keys between layers, in 4.57 by way of the cache, and keep theirs.
    """
    known = inspect.signature(model.backbone.forward).parameters
    any_name = any(p.kind is p.VAR_KEYWORD for p in known.values())
    given = {name: value for name, value in outputs.items() if value is not None}
    if text_field(model.config, "num_kv_shared_layers"):
        return given
    return {**given, "use_cache": False} if "use_cache" in known or any_name else given


def position_offset(backbone: nn.Module) -> int:
    """First position id of a real token: 0, or padding_idx + 1 for RoBERTa-like encoders.

    RoBERTa's position table keeps rows 0 .. padding_idx for pads
    (transformers, `RobertaEmbeddings.create_position_ids_from_input_ids`).
    """
    table = getattr(getattr(backbone, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return 0 if padding is None else int(padding) + 1
