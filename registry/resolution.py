# SPDX-License-Identifier: Apache-2.0
"""Finds the class that serves a name and a task. Strings only; nothing is imported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from headswap.registry.entry import TASKS, AdapterEntry, Task
from headswap.registry.errors import TaskError
from headswap.registry.rules import SuffixRule, canonical, split
from headswap.registry.state import State
from headswap.registry.tables import Tables

Rule = Literal["exact", "alias", "suffix", "model type", "remote code"]


@dataclass(frozen=True, slots=True)
class Resolution:
    """Which entry serves a request, and why. A new value each time; the entry is never changed.

    `architecture` is the name of what comes out, `entry` the class that it is made from.
    """

    requested: str
    task: Task
    architecture: str
    entry: AdapterEntry
    rule: Rule
    reason: str

    @property
    def native(self) -> bool:
        """Whether the serving class does the task by itself, with a head of its own."""
        return self.entry.task == self.task or (self.task, self.entry.task) == (
            "reward",
            "classify",
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for reports."""
        return {
            "requested": self.requested,
            "task": self.task,
            "architecture": self.architecture,
            "served_by": self.entry.architecture,
            "owner": self.entry.owner,
            "native": self.native,
            "rule": self.rule,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Resolver:
    """One look at the registry's state and at transformers' tables."""

    state: State
    tables: Tables

    def entry(self, name: str) -> AdapterEntry | None:
        """The entry of exactly that name: a registered one, else transformers'."""
        return self.state.entries.get(name) or self.tables.entry(name)

    def resolve(self, name: str, task: Task | None, model_type: str | None) -> Resolution | None:
        """The first way that serves `name` for `task`; None if the name leads nowhere.

        Raises `TaskError` for a name that is known but cannot do the task.
        """
        found = split(name, self.state.rules)
        stem, rule = found if found else (name, None)
        asked = task or self._own_task(name, rule)
        if asked is None:
            if self.entry(name) is None:
                return None
            raise _no_task(name)
        if asked == "generate":
            return self._generating(name)
        converted = rule is None or rule.task != asked
        wanted = self._wanted(name, stem, asked, converted)
        for entry, how, reason in self._ways(name, stem, asked, wanted, model_type, converted):
            served = Resolution(name, asked, wanted, entry, how, reason)
            if served.native and asked != "embed" and entry.architecture != wanted:
                served = Resolution(name, asked, entry.architecture, entry, how, reason)
            return served
        return None

    def _own_task(self, name: str, rule: SuffixRule | None) -> Task | None:
        own = self.entry(name)
        return (own.task if own else None) or (rule.task if rule else None)

    def _wanted(self, name: str, stem: str, task: Task, converted: bool) -> str:
        """What the result is called: stock tools know a reward model as a classifier."""
        if not converted and task != "reward":
            return name
        own = self.state.entries.get(name)
        if own is not None and own.task == task:
            return name
        rule = canonical("classify" if task == "reward" else task, self.state.rules)
        return stem + rule.suffix if rule else name

    def _generating(self, name: str) -> Resolution | None:
        entry = self.entry(name)
        if entry is None:
            return None
        if entry.task != "generate":
            able = entry.task or "nothing without conversion"
            raise TaskError(
                f"{name} cannot generate; it can do: {able}. Ask for that task, or name the "
                "causal class.",
                architecture=name,
                task="generate",
            )
        return Resolution(name, "generate", name, entry, "exact", _exact(entry))

    def _ways(
        self, name: str, stem: str, task: Task, wanted: str, model_type: str | None, conv: bool
    ) -> Iterator[tuple[AdapterEntry, Rule, str]]:
        """Every way that serves the request, in order of authority."""
        own, sources = self.state.entries, self._sources(name, stem, task)
        for each in dict.fromkeys((wanted, name)):
            if each in own:
                how: Rule = "exact" if each == name else "suffix"
                yield own[each], how, _exact(own[each]) if each == name else _via(name, own[each])
        yield from ((own[s], "suffix", _via(name, own[s])) for s in sources if s in own)
        listed = self.tables.entry(name)
        if listed is not None and not conv:
            yield listed, "exact", _exact(listed)
        for kind in self._model_types(name, model_type):
            native = self.tables.by_model_type(kind, task)
            entry = self.tables.entry(native) if native else None
            if entry is not None:
                yield entry, "model type", f"transformers' class of model type {kind!r}"
        if listed is not None:
            yield listed, "suffix", _via(name, listed)
        # A class of the given model type first: its tensors are the ones in the checkpoint.
        listed_sources = [source for source in sources if self.tables.entry(source)]
        listed_sources.sort(key=lambda s: model_type not in self.tables.model_types(s))
        for source in listed_sources:
            entry = self.tables.entry(source)
            if entry is not None:
                yield entry, "suffix", _via(name, entry)

    def _sources(self, name: str, stem: str, task: Task) -> tuple[str, ...]:
        found = split(name, self.state.rules)
        rule = found[1] if found and found[1].task == task else canonical(task, self.state.rules)
        # The bare stem last: some causal classes have no suffix at all (BertGenerationDecoder).
        return tuple(stem + suffix for suffix in (*rule.sources, "")) if rule else ()

    def _model_types(self, name: str, given: str | None) -> tuple[str, ...]:
        """The given type alone where the class serves it, else every type that the class serves;
        a type's own class for the task is surer than another type's."""
        served = self.tables.model_types(name)
        if given is not None and (given in served or not served):
            return (given,)
        return served


def check_task(name: str, task: str | None) -> None:
    """Refuse a task that is none."""
    if task is not None and task not in TASKS:
        raise TaskError(
            f"Unknown task {task!r} for {name}; known: {', '.join(TASKS)}.",
            architecture=name,
            task=str(task),
        )


def _exact(entry: AdapterEntry) -> str:
    return f"registered by {entry.owner}"


def _via(name: str, entry: AdapterEntry) -> str:
    return f"{name} is served by {entry.architecture} of {entry.owner}"


def _no_task(name: str) -> TaskError:
    return TaskError(
        f"{name} does not say what it is for; pass task='classify', 'reward', 'embed' or "
        "'token-classify'.",
        architecture=name,
        task="",
    )
