# SPDX-License-Identifier: Apache-2.0
"""The attention backends by name: a registry of their own, which downstream projects add to."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, Literal, NoReturn, Protocol, runtime_checkable

from torch import Tensor

from headswap.spyre.cache import PagedBatch, Pages
from headswap.spyre.errors import AttentionError
from headswap.spyre.packing import PackedBatch
from headswap.spyre.visibility import Feature, Scores, Visibility

Mode = Literal["padded", "paged", "packed"]


@runtime_checkable
class AttentionBackend(Protocol):
    """One way to compute attention, in some of three modes.

    `query` is `[batch, heads, queries, key_dim]`, `key` `[batch, kv_heads, keys, key_dim]` and
    `value` `[batch, kv_heads, keys, value_dim]`; every mode returns
    `[batch, queries, heads, value_dim]` in the query's dtype. Head h reads the keys of
    kv head h // (heads / kv_heads); nobody need expand them.
    """

    name: str
    modes: frozenset[Mode]
    features: frozenset[Feature]

    def padded(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores
    ) -> Tensor:
        """Rows of one length; `mask` is additive, `[1 or batch, 1 or heads, queries, keys]`."""

    def paged(
        self, query: Tensor, key: Tensor, value: Tensor, pages: Pages, batch: PagedBatch,
        visibility: Visibility, scores: Scores,
    ) -> Tensor:  # fmt: skip
        """A step over the cache: store the new keys and values, then attend to all."""

    def packed(
        self, query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch,
        visibility: Visibility, scores: Scores,
    ) -> Tensor:  # fmt: skip
        """Texts one behind the other in a single row, each seeing itself (and its prefix)."""


class Unable:
    """Refuses every mode; a backend that has some of them overrides those."""

    name: str

    def _refuse(self, mode: Mode) -> NoReturn:
        raise AttentionError(f"Attention backend {self.name!r} has no {mode} mode.", name=self.name)

    def padded(self, *given: Any) -> Tensor:
        """See `AttentionBackend`."""
        self._refuse("padded")

    def paged(self, *given: Any) -> Tensor:
        """See `AttentionBackend`."""
        self._refuse("paged")

    def packed(self, *given: Any) -> Tensor:
        """See `AttentionBackend`."""
        self._refuse("packed")


Factory = Callable[[], AttentionBackend]

SHIPPED = {
    "reference": "headswap.spyre.reference:Reference",
    "native": "headswap.spyre.native:Native",
    "sdpa": "headswap.spyre.sdpa:Sdpa",
    "packed": "headswap.spyre.packed:Packed",
    "operators": "headswap.spyre.operators:Operators",
}


class AttentionBackends:
    """Backends by name; made when first asked for."""

    def __init__(self, shipped: Iterable[tuple[str, str]] = ()) -> None:
        self._factories: dict[str, Factory | str] = dict(shipped)
        self._made: dict[str, AttentionBackend] = {}

    def register(
        self, name: str, factory: Factory | str | None = None, *, replace: bool = False
    ) -> Callable[[Factory], Factory] | Factory | str:
        """Add a backend under `name`: a class or function that makes one, or `"module:attr"`.

        Returns what it was given; without `factory` it is a decorator. Raises `AttentionError` for
        a name that is taken, unless `replace`.
        """
        if factory is None:
            return lambda made: self.register(name, made, replace=replace)  # type: ignore[return-value]
        if name in self._factories and not replace:
            raise AttentionError(
                f"An attention backend {name!r} is registered already "
                f"({self._factories[name]}); pass replace=True to put another in its place.",
                name=name,
            )
        self._factories[name] = factory
        self._made.pop(name, None)
        return factory

    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(sorted(self._factories))

    def get(self, name: str) -> AttentionBackend:
        """The backend `name`; `AttentionError` with near names for one that nobody registered."""
        if name not in self._factories:
            near = difflib.get_close_matches(name, self._factories, 3)
            raise AttentionError(
                f"No attention backend {name!r}"
                + (f"; did you mean {', '.join(near)}?" if near else "")
                + f" Registered: {', '.join(self.names())}.",
                name=name,
            )
        if name not in self._made:
            factory = self._factories[name]
            if isinstance(factory, str):
                module, _, attribute = factory.partition(":")
                factory = getattr(import_module(module), attribute)
            self._made[name] = factory()
        return self._made[name]


ATTENTION = AttentionBackends(SHIPPED.items())
"""The backends that an `Executor` chooses from."""


def refuse_unsupported(
    backend: AttentionBackend, mode: Mode, wanted: frozenset[Feature], what: str
) -> None:
    """Raise `AttentionError` at construction for what `backend` cannot do of `what`'s layers."""
    missing = sorted(wanted - backend.features)
    if mode not in backend.modes:
        raise AttentionError(
            f"Attention backend {backend.name!r} has no {mode} mode "
            f"(it has {', '.join(sorted(backend.modes))}).",
            name=backend.name,
        )
    if missing:
        able = [n for n in SHIPPED if wanted <= ATTENTION.get(n).features]
        raise AttentionError(
            f"{what} needs {', '.join(missing)}, which attention backend {backend.name!r} does not "
            f"support; it supports {', '.join(sorted(backend.features)) or 'none of the features'}."
            f" Able: {', '.join(able) or 'none'}.",
            name=backend.name,
            features=tuple(missing),
        )
