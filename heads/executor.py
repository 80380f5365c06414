# SPDX-License-Identifier: Apache-2.0
"""The one function that runs every head of the table."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headswap.heads.spec import (
    Activation,
    Dense,
    Difference,
    Divide,
    Dropout,
    HeadSpec,
    Norm,
    Softcap,
)
from headswap.registry.errors import UnsupportedHeadError


def run_head(model: nn.Module, spec: HeadSpec, rows: Tensor) -> Tensor:
    """Logits `[..., labels]` (fp32) of pooled `rows` `[..., hidden]`, any float dtype.

    The head runs in fp32 whatever the backbone's dtype: two logits that differ by less than one
    bf16 step would otherwise become a tie.
    """
    x = rows.float()
    for layer in spec.layers:
        if isinstance(layer, Dense):
            x = x if layer.applied else _linear(_module(model, layer.path), x)
        elif isinstance(layer, Norm):
            x = _norm(_module(model, layer.path), x)
        elif isinstance(layer, Activation):
            x = _activation(str(layer.name))(x)
        elif isinstance(layer, Dropout):
            x = F.dropout(x, float(layer.rate), training=model.training)  # type: ignore[arg-type]
        elif isinstance(layer, Divide):
            x = x / float(layer.by)  # type: ignore[arg-type]
        elif isinstance(layer, Softcap):
            x = layer.cap * torch.tanh(x / layer.cap)
        elif isinstance(layer, Difference):
            x = x[..., 1:2] - x[..., 0:1]
        else:
            raise UnsupportedHeadError(f"Unknown head layer {layer!r} in family {spec.family!r}.")
    return x


def _module(model: nn.Module, path: str) -> nn.Module:
    """The layer at `path`; refuses PEFT's wrapper of a head of several layers in a batch of several
    adapters: the wrapper chooses each row's adapter when it is called, and we call what is inside.
    """
    *parents, _ = path.split(".")
    for depth in range(1, len(parents) + 1):
        wrapper = model.get_submodule(".".join(parents[:depth]))
        if "modules_to_save" in wrapper._modules and wrapper._forward_pre_hooks:
            raise UnsupportedHeadError(
                f"{'.'.join(parents[:depth])} has several layers, of which PEFT can't choose one "
                "for each row; run the rows of each adapter together, after set_adapter()."
            )
    return model.get_submodule(path)


def _linear(module: nn.Module, x: Tensor) -> Tensor:
    if type(module) is nn.Linear:
        bias = None if module.bias is None else module.bias.float()
        return F.linear(x, module.weight.float(), bias)
    # An adapter's wrapper (PEFT) or a quantised layer knows how to call itself.
    weight = next(module.parameters(), x)
    found: Tensor = module(x.to(weight.dtype) if weight.is_floating_point() else x)
    return found.float()


def _norm(module: nn.Module, x: Tensor) -> Tensor:
    if not isinstance(module, nn.LayerNorm):
        raise UnsupportedHeadError(f"A head's norm is a {type(module).__name__}, not a LayerNorm.")
    weight, bias = (None if p is None else p.float() for p in (module.weight, module.bias))
    return F.layer_norm(x, module.normalized_shape, weight, bias, module.eps)


def _activation(name: str) -> nn.Module:
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        raise UnsupportedHeadError(
            f"Unknown activation {name!r}; transformers has {sorted(ACT2FN)}."
        )
    found: nn.Module = ACT2FN[name]
    return found
