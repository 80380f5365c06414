# SPDX-License-Identifier: Apache-2.0
"""Weights padded with zeros to whole sticks, which leaves every number as it is.

The card's matrix products want sizes that are multiples of 64, and a rotation splits each head in
two halves of whole sticks (rules R4, R5, R9; hf-adapters pads in the same way).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from headswap.spyre.compiling import outer_layers
from headswap.spyre.errors import DeviceError
from headswap.spyre.head_norms import head_norms, widen_norm
from headswap.spyre.hook import Layer
from headswap.spyre.learning import numbers, probe_rows, same
from headswap.spyre.prepare import PassReport, Prepared

QKV = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"))
OUTPUTS = ("o_proj", "out_proj", "out_lin", "dense")
HEAD_DIM = ("head_dim", "attention_head_size")
WIDTH = ("all_head_size", "embed_dim")


def pad_to_sticks(made: Prepared, stick: int) -> None:
    """Pad what can be padded to multiples of `stick`, and check that no number changed.

    Raises `DeviceError` where one did.
    """
    rows = probe_rows(made.model.config)
    before = numbers(made.model, rows, made.pad)
    for padded in (pad_intermediate(made, stick), pad_heads(made, stick)):
        if padded is not None:
            made.reports.append(padded)
    if not same(numbers(made.model, rows, made.pad), before, made.dtype):
        raise DeviceError(
            f"Padding the weights of {type(made.model).__name__} to whole sticks changed its "
            "numbers; this is a defect of headswap. Pass pad_weights=False."
        )


def pad_intermediate(made: Prepared, stick: int) -> PassReport | None:
    """Widen each layer's feed-forward to whole sticks: rows of zeros in what makes the inner state,
    columns of zeros in what reads it, so that an activation's value there counts nothing."""
    config: Any = made.backbone.config
    size = next((getattr(config, name) for name in ("intermediate_size", "ffn_dim", "hidden_dim",
                 "n_inner") if isinstance(getattr(config, name, None), int)), 0)  # fmt: skip
    more = -size % stick
    if not more:
        return None
    count = 0
    for layer in outer_layers(made.backbone):
        linears = [m for m in layer.modules() if type(m) is nn.Linear]
        makers = [m for m in linears if m.out_features == size and m.in_features != size]
        readers = [m for m in linears if m.in_features == size and m.out_features != size]
        if not makers or not readers:
            continue
        for maker in makers:
            bias = None if maker.bias is None else nn.functional.pad(maker.bias, (0, more))
            _set(maker, nn.functional.pad(maker.weight, (0, 0, 0, more)), bias)
        for reader in readers:
            _set(reader, nn.functional.pad(reader.weight, (0, more)), reader.bias)
        count += 1
    if not count:
        return None
    return PassReport("intermediate", f"{size} to {size + more} in {count} layers")


def pad_heads(made: Prepared, stick: int) -> PassReport | None:
    """Widen each head to whole sticks; a head that is rotated to two, each half at its place.

    Done where queries, keys and values are linear layers of their own whose heads the module
    reshapes by an attribute, and a head is normalised by RMS or not at all; else the rules say what
    is left.
    """
    dims = {layer.head_dim for _, layer in made.layers}
    if not made.hooked or len(dims) != 1:
        return None
    turns = [m for name, m in made.backbone.named_modules()
             if name.rpartition(".")[2].startswith("rotary_emb")]  # fmt: skip
    kinds = set(getattr(made.backbone.config, "layer_types", None) or ())
    step = 2 * stick if turns else stick
    dim = dims.pop()
    more = -dim % step
    found = [_parts(made, module, dim) for module, _ in made.layers]
    if not more or not all(found) or not all(_turns_whole(turn, dim, kinds) for turn in turns):
        return None
    for parts in found:
        for linear in parts["qkv"]:
            bias = None if linear.bias is None else _widen(linear.bias, dim, more, bool(turns))
            _set(linear, _widen(linear.weight, dim, more, bool(turns)), bias)
        _set(parts["out"], _widen(parts["out"].weight.T, dim, more, bool(turns)).T.contiguous(),
             parts["out"].bias)  # fmt: skip
        for name, one in parts["norms"].items():
            widen_norm(getattr(parts["module"], name), one, dim, more,
                       partial(_widen, dim=dim, more=more, halves=bool(turns)))  # fmt: skip
        _tell(parts["module"], dim, more)
    for turn in turns:
        vars(turn)["forward"] = _turned(turn.forward, dim, more)
    made.layers = [(module, _wider(layer, more)) for module, layer in made.layers]
    return PassReport("heads", f"{dim} to {dim + more}")


def _wider(layer: Layer, more: int) -> Layer:
    heads, key, value = layer.cache
    return replace(layer, head_dim=layer.head_dim + more, cache=(heads, key + more, value + more))


def _parts(made: Prepared, module: nn.Module, dim: int) -> dict[str, Any]:
    """The layers of one attention; nothing where it is built in another way."""
    children = dict(module.named_children())
    names = next((qkv for qkv in QKV if all(n in children for n in qkv)), None)
    plain = {n: c for n, c in children.items() if type(c) is nn.Linear}
    told = any(getattr(module, name, None) == dim for name in HEAD_DIM)
    if names is None or not told or not hasattr(module, "scaling"):
        return {}
    norms = head_norms(module, dim)
    known = {*plain, *norms, "dropout", "rotary_emb"}
    if set(children) - known or not all(n in plain for n in names):
        return {}
    out = next((plain[n] for n in OUTPUTS if n in plain), None) or _behind(made, module)
    if out is None:
        return {}
    return {"module": module, "qkv": [plain[n] for n in names], "out": out, "norms": norms}


def _behind(made: Prepared, module: nn.Module) -> nn.Linear | None:
    """BERT's output layer, which stands beside the attention: `output.dense` of its parent."""
    for parent in made.backbone.modules():
        if any(child is module for child in parent.children()):
            dense = getattr(getattr(parent, "output", None), "dense", None)
            return dense if type(dense) is nn.Linear else None
    return None


def _widen(weight: Tensor, dim: int, more: int, halves: bool) -> Tensor:
    """Rows of `weight` `[heads x dim, ...]` with zeros behind each head, or behind each half."""
    parts = 2 if halves else 1
    blocks = weight.reshape(-1, dim // parts, *weight.shape[1:])
    zeros = blocks.new_zeros(len(blocks), more // parts, *weight.shape[1:])
    return torch.cat([blocks, zeros], dim=1).flatten(0, 1)


def _tell(module: nn.Module, dim: int, more: int) -> None:
    for name in HEAD_DIM:
        if getattr(module, name, None) == dim:
            setattr(module, name, dim + more)
    for name in WIDTH:
        width = getattr(module, name, None)
        if isinstance(width, int):
            setattr(module, name, width // dim * (dim + more))


def _turns_whole(turn: Any, dim: int, kinds: set[str]) -> bool:
    """Whether a rotary embedding gives tables for whole heads, as rotate-half reads them; Gemma 3's
    has tables for each of the `kinds` of layers."""
    for kind in kinds if "layer_type" in signature(turn.forward).parameters else {None}:
        more = {} if kind is None else {"layer_type": kind}
        try:
            cos, sin = turn(torch.zeros(1, 1, 1), torch.zeros(1, 1, dtype=torch.int64), **more)
        except (TypeError, ValueError, AttributeError):
            return False
        halves = torch.equal(cos[..., : dim // 2], cos[..., dim // 2 :])
        if not (cos.shape[-1] == sin.shape[-1] == dim and halves):
            return False
    return True


def _turned(forward: Any, dim: int, more: int) -> Any:
    """A rotary embedding whose tables are as wide as the padded heads; made on the host."""

    def run(*given: Any, **named: Any) -> Any:
        cos, sin = forward(*given, **named)
        half, zeros = dim // 2, cos.new_zeros(*cos.shape[:-1], more // 2)
        return tuple(
            torch.cat([t[..., :half], zeros, t[..., half:], zeros], dim=-1) for t in (cos, sin)
        )

    return run


def _set(linear: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.register_parameter(
        "bias", None if bias is None else nn.Parameter(bias, requires_grad=False)
    )
    linear.out_features, linear.in_features = weight.shape
