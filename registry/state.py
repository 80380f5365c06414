# SPDX-License-Identifier: Apache-2.0
"""What a registry holds, as one frozen value: changing it means making another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headswap.registry.entry import AdapterEntry
from headswap.registry.rules import DEFAULT_RULES, SuffixRule, WeightRule


@dataclass(frozen=True, slots=True)
class Retired:
    """A name that is gone, and what a user can do about it."""

    removed_in: str | None = None
    renamed_to: str | None = None
    install_hint: str | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """A registered head family: the object, or "package.module:attribute"."""

    target: Any
    owner: str


@dataclass(frozen=True, slots=True)
class State:
    """Readers take one state and see it unchanged, whatever others register meanwhile."""

    entries: Mapping[str, AdapterEntry] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    retired: Mapping[str, Retired] = field(default_factory=dict)
    rules: tuple[SuffixRule, ...] = DEFAULT_RULES
    heads: Mapping[str, Head] = field(default_factory=dict)
    weight_rules: tuple[WeightRule, ...] = ()
