# SPDX-License-Identifier: Apache-2.0
"""Suffix rules: which names can serve which, as ordered data."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from headswap.registry.entry import Task
from headswap.registry.errors import RegistrationError

CAUSAL = ("ForCausalLM", "LMHeadModel", "WithLMHeadModel", "ModelWithLMHead")
SOURCES = (*CAUSAL, "ForConditionalGeneration", "ForMaskedLM", "Model")
"""Suffixes of architectures whose backbone can carry another head, best first."""


@dataclass(frozen=True, slots=True)
class SuffixRule:
    """Names that end in `suffix` ask for `task` and can be served by the same stem with one of the
    suffixes in `sources`, the first that exists."""

    suffix: str
    task: Task | None
    sources: tuple[str, ...] = ()
    owner: str = "headswap"

    def __post_init__(self) -> None:
        if not all(isinstance(s, str) and s.isidentifier() for s in (self.suffix, *self.sources)):
            raise RegistrationError(
                f"Suffixes are parts of a class name; got {self.suffix!r} <- {self.sources!r}."
            )


@dataclass(frozen=True, slots=True)
class WeightRule:
    """Stored tensor names of `architecture` that match the regular expression `pattern` are read
    as if `replacement` stood there (as in `re.sub`)."""

    architecture: str
    pattern: str
    replacement: str
    owner: str = ""

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise RegistrationError(
                f"{self.pattern!r} is not a regular expression: {error}."
            ) from error


_REWARD = ("ForSequenceClassification", *SOURCES)

DEFAULT_RULES: tuple[SuffixRule, ...] = (
    SuffixRule("ForSequenceClassification", "classify", SOURCES),
    SuffixRule("ForTokenClassification", "token-classify", SOURCES),
    SuffixRule("ForRewardModeling", "reward", _REWARD),
    SuffixRule("ForRewardModel", "reward", _REWARD),
    SuffixRule("RewardModel", "reward", _REWARD),
    SuffixRule("Model", "embed"),
    SuffixRule("ForTextEncoding", "embed", ("Model", *SOURCES)),
    SuffixRule("ForTextEmbedding", "embed", ("Model", *SOURCES)),
    SuffixRule("EmbeddingModel", "embed", ("Model", *SOURCES)),
    *(SuffixRule(suffix, "generate") for suffix in (*CAUSAL, "ForConditionalGeneration")),
    SuffixRule("ForMaskedLM", None),
)


def split(name: str, rules: Iterable[SuffixRule]) -> tuple[str, SuffixRule] | None:
    """`name` as (stem, rule) by the longest suffix that fits; None if none does.

    Of two rules with one suffix the earlier wins.
    """
    fitting = [r for r in rules if name.endswith(r.suffix) and len(name) > len(r.suffix)]
    if not fitting:
        return None
    rule = max(fitting, key=lambda r: len(r.suffix))
    return name[: -len(rule.suffix)], rule


def canonical(task: Task, rules: Iterable[SuffixRule]) -> SuffixRule | None:
    """The rule whose suffix a new name for `task` gets: the first default one."""
    fitting = [rule for rule in rules if rule.task == task]
    ours = [rule for rule in fitting if rule.owner == "headswap"]
    return next(iter([*ours, *fitting]), None)
