# SPDX-License-Identifier: Apache-2.0
"""The registry: names, and what serves them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from headswap.registry import changes
from headswap.registry.entry import AdapterEntry, Task, load_target
from headswap.registry.errors import HeadswapError
from headswap.registry.missing import retired, unknown
from headswap.registry.plugins import load_each, warn_of
from headswap.registry.resolution import Resolution, Resolver
from headswap.registry.rules import SuffixRule, WeightRule
from headswap.registry.state import Retired, State
from headswap.registry.suggest import near
from headswap.registry.tables import Tables

Found = TypeVar("Found")


class AdapterRegistry:
    """Architectures, aliases, suffix rules, head families and weight rules.

    What is registered stands in one frozen state that is replaced as a whole, so readers need no
    lock and a failed registration changes nothing. `entry_point_group` names the entry points to
    read on the first miss; `tables` gives transformers' own names.
    """

    def __init__(
        self,
        *,
        entry_point_group: str | None = None,
        tables: Callable[[], Tables] | None = None,
        state: State | None = None,
    ) -> None:
        self._lock = threading.RLock()
        self._group = entry_point_group
        self._read_tables = tables or Tables
        self._state = state or State()
        self._plugins_read = entry_point_group is None
        self._plugins_loading = False
        self.broken_plugins: tuple[str, ...] = ()

    def register(
        self,
        architecture: str,
        target: Any = None,
        *,
        task: Task | None = None,
        model_type: str | None = None,
        head: str | None = None,
        owner: str | None = None,
        install_hint: str | None = None,
        replace: bool = False,
    ) -> Any:
        """Register `target` (a class, or "package.module:Class") under a name; returns `target`.

        Without `target` it is a decorator. `task` defaults to what the name's suffix says. Raises
        `DuplicateArchitectureError` for a name that is taken (by transformers too), unless
        `replace` is true; a replacement takes effect at once.
        """

        def store(cls: Any) -> Any:
            entry = AdapterEntry(architecture, cls, task, model_type, head,
                                 owner or changes.owner_of(cls), install_hint)  # fmt: skip
            self.register_many([entry], replace=replace)
            return cls

        return store if target is None else store(target)

    def register_many(
        self, entries: Mapping[str, Any] | Iterable[AdapterEntry], *, replace: bool = False
    ) -> None:
        """Register several entries (or a name -> target mapping): all of them, or none.

        A clash raises `DuplicateArchitectureError` that lists every clash with both owners.
        """
        made = changes.as_entries(entries)
        tables = self._read_tables()
        self._change(lambda state: changes.add_entries(state, made, tables, replace))

    def register_alias(self, old: str, new: str, *, replace: bool = False) -> None:
        """Let the name `old` stand for `new`; its use gives a DeprecationWarning."""
        tables = self._read_tables()
        self._change(lambda state: changes.add_alias(state, old, new, tables, replace))

    def register_suffix_rule(
        self,
        suffix: str,
        *,
        task: Task | None,
        sources: Iterable[str],
        owner: str = "user",
        replace: bool = False,
    ) -> SuffixRule:
        """Let names that end in `suffix` ask for `task`, served by the same stem with one of the
        suffixes in `sources`. Downstream rules go before the built-in ones."""
        rule = SuffixRule(suffix, task, tuple(sources), owner)
        self._change(lambda state: changes.add_rule(state, rule, replace))
        return rule

    def register_head_family(
        self, name: str, target: Any = None, *, owner: str | None = None, replace: bool = False
    ) -> Any:
        """Register a head family (`headswap.HeadFamily`, or "package.module:attribute"), as a call
        or a decorator; returns `target`."""

        def store(found: Any) -> Any:
            who = owner or changes.owner_of(found)
            self._change(lambda state: changes.add_head(state, name, found, who, replace))
            return found

        return store if target is None else store(target)

    def register_weight_rule(
        self, architecture: str, pattern: str, replacement: str, *, owner: str = "user"
    ) -> WeightRule:
        """Read stored tensor names of `architecture` that match `pattern` as `replacement`."""
        rule = WeightRule(architecture, pattern, replacement, owner)
        self._change(lambda state: changes.add_weight_rule(state, rule))
        return rule

    def retire(
        self,
        architecture: str,
        *,
        removed_in: str | None = None,
        renamed_to: str | None = None,
        install_hint: str | None = None,
    ) -> None:
        """Say why a name is gone: `removed_in` a release, or `renamed_to` another name."""
        gone = Retired(removed_in, renamed_to, install_hint)
        self._change(lambda state: replace(state, retired={**state.retired, architecture: gone}))

    def _change(self, make: Callable[[State], State]) -> None:
        with self._lock:
            self._state = make(self._state)

    def get(self, architecture: str) -> AdapterEntry:
        """The entry of exactly that name, or of what it is an alias for.

        Raises `UnknownArchitectureError` with near misses, `RemovedArchitectureError` or
        `RenamedArchitectureError`.
        """

        def find(resolver: Resolver) -> AdapterEntry | None:
            return resolver.entry(architecture) or resolver.entry(self._alias(architecture))

        return self._found(architecture, find)

    def resolve(
        self, architecture: str, task: Task | None = None, *, model_type: str | None = None
    ) -> Resolution:
        """Which entry serves `architecture` for `task` (by default what the name itself asks for).

        In this order: a registered name, an alias, a suffix rule over registered names,
        transformers' own name, its tables by model type, a suffix rule over its names. Raises
        the errors of `get`, and `TaskError` for a name that cannot do the task.
        """

        def find(resolver: Resolver) -> Resolution | None:
            alias = self._alias(architecture)
            if alias != architecture and resolver.entry(architecture) is None:
                aimed = resolver.resolve(alias, task, model_type)
                return aimed and replace(aimed, requested=architecture, rule="alias",
                                         reason=f"an alias of {alias}")  # fmt: skip
            return resolver.resolve(architecture, task, model_type)

        return self._found(architecture, find)

    def _alias(self, name: str) -> str:
        new = self._state.aliases.get(name)
        if new is None:
            return name
        warnings.warn(f"{name} is an old name of {new}; use {new}.", DeprecationWarning, 5)
        return new

    def _found(self, name: str, find: Callable[[Resolver], Found | None]) -> Found:
        seen = self._state
        found = find(self._resolver())
        if found is None and self._read_plugins(seen):
            found = find(self._resolver())
        if found is None:
            raise self._missing(name)
        return found

    def _resolver(self) -> Resolver:
        return Resolver(self._state, self._read_tables())

    def _missing(self, name: str) -> HeadswapError:
        gone = self._state.retired.get(name)
        if gone is not None:
            return retired(name, gone)
        return unknown(name, self.suggest(name), len(self.names()), self.broken_plugins)

    def suggest(self, name: str) -> tuple[str, ...]:
        """At most three names like `name`: known ones, and those that a rule would serve."""
        served = changes.served_names(self.names(), self._state.rules)
        return near(name, [*self.names(), *served])

    def names(self, task: Task | None = None) -> tuple[str, ...]:
        """All known names (registered and transformers'), or those of one task, sorted."""
        own = {e.architecture for e in self._state.entries.values() if task in (None, e.task)}
        return tuple(sorted(own | set(self._read_tables().architectures(task))))

    def by_model_type(self, model_type: str) -> tuple[str, ...]:
        """Names that serve a model type: the causal one, the classifier, the base class."""
        own = [e.architecture for e in self._state.entries.values() if e.model_type == model_type]
        tables = self._read_tables()
        tasks: tuple[Task, ...] = ("generate", "classify", "embed")
        listed = [tables.by_model_type(model_type, task) for task in tasks]
        return tuple(dict.fromkeys([*own, *(name for name in listed if name)]))

    def is_causal(self, model_type: str) -> bool:
        """Whether a model type is a causal language model and not an encoder."""
        own = [e.task for e in self._state.entries.values() if e.model_type == model_type]
        return "generate" in own or self._read_tables().is_causal(model_type)

    def owner(self, architecture: str) -> str:
        """Who registered the name."""
        return self.get(architecture).owner

    @property
    def rules(self) -> tuple[SuffixRule, ...]:
        """The suffix rules, in order."""
        return self._state.rules

    def head_family(self, name: str) -> Any:
        """The registered head family of that name, imported if need be; None if there is none."""
        if name not in self._state.heads:
            self._read_plugins(self._state)
        head = self._state.heads.get(name)
        if head is None or not isinstance(head.target, str):
            return head and head.target
        return load_target(head.target, name)

    def head_families(self) -> tuple[str, ...]:
        """Names of the registered head families, sorted."""
        return tuple(sorted(self._state.heads))

    def weight_rules(self, architecture: str) -> tuple[WeightRule, ...]:
        """The renamings registered for an architecture, in order."""
        return tuple(r for r in self._state.weight_rules if r.architecture == architecture)

    def copy(self) -> AdapterRegistry:
        """A registry of its own with the same contents, which reads no plugins."""
        return AdapterRegistry(tables=self._read_tables, state=self._state)

    @contextmanager
    def override(self, entries: Mapping[str, Any] | Iterable[AdapterEntry]) -> Iterator[None]:
        """Replace entries for a while; only these are put back, not what others registered."""
        made = changes.as_entries(entries)
        with self._lock:
            before = self._state.entries
            self.register_many(made, replace=True)
            ours = self._state.entries
        try:
            yield
        finally:
            self._change(lambda state: changes.put_back(state, made, before, ours))

    def _read_plugins(self, seen: State) -> bool:
        """Read the entry points if nobody has; says whether the state is another than `seen`."""
        if not self._plugins_read:
            with self._lock:  # whoever misses a name meanwhile waits here for the plugins
                broken = self._load_plugins()
            warn_of(broken)
        return self._state is not seen

    def _load_plugins(self) -> tuple[str, ...]:
        # A plugin may resolve names while it loads; that must not start over.
        if self._plugins_read or self._plugins_loading:
            return ()
        self._plugins_loading = True
        try:
            self.broken_plugins = load_each(str(self._group), self._take_plugin)
            self._plugins_read = True
        finally:
            self._plugins_loading = False
        return self.broken_plugins

    def _take_plugin(self, load: Callable[[], Any], owner: str) -> None:
        before = self._state
        try:
            plugin = load()
            if callable(plugin) and not isinstance(plugin, type):
                base, staged = self._state, self.copy()
                plugin(staged)
                self._state = changes.merged(self._state, base, staged._state, owner)
        except BaseException:
            self._state = before  # the lock is held, so nothing else has changed it
            raise
