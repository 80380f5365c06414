# SPDX-License-Identifier: Apache-2.0
"""Changes of a registry's state, as pure functions: all is checked before anything is stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headswap.registry.entry import AdapterEntry, check_name, check_target
from headswap.registry.errors import DuplicateArchitectureError, RegistrationError
from headswap.registry.rules import DEFAULT_RULES, SuffixRule, WeightRule, split
from headswap.registry.state import Head, Retired, State
from headswap.registry.tables import Tables

Clash = tuple[str, str, str]


def owner_of(target: Any) -> str:
    """The module that a target comes from."""
    if isinstance(target, str):
        return target.partition(":")[0]
    return str(getattr(target, "__module__", type(target).__module__))


def as_entries(entries: Mapping[str, Any] | Iterable[AdapterEntry]) -> tuple[AdapterEntry, ...]:
    """Entries from a name -> target mapping, or as they are."""
    if isinstance(entries, Mapping):
        return tuple(AdapterEntry(n, t, owner=owner_of(t)) for n, t in entries.items())
    made = tuple(entries)
    for entry in made:
        if not isinstance(entry, AdapterEntry):
            raise RegistrationError(f"Expected AdapterEntry values or a mapping; got {entry!r}.")
    return made


def add_entries(
    state: State, entries: Sequence[AdapterEntry], tables: Tables, replacing: bool
) -> State:
    """`state` with all `entries`, or `DuplicateArchitectureError` naming every clash."""
    taken = [] if replacing else [c for e in entries for c in _clash(state, tables, e)]
    _refuse([*taken, *_doubled(entries)])
    new = [entry for entry in entries if replacing or not _repeats(state, entry)]
    filled = [_with_task(entry, state.rules) for entry in new]
    return replace(state, entries={**state.entries, **{e.architecture: e for e in filled}})


def _with_task(entry: AdapterEntry, rules: Iterable[SuffixRule]) -> AdapterEntry:
    found = split(entry.architecture, rules) if entry.task is None else None
    return replace(entry, task=found[1].task) if found else entry


def _clash(state: State, tables: Tables, entry: AdapterEntry) -> list[Clash]:
    taken = state.entries.get(entry.architecture) or tables.entry(entry.architecture)
    if taken is None or taken.target == entry.target:
        return []
    return [(entry.architecture, taken.owner, entry.owner)]


def _repeats(state: State, entry: AdapterEntry) -> bool:
    """Whether the entry says nothing that is not stored already, apart from its owner."""
    stored = state.entries.get(entry.architecture)
    if stored is None or stored.target != entry.target:
        return False
    said = ("task", "model_type", "head", "install_hint")
    return all(getattr(entry, key) in (None, getattr(stored, key)) for key in said)


def _doubled(entries: Sequence[AdapterEntry]) -> list[Clash]:
    seen: dict[str, AdapterEntry] = {}
    clashes = []
    for entry in entries:
        first = seen.setdefault(entry.architecture, entry)
        if first.target != entry.target:
            clashes.append((entry.architecture, first.owner, entry.owner))
    return clashes


def _refuse(clashes: Sequence[Clash]) -> None:
    if not clashes:
        return
    listed = "; ".join(f"{name} (owned by {old}, asked for by {new})" for name, old, new in clashes)
    raise DuplicateArchitectureError(
        f"Already registered: {listed}. Nothing was registered; pass replace=True to replace.",
        clashes=tuple(clashes),
    )


def add_alias(state: State, old: str, new: str, tables: Tables, replacing: bool) -> State:
    """`state` with `old` standing for `new`; a name that is taken is refused, and one of
    transformers' own even where `replacing`: a class takes its place, and no other name."""
    for name in (old, new):
        check_name(name)
    own, aimed = state.entries.get(old), state.aliases.get(old)
    taken = own or tables.entry(old)
    if (taken and not (own and replacing)) or (aimed not in (None, new) and not replacing):
        _refuse([(old, taken.owner if taken else f"alias of {aimed}", f"alias of {new}")])
    if old in followed(state.aliases, new):
        raise RegistrationError(f"{old!r} can't be an alias of itself.")
    kept = {name: entry for name, entry in state.entries.items() if name != old}
    return replace(state, entries=kept, aliases={**state.aliases, old: new})


def followed(aliases: Mapping[str, str], name: str) -> list[str]:
    """`name`, what it is an alias of, and so on."""
    found = [name]
    while found[-1] in aliases:
        found.append(aliases[found[-1]])
    return found


def retire(state: State, name: str, gone: Retired) -> State:
    """`state` with the reason why `name` is gone."""
    check_name(name)
    if gone.renamed_to is not None:
        check_name(gone.renamed_to)
    elif not gone.removed_in:
        raise RegistrationError(
            f"Nothing says why {name} is gone; give removed_in= or renamed_to=.", architecture=name
        )
    return replace(state, retired={**state.retired, name: gone})


def add_rule(state: State, rule: SuffixRule, replacing: bool) -> State:
    """`state` with a suffix rule before the built-in ones."""
    same = [r for r in state.rules if r.suffix == rule.suffix]
    if any(replace(old, owner=rule.owner) == rule for old in same):
        return state
    if same and not replacing:
        _refuse([(rule.suffix, same[0].owner, rule.owner)])
    kept = [r for r in state.rules if r.suffix != rule.suffix]
    own = [r for r in kept if r not in DEFAULT_RULES]
    return replace(state, rules=(*own, rule, *(r for r in kept if r in DEFAULT_RULES)))


def add_head(state: State, name: str, target: Any, owner: str, replacing: bool) -> State:
    """`state` with a head family."""
    if isinstance(target, str):
        check_target(target)
    taken = state.heads.get(name)
    if taken is not None and taken.target != target and not replacing:
        _refuse([(name, taken.owner, owner)])
    return replace(state, heads={**state.heads, name: Head(target, owner)})


def add_weight_rule(state: State, rule: WeightRule) -> State:
    """`state` with a renaming after the ones it has; the same one twice is one."""
    key = (rule.architecture, rule.pattern)
    same = [r for r in state.weight_rules if (r.architecture, r.pattern) == key]
    if not same:
        return replace(state, weight_rules=(*state.weight_rules, rule))
    if same[0].replacement != rule.replacement:
        _refuse([(f"{rule.architecture}: {rule.pattern}", same[0].owner, rule.owner)])
    return state


@dataclass(eq=False)
class Override:
    """Entries that stand for a while: `ours`, by name, and what stood there `before`."""

    ours: Mapping[str, AdapterEntry]
    before: dict[str, AdapterEntry | None]


def overriding(
    made: Iterable[AdapterEntry],
    before: Mapping[str, AdapterEntry],
    now: Mapping[str, AdapterEntry],
) -> Override:
    """The override by `made`, which is stored by `now`."""
    names = [entry.architecture for entry in made]
    return Override({n: now[n] for n in names}, {n: before.get(n) for n in names})


def put_back(state: State, gone: Override, others: Iterable[Override]) -> State:
    """`state` with the names of `gone` as they were before it, where they still are its own.

    Where one of the `others` that still stand has taken its place, that one puts back what `gone`
    would have put back.
    """
    entries = dict(state.entries)
    for name, mine in gone.ours.items():
        for other in others:
            if other.before.get(name) is mine:
                other.before[name] = gone.before[name]
        before = gone.before[name]
        if entries.get(name) is mine and before is not None:
            entries[name] = before
        elif entries.get(name) is mine:
            del entries[name]
    return replace(state, entries=entries)


def merged(state: State, base: State, staged: State, owner: str) -> State:
    """`state` with all that `staged` has beyond `base`, as `owner`'s.

    A plugin works on a staged copy; what it registered directly meanwhile is in `state`, and stays.
    """
    entries = {n: replace(e, owner=owner) for n, e in _beyond(base.entries, staged.entries)}
    heads = {n: Head(h.target, owner) for n, h in _beyond(base.heads, staged.heads)}
    direct = dict(_beyond(base.entries, state.entries))
    _refuse(_doubled([*(direct[n] for n in entries if n in direct), *entries.values()]))
    result = replace(
        state,
        entries={**state.entries, **entries},
        aliases={**state.aliases, **dict(_beyond(base.aliases, staged.aliases))},
        retired={**state.retired, **dict(_beyond(base.retired, staged.retired))},
        heads={**state.heads, **heads},
    )
    for rule in (r for r in staged.rules if r not in base.rules):
        result = add_rule(result, replace(rule, owner=owner), True)
    for renaming in (r for r in staged.weight_rules if r not in base.weight_rules):
        result = add_weight_rule(result, replace(renaming, owner=owner))
    return result


def _beyond(base: Mapping[str, Any], staged: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in staged.items() if base.get(name) != value]


def served_names(names: Iterable[str], rules: Sequence[SuffixRule]) -> list[str]:
    """Names without an entry that a suffix rule would serve from one of `names`."""
    found = []
    for name in names:
        parts = split(name, rules)
        if parts is None:
            continue
        stem, own = parts
        found += [stem + rule.suffix for rule in rules if own.suffix in rule.sources]
    return found
