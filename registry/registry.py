# SPDX-License-Identifier: Apache-2.0
"""The registry: names, and what serves them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any, TypeVar

from headswap.registry import changes
from headswap.registry.entry import AdapterEntry, Task, load_target
from headswap.registry.errors import HeadswapError, RegistrationError
from headswap.registry.missing import retired, unknown
from headswap.registry.plugins import Plugins
from headswap.registry.resolution import Resolution, Resolver, check_task
from headswap.registry.rules import SuffixRule, WeightRule
from headswap.registry.state import Retired, State
from headswap.registry.store import Store
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
        self._store, self._overrides = Store(state or State()), list[changes.Override]()
        self._plugins = Plugins(entry_point_group)
        self._read_tables = tables or Tables

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
        self._store.change(lambda state: changes.add_entries(state, made, tables, replace))

    def register_alias(self, old: str, new: str, *, replace: bool = False) -> None:
        """Let the name `old` stand for `new`; its use gives a DeprecationWarning."""
        tables = self._read_tables()
        self._store.change(lambda state: changes.add_alias(state, old, new, tables, replace))

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
        self._store.change(lambda state: changes.add_rule(state, rule, replace))
        return rule

    def register_head_family(
        self, name: str, target: Any = None, *, owner: str | None = None, replace: bool = False
    ) -> Any:
        """Register a head family (`headswap.HeadFamily`, or "package.module:attribute"), as a call
        or a decorator; returns `target`."""

        def store(found: Any) -> Any:
            who = owner or changes.owner_of(found)
            self._store.change(lambda state: changes.add_head(state, name, found, who, replace))
            return found

        return store if target is None else store(target)

    def register_weight_rule(
        self, architecture: str, pattern: str, replacement: str, *, owner: str = "user"
    ) -> WeightRule:
        """Read stored tensor names of `architecture` that match `pattern` as `replacement`."""
        rule = WeightRule(architecture, pattern, replacement, owner)
        self._store.change(lambda state: changes.add_weight_rule(state, rule))
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
        self._store.change(lambda state: changes.retire(state, architecture, gone))

    @property
    def _state(self) -> State:
        return self._store.state

    @property
    def broken_plugins(self) -> tuple[str, ...]:
        """A line for each plugin that failed: its name, distribution and cause."""
        return self._plugins.broken

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

        check_task(architecture, task)

        def find(resolver: Resolver) -> Resolution | None:
            if architecture in self._state.retired and resolver.entry(architecture) is None:
                return None  # a suffix rule could serve the name, and its checkpoints would not fit
            alias = self._alias(architecture)
            if alias != architecture and resolver.entry(architecture) is None:
                aimed = resolver.resolve(alias, task, model_type)
                return aimed and replace(aimed, requested=architecture, rule="alias",
                                         reason=f"an alias of {alias}")  # fmt: skip
            return resolver.resolve(architecture, task, model_type)

        return self._found(architecture, find)

    def _alias(self, name: str) -> str:
        new = changes.followed(self._state.aliases, name)[-1]
        if new == name:
            return name
        warnings.warn(f"{name} is an old name of {new}; use {new}.", DeprecationWarning, 5)
        return new

    def _found(self, name: str, find: Callable[[Resolver], Found | None]) -> Found:
        seen = self._state
        if not isinstance(name, str):
            raise self._missing(repr(name))
        found = find(self._resolver())
        if found is None:
            self._read_plugins()
        if found is None and self._state is not seen:  # by another thread, maybe
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
            self._read_plugins()
        head = self._state.heads.get(name)
        if head is None or not isinstance(head.target, str):
            return head and head.target
        return load_target(head.target, name)

    def head_families(self) -> tuple[str, ...]:
        """Names of the head families, plugins' too, sorted."""
        self._read_plugins()
        return tuple(sorted(self._state.heads))

    def weight_rules(self, architecture: str) -> tuple[WeightRule, ...]:
        """The renamings registered for an architecture, plugins' too, in order."""
        self._read_plugins()
        return tuple(r for r in self._state.weight_rules if r.architecture == architecture)

    def copy(self) -> AdapterRegistry:
        """A registry of its own with the same contents, which reads no plugins."""
        return AdapterRegistry(tables=self._read_tables, state=self._state)

    @contextmanager
    def override(self, entries: Mapping[str, Any] | Iterable[AdapterEntry]) -> Iterator[None]:
        """Replace entries for a while; only these are put back, not what others registered."""
        made = changes.as_entries(entries)
        with self._store.lock:
            before = self._state.entries
            self.register_many(made, replace=True)
            own = changes.overriding(made, before, self._state.entries)
            self._overrides.append(own)
        try:
            yield
        finally:
            with self._store.lock:
                self._overrides.remove(own)
                self._store.change(lambda state: changes.put_back(state, own, self._overrides))

    def _read_plugins(self) -> None:
        """Read the entry points that were not read yet."""
        self._plugins.read(self._take_plugin)

    def _take_plugin(self, load: Callable[[], Any], owner: str) -> None:
        with self._store.staging(owner):
            plugin = load()
            if isinstance(plugin, ModuleType):
                return  # importing it was all it asked for
            if isinstance(plugin, type) or not callable(plugin):
                raise RegistrationError(
                    "an entry point names a function that takes the registry, or a module; got "
                    f"{plugin!r}"
                )
            plugin(self)
