# SPDX-License-Identifier: Apache-2.0
"""Head specifications: what stands between a backbone's hidden states and the logits, as data.

A `HeadFamily` is a row of the head table: a pooling rule and ordered layers, some of whose
values are names of config fields. `HeadFamily.spec(config)` reads those fields and gives a
`HeadSpec`, which holds numbers and names only and can be executed (`heads.executor`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from headswap.registry import Task
from headswap.registry.errors import UnsupportedHeadError

Pooling = Literal["last", "first", "mean", "late", "eos", "next", "all", "pooler", "logits"]
POOLINGS: tuple[Pooling, ...] = ("last", "first", "mean", "late", "eos")
"""What can be asked for. "late" scores every token and takes the mean of the scores, "eos" pools
the last end mark. The others belong to one task or family: "all" keeps every token, "next" is the
position behind the last token (T5Gemma), "pooler" and "logits" are the backbone's own outputs."""
_INNER: tuple[Pooling, ...] = ("next", "all", "pooler", "logits")

PadRule = Literal["pad id", "position", "count"]
"""How a reference class finds the real tokens without looking at the mask: the ids that are not the
pad id; every position; or as many from the start as there are ids that are not the pad id."""

BASE = "{base}"
"""Stands in a tensor path for the attribute that holds the backbone (`model`, `bert`, ...)."""

# The fields that transformers' encoders use for the dropout of a head, in its own order of
# preference; the later ones apply where an earlier one is absent or None.
HEAD_DROPOUT = ("classifier_dropout", "classifier_dropout_prob", "hidden_dropout_prob")


@dataclass(frozen=True, slots=True)
class Field:
    """A value which a config decides: the first of `names` that is there and not None.

    `section` is the inner config that holds it ("text_config"); `words` translates what is stored
    (a value without a translation is an error).
    """

    names: tuple[str, ...]
    default: Any = None
    section: str | None = None
    words: Mapping[Any, Any] | None = field(default=None, hash=False)

    def read(self, config: Any) -> Any:
        """The value in `config`, else `default`."""
        if self.section is not None:
            config = getattr(config, self.section, config)
        found = (getattr(config, name, None) for name in self.names)
        value = next((value for value in found if value is not None), self.default)
        if self.words is None:
            return value
        if value not in self.words:
            raise UnsupportedHeadError(
                f"The config has {self.names[0]}={value!r}; headswap knows {list(self.words)}.",
                field=self.names[0],
            )
        return self.words[value]


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer at `path` of the model; `out` is "labels", "hidden" or a width.

    `applied` says that the backbone runs it by itself (its output is "logits" already). `stacked`
    are the names of several linear layers whose rows, one below the other, a checkpoint may store
    in place of this one: `("main_head", "aux_head")`.
    """

    path: str
    out: str | int | Field = "hidden"
    bias: bool | Field = True
    applied: bool = False
    stacked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Norm:
    """A layer normalisation at `path` of the model."""

    path: str
    eps: float | Field = 1e-5
    bias: bool | Field = True


@dataclass(frozen=True, slots=True)
class Activation:
    """An elementwise function, by the name that transformers gives it (`ACT2FN`)."""

    name: str | Field


@dataclass(frozen=True, slots=True)
class Dropout:
    """Dropout with probability `rate`; acts in training only."""

    rate: float | Field


@dataclass(frozen=True, slots=True)
class Divide:
    """`x / by`: what a few models do to their states before the output embedding."""

    by: float | Field


@dataclass(frozen=True, slots=True)
class Softcap:
    """`cap * tanh(x / cap)`: what Gemma 2 does to its token logits."""

    cap: float


@dataclass(frozen=True, slots=True)
class Difference:
    """Two columns become one: the second minus the first."""


@dataclass(frozen=True, slots=True)
class When:
    """`layers` where the config says `asked`, else nothing."""

    asked: Field
    layers: tuple[Layer, ...]


Layer = Dense | Norm | Activation | Dropout | Divide | Softcap | Difference | When


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """One head, ready to run: pool rows out of `[batch, length, hidden]`, then apply `layers`.

    `pad_rule` is how the reference class finds the real tokens. It decides where no attention mask
    is given; with `compat` it does also where one is, for checkpoints that were trained with it.
    """

    family: str
    pooling: Pooling
    layers: tuple[Layer, ...] = ()
    compat: bool = False
    pad_rule: PadRule = "pad id"

    @property
    def reference_rule(self) -> PadRule | None:
        """How the reference class finds the token that it pools; None where it uses the mask."""
        if self.pooling in ("first", "eos"):
            return "position"
        if self.pooling in ("last", "next"):
            return self.pad_rule
        return "position" if self.pad_rule == "position" and self.pooling == "mean" else None

    @property
    def dense(self) -> tuple[Dense, ...]:
        """The linear layers, in order."""
        return tuple(layer for layer in self.layers if isinstance(layer, Dense))

    @property
    def stored(self) -> tuple[Dense | Norm, ...]:
        """The layers that hold tensors, in order."""
        return tuple(layer for layer in self.layers if isinstance(layer, Dense | Norm))

    @property
    def output(self) -> Dense:
        """The last linear layer, whose rows are the labels."""
        return self.dense[-1]

    def tensors(self) -> tuple[str, ...]:
        """Names of the head's tensors in the model's state dict, sorted."""
        return tuple(sorted(_tensors(self.stored)))


def _tensors(layers: Iterable[Dense | Norm]) -> Iterator[str]:
    for layer in layers:
        yield f"{layer.path}.weight"
        if layer.bias:
            yield f"{layer.path}.bias"


@dataclass(frozen=True, slots=True)
class HeadFamily:
    """A row of the head table.

    `model_types` are the transformers model types whose own class for `task` has this head;
    "biogpt@4" is one that has it in transformers 4 only. `causal_types` are those without such a
    class whose causal class becomes a classifier with this head.
    Downstream projects add rows with `headswap.register_head_family`.
    """

    name: str
    pooling: Pooling | Field
    layers: tuple[Layer, ...]
    model_types: frozenset[str] = field(default_factory=frozenset)
    task: Task = "classify"
    pad_rule: PadRule = "pad id"
    causal_types: frozenset[str] = field(default_factory=frozenset)

    def spec(self, config: Any, *, base: str | None = None) -> HeadSpec:
        """The head that this family has under `config`.

        With `base` (the attribute that holds the backbone), tensors which the family keeps in the
        backbone stay there; without it every tensor stands at the top of the model.
        Raises `UnsupportedHeadError` for a config under which the family gives no labels.
        """
        pooling = self.pooling.read(config) if isinstance(self.pooling, Field) else self.pooling
        layers = tuple(_bound(self.layers, config, base))
        found = HeadSpec(
            self.name, checked_pooling(pooling, _INNER), layers, pad_rule=self.pad_rule
        )
        labelled = found.dense and found.output.out != "hidden"
        if not labelled and any(isinstance(layer, Dense) for layer in flat(self.layers)):
            raise UnsupportedHeadError(
                f"Under this config the head family {self.name!r} ends in no layer of labels.",
                head=self.name,
            )
        return found

    def paths(self, *, optional: bool = True) -> Iterator[str]:
        """Paths of the layers that the head runs and that hold tensors, with those that a config
        may switch off or without."""
        layers = flat(self.layers) if optional else self.layers
        stored = (layer for layer in layers if isinstance(layer, Dense | Norm))
        return (layer.path for layer in stored if not getattr(layer, "applied", False))


def flat(layers: Iterable[Layer]) -> Iterator[Layer]:
    """`layers` with the optional ones in their places."""
    for layer in layers:
        if isinstance(layer, When):
            yield from flat(layer.layers)
        else:
            yield layer


def checked_pooling(pooling: Any, more: tuple[Pooling, ...] = ()) -> Pooling:
    """`pooling` if it is a rule that exists, else `UnsupportedHeadError` with those that do."""
    for known in (*POOLINGS, *more):
        if pooling == known:
            return known
    raise UnsupportedHeadError(
        f"Unknown pooling {pooling!r}; known: {', '.join((*POOLINGS, 'compat'))}.", pooling=pooling
    )


def _bound(layers: Iterable[Layer], config: Any, base: str | None) -> Iterator[Layer]:
    prefix = f"{base}." if base else ""
    for layer in layers:
        if isinstance(layer, When):
            if layer.asked.read(config):
                yield from _bound(layer.layers, config, base)
            continue
        read = {f.name: value.read(config) for f in fields(layer)
                if isinstance(value := getattr(layer, f.name), Field)}  # fmt: skip
        if isinstance(layer, Dense | Norm):
            read["path"] = layer.path.replace(f"{BASE}.", prefix)
        yield replace(layer, **read)
