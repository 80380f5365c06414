# SPDX-License-Identifier: Apache-2.0
"""Linear layers in oneDNN's layout: alone, with the activation behind them, or several on the same
states as one product.

torch's own linear lays a weight out again in each call, or hands fp32 to a library that leaves half
of some CPUs idle (measured on AMD: 2.2 times slower). The arithmetic stays the dtype's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LAID_OUT_FOR = 256
"""Tokens that the layout is chosen for; other counts run as well."""
FEW = 2
"""Tokens up to which a plain weight may be faster: a product is then one pass over the weight."""

Activation = tuple[str, str]  # oneDNN's name and its algorithm
NONE: Activation = ("none", "")
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    ("gelu", "none"): functional.gelu,
    ("gelu", "tanh"): partial(functional.gelu, approximate="tanh"),
    ("swish", ""): functional.silu,
    ("relu", ""): functional.relu,
}
"""What oneDNN does to a product before it is written, and torch's own."""


class LaidLinear(nn.Module):
    """An `nn.Linear` whose weight lies in another layout. `weight` is empty: some classes ask for
    its dtype, and one that reads more fails.

    plain  the weight as it was, where it is faster for `FEW` tokens
    """

    def __init__(self, linear: nn.Linear, activation: Activation = NONE) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.weight = linear.weight.new_empty(0)
        self.activation = activation
        self.plain: Tensor | None = None

    def forward(self, states: Tensor) -> Tensor:
        """`[..., in_features]` -> `[..., out_features]`."""
        if self.plain is None or states.numel() > FEW * self.in_features:
            return self.laid(states)
        found = functional.linear(states, self.plain, self.bias)
        return found if self.activation == NONE else ACTIVATIONS[self.activation](found)

    def laid(self, states: Tensor) -> Tensor:
        """`forward` in oneDNN's layout."""
        raise NotImplementedError


class PackedLinear(LaidLinear):
    """A layer by itself, with the activation behind it."""

    def __init__(self, linear: nn.Linear, activation: Activation = NONE) -> None:
        super().__init__(linear, activation)
        self.packed = packed(linear.weight)

    def laid(self, states: Tensor) -> Tensor:
        return product(states, self.packed, self.bias, self.activation)


class Int8Linear(LaidLinear):
    """A layer whose products are of int8: weights rounded once, one scale an output (symmetric),
    and states in each call, one scale a token, so that no token's numbers depend on another's. Sums
    are exact; a bias is added in fp32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach().float()
        self.scales = _scales(weight).flatten()
        rounded = (weight / self.scales[:, None]).round_().to(torch.int8)
        self.zeros = torch.zeros(self.out_features, dtype=torch.int32)
        given = [LAID_OUT_FOR, self.in_features]
        self.packed = torch.ops.onednn.qlinear_prepack(rounded, given)

    def laid(self, states: Tensor) -> Tensor:
        flat = states.reshape(-1, self.in_features).float()
        scales = _scales(flat)
        # unsigned around 128: oneDNN has no fast product of two signed ones
        rounded = (flat / scales).round_().add_(128).to(torch.uint8)
        found = torch.ops.onednn.qlinear_pointwise(
            rounded, 1.0, 128, self.packed, self.scales, self.zeros, None, 1.0, 0, torch.float32,
            "none", [], "",
        ).mul_(scales)  # fmt: skip
        if self.bias is not None:
            found += self.bias
        result: Tensor = found.to(states.dtype).reshape(*states.shape[:-1], self.out_features)
        return result


def _scales(rows: Tensor) -> Tensor:
    """By how much each row `[rows, width]` is to be divided to lie between -127 and 127."""
    return rows.abs().amax(dim=-1, keepdim=True).clamp_min_(1e-30).div_(127)


class Joint:
    """The product of `layers` that are called on the same states, one after the other."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.count = len(layers)
        self._packed = packed(torch.cat([layer.weight.detach() for layer in layers]))
        self._bias = None
        if any(layer.bias is not None for layer in layers):
            self._bias = torch.cat([
                layer.weight.new_zeros(layer.out_features) if layer.bias is None
                else layer.bias.detach() for layer in layers
            ])  # fmt: skip
        self._states: Tensor | None = None
        self._found: Tensor | None = None
        self._taken = 0

    def of(self, states: Tensor, start: int, end: int) -> Tensor:
        """Columns `start` to `end`; computed when the first layer asks, forgotten with the last."""
        if self._states is not states or self._found is None:
            self._states, self._taken = states, 0
            self._found = product(states, self._packed, self._bias, NONE)
        found = self._found[..., start:end]
        self._taken += 1
        if self._taken == self.count:
            self._states = self._found = None
        return found


class JointLinear(LaidLinear):
    """A layer whose product is columns `start` and on of a `joint` one."""

    def __init__(self, linear: nn.Linear, joint: Joint, start: int) -> None:
        super().__init__(linear)
        self._joint, self._start = joint, start

    def laid(self, states: Tensor) -> Tensor:
        return self._joint.of(states, self._start, self._start + self.out_features)


def joined(layers: Sequence[nn.Linear]) -> list[JointLinear]:
    """`layers` that are called on the same states, as parts of one product."""
    joint, start, found = Joint(layers), 0, []
    for layer in layers:
        found.append(JointLinear(layer, joint, start))
        start += layer.out_features
    return found


def packed(weight: Tensor) -> Tensor:
    """`weight` in oneDNN's layout."""
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), LAID_OUT_FOR)
    return found


def product(states: Tensor, weight: Tensor, bias: Tensor | None, then: Activation) -> Tensor:
    """`states` `[..., in_features]` times a packed weight, plus bias, activated."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, then[0], [], then[1])
    return found


def usable() -> bool:
    """Whether this torch has oneDNN's layouts."""
    onednn: Any = torch.backends.mkldnn
    return bool(onednn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")
