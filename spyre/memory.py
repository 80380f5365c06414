# SPDX-License-Identifier: Apache-2.0
"""What a plan takes of the card's memory, before anything is compiled (rule R30).

sendnn-inference looks at nothing before warm-up, which then crashes where graphs do not fit. Not
counted: compiled programs, whose size no document states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from headswap.spyre.compiling import outer_layers
from headswap.spyre.device import DeviceSpec
from headswap.spyre.findings import Finding, RuleReport
from headswap.spyre.prepare import Prepared
from headswap.spyre.shapes import Shape


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the card.

    weights      of the layers, each storage once; embeddings and heads stay on the host
    cache        of the paged keys and values
    activations  the most that one layer holds at once, in the largest shape
    limit        the card's
    """

    weights: int
    cache: int
    activations: int
    limit: int

    @property
    def total(self) -> int:
        """All three together."""
        return self.weights + self.cache + self.activations

    def described(self) -> dict[str, int]:
        """As plain values."""
        return {**asdict(self), "total": self.total}

    def report(self) -> RuleReport:
        """One warning where they are more than the card has."""
        if self.total <= self.limit:
            return RuleReport()
        return RuleReport([
            Finding(
                "R30", "warning",
                f"weights {self.weights:,} + cache {self.cache:,} + activations "
                f"{self.activations:,} = {self.total:,} bytes; the card has {self.limit:,}",
                "plan smaller shapes, give fewer blocks, or take a narrower dtype",
                node="plan",
            )
        ])  # fmt: skip


def memory(made: Prepared, spec: DeviceSpec, shapes: Iterable[Shape], cached: int = 0) -> Memory:
    """What `made` takes of a card for runs of `shapes` over a cache of `cached` tokens."""
    item = made.dtype.itemsize
    layers = outer_layers(made.backbone)
    own = {tensor.untyped_storage()._cdata: tensor for tensor in _tensors(layers)}
    token = sum(heads * (key + value) for heads, key, value in (e.cache for _, e in made.layers))
    return Memory(
        weights=sum(tensor.numel() * tensor.element_size() for tensor in own.values()),
        cache=cached * token * item,
        activations=max((_activations(made, layers, shape) for shape in shapes), default=0) * item,
        limit=spec.memory_bytes,
    )


def _tensors(layers: list[nn.Module]) -> Iterator[Tensor]:
    for layer in layers:
        yield from layer.parameters()
        yield from (tensor for tensor in layer.buffers() if tensor.is_floating_point())


def _activations(made: Prepared, layers: list[nn.Module], shape: Shape) -> int:
    """Elements that a layer holds at once, written out: the residual, the normed states and three
    projections or inner states beside them; and in attention the scores three times (product, with
    the mask, after the softmax) with the mask itself. Traced graphs hold half to two thirds of it;
    DeBERTa's hold more, which gathers scores by position (twice as much, measured)."""
    backbone: Any = made.backbone
    config = backbone.config.get_text_config()
    hidden = int(config.hidden_size)
    heads = int(getattr(config, "num_attention_heads", None) or -(-hidden // 64))
    wide = max((_width(p) for layer in layers for p in layer.parameters()), default=hidden)
    dim = max((layer.head_dim for _, layer in made.layers), default=-(-hidden // heads))
    scores = shape.volume * shape.length * (3 * heads + 1)
    attention = shape.volume * (2 * hidden + 3 * heads * dim) + scores
    return max(attention, shape.volume * (2 * hidden + 3 * wide))


def _width(weight: Tensor) -> int:
    """Numbers a token that a product with `weight` makes or reads; stacked experts all run."""
    stacked = weight.shape[0] if weight.dim() == 3 else 1
    return stacked * max(weight.shape[-2:], default=1)
