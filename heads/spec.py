# SPDX-License-Identifier: Apache-2.0
"""Head specifications: what stands between a backbone's hidden states and the logits, as data.

A `HeadFamily` is a row of the head table: a pooling rule and ordered layers, some of whose
values are names of config fields. `HeadFamily.spec(config)` reads those fields and gives a
`HeadSpec`, which holds numbers and names only and can be executed (`heads.executor`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from headswap.registry import Task
from headswap.registry.errors import UnsupportedHeadError

Pooling = Literal["last", "first", "mean", "all"]
POOLINGS: tuple[Pooling, ...] = ("last", "first", "mean", "all")
BASE = "{base}"
"""Stands in a tensor path for the attribute that holds the backbone (`model`, `bert`, ...)."""

# The fields that transformers' encoders use for the dropout of a head, in its own order of
# preference; the later ones apply where an earlier one is absent or None.
HEAD_DROPOUT = ("classifier_dropout", "classifier_dropout_prob", "hidden_dropout_prob")


@dataclass(frozen=True, slots=True)
class Field:
    """A value which a config decides: the first of `names` that is there and not None."""

    names: tuple[str, ...]
    default: Any = None

    def read(self, config: Any) -> Any:
        """The value in `config`, else `default`."""
        found = (getattr(config, name, None) for name in self.names)
        return next((value for value in found if value is not None), self.default)


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer at `path` of the model; `out` is "labels", "hidden" or a width."""

    path: str
    out: str | int = "hidden"
    bias: bool = True


@dataclass(frozen=True, slots=True)
class Activation:
    """An elementwise function, by the name that transformers gives it (`ACT2FN`)."""

    name: str | Field


@dataclass(frozen=True, slots=True)
class Dropout:
    """Dropout with probability `rate`; acts in training only."""

    rate: float | Field


@dataclass(frozen=True, slots=True)
class Softcap:
    """`cap * tanh(x / cap)`: what Gemma 2 does to its token logits."""

    cap: float


@dataclass(frozen=True, slots=True)
class Difference:
    """Two columns become one: the second minus the first."""


Layer = Dense | Activation | Dropout | Softcap | Difference


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """One head, ready to run: pool rows out of `[batch, length, hidden]`, then apply `layers`.

    `compat` repeats the reference class's index rule (pad ids, or position 0) in place of the
    attention mask, for checkpoints that were trained with it.
    """

    family: str
    pooling: Pooling
    layers: tuple[Layer, ...] = ()
    compat: bool = False

    @property
    def dense(self) -> tuple[Dense, ...]:
        """The layers that hold tensors, in order."""
        return tuple(layer for layer in self.layers if isinstance(layer, Dense))

    @property
    def output(self) -> Dense:
        """The last linear layer, whose rows are the labels."""
        return self.dense[-1]

    def tensors(self) -> tuple[str, ...]:
        """Names of the head's tensors in the model's state dict, sorted."""
        return tuple(sorted(_tensors(self.dense)))


def _tensors(layers: Iterable[Dense]) -> Iterable[str]:
    for layer in layers:
        yield f"{layer.path}.weight"
        if layer.bias:
            yield f"{layer.path}.bias"


@dataclass(frozen=True, slots=True)
class HeadFamily:
    """A row of the head table.

    `model_types` are the transformers model types whose own class for `task` has this head.
    Downstream projects add rows with `headswap.register_head_family`.
    """

    name: str
    pooling: Pooling
    layers: tuple[Layer, ...]
    model_types: frozenset[str] = field(default_factory=frozenset)
    task: Task = "classify"

    def spec(self, config: Any, *, base: str | None = None) -> HeadSpec:
        """The head that this family has under `config`.

        With `base` (the attribute that holds the backbone), tensors which the family keeps in the
        backbone stay there; without it every tensor stands at the top of the model.
        """
        return HeadSpec(
            self.name,
            checked_pooling(self.pooling),
            tuple(_bind(x, config, base) for x in self.layers),
        )


def checked_pooling(pooling: str) -> Pooling:
    """`pooling` if it is a rule that exists, else `UnsupportedHeadError` with those that do."""
    for known in POOLINGS:
        if pooling == known:
            return known
    raise UnsupportedHeadError(
        f"Unknown pooling {pooling!r}; known: {', '.join((*POOLINGS, 'compat'))}.", pooling=pooling
    )


def _bind(layer: Layer, config: Any, base: str | None) -> Layer:
    if isinstance(layer, Dense):
        prefix = f"{base}." if base else ""
        return replace(layer, path=layer.path.replace(f"{BASE}.", prefix))
    if isinstance(layer, Activation) and isinstance(layer.name, Field):
        return Activation(layer.name.read(config))
    if isinstance(layer, Dropout) and isinstance(layer.rate, Field):
        return Dropout(float(layer.rate.read(config) or 0.0))
    return layer
