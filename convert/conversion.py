# SPDX-License-Identifier: Apache-2.0
"""What a conversion was asked for, as one hashable value, and how it marks a config."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headswap.registry import Task
from headswap.registry.errors import ConversionError, LabelError, UnsupportedHeadError

Method = Literal["rows", "difference"]
METHODS: tuple[Method, ...] = ("rows", "difference")
PROBLEM_TYPES = (
    "regression",
    "single_label_classification",
    "multi_label_classification",
)
MARK = "headswap"
"""Field of a config.json that keeps what a stock classification config has no word for."""

NON_STOCK = "Headswap"
"""Stands in the name of a class whose checkpoints stock transformers cannot read rightly."""


def stock_name(architecture: str) -> str:
    """The architecture behind a non-stock name; other names as they are."""
    return architecture.replace(NON_STOCK, "")


TASK_SUFFIX: dict[Task, str] = {
    "classify": "ForSequenceClassification",
    "reward": "ForSequenceClassification",
    "token-classify": "ForTokenClassification",
    "embed": "Model",
    "generate": "ForCausalLM",
}


_USELESS: dict[Task, tuple[str, ...]] = {
    "embed": ("head", "num_labels", "id2label", "problem_type", "label_ids", "method"),
    "token-classify": ("pooling", "problem_type", "label_ids", "method"),
}
"""Options that a task has no use for."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """One request for a conversion. Equal requests give the same class.

    `head` names a head family and `pooling` a pooling rule where they differ from the
    architecture's own; `label_ids` are the token ids whose output rows make the head.
    """

    task: Task = "classify"
    head: str | None = None
    pooling: str | None = None
    num_labels: int | None = None
    id2label: tuple[tuple[int, str], ...] | None = None
    problem_type: str | None = None
    label_ids: tuple[int, ...] = ()
    method: Method | None = None

    def __post_init__(self) -> None:
        check_choice("task", self.task, TASK_SUFFIX)
        if self.task == "generate":
            raise ConversionError(
                "A conversion to 'generate' was asked for; headswap converts to 'classify', "
                "'reward', 'embed' or 'token-classify'. The source model still generates.",
                task=self.task,
            )
        check_choice("method", self.method, METHODS)
        check_choice("problem_type", self.problem_type, PROBLEM_TYPES)
        _check_method(self.method, self.label_ids)
        self._check_task()
        _check_count(self.num_labels, self.id2label, self.derived_rows)

    def _check_task(self) -> None:
        """Refuse an option that has no meaning for the task, rather than drop it."""
        useless = _USELESS.get(self.task, ())
        given = [name for name in useless if getattr(self, name) not in (None, ())]
        if given:
            words = ", ".join("label_tokens" if n == "label_ids" else n for n in given)
            raise ConversionError(
                f"{words} has no meaning for task={self.task!r}; leave it out.", task=self.task
            )
        if self.pooling == "all" or (self.task == "embed" and self.pooling == "compat"):
            raise UnsupportedHeadError(
                f"pooling={self.pooling!r} gives no single row for task={self.task!r}.",
                pooling=self.pooling,
            )
        if self.task == "reward" and self.labels != 1:
            raise LabelError(f"A reward model has one label; got {self.labels}.")

    @property
    def derived_rows(self) -> int | None:
        """How many labels the label tokens give; None without label tokens."""
        if not self.label_ids:
            return None
        return 1 if self.method == "difference" else len(self.label_ids)

    @property
    def labels(self) -> int | None:
        """The number of labels that this request fixes, if it fixes one."""
        if self.derived_rows is not None:
            return self.derived_rows
        if self.id2label is not None:
            return len(self.id2label)
        return 1 if self.num_labels is None and self.task == "reward" else self.num_labels

    def apply(self, config: Any) -> Any:
        """A copy of `config` with this request written into it; `config` is not touched."""
        config = copy.deepcopy(config)
        if self.labels is not None and self.labels != config.num_labels:
            config.num_labels = self.labels
        if self.id2label is not None:
            config.id2label = dict(self.id2label)
            config.label2id = {name: index for index, name in self.id2label}
        if self.problem_type is not None:
            config.problem_type = self.problem_type
        elif self.task == "reward" and config.problem_type is None:
            config.problem_type = "regression"
        writes = any("CausalLM" in str(name) for name in config.architectures or ())
        if (writes or self.label_ids) and getattr(config, "temperature", None) is not None:
            config.temperature = 1.0  # that of writing text: a classifier's would divide its logits
        kept = {"task": self.task, "head": self.head, "pooling": self.pooling}
        return mark(config, **{k: v for k, v in kept.items() if v and v != "classify"})


def check_choice(name: str, value: str | None, known: Iterable[str]) -> None:
    """`ConversionError` listing the known values if `value` is not None and not one of them."""
    if value is not None and value not in known:
        raise ConversionError(
            f"Unknown {name} {value!r}; known: {', '.join(known)}.", **{name: value}
        )


def _check_method(method: Method | None, label_ids: tuple[int, ...]) -> None:
    if method is not None and not label_ids:
        raise ConversionError(
            f"method={method!r} needs label_tokens: the tokens whose output rows make the head.",
            method=method,
        )
    if method == "difference" and len(label_ids) != 2:
        raise ConversionError(
            f"method='difference' needs two label tokens (negative, positive); got "
            f"{len(label_ids)}.",
            method=method,
        )


def _check_count(
    num_labels: int | None, id2label: tuple[tuple[int, str], ...] | None, rows: int | None
) -> None:
    if num_labels is not None and (type(num_labels) is not int or num_labels < 1):
        raise LabelError(f"num_labels={num_labels!r}; it must be a whole number from 1 up.")
    counts = {
        "num_labels": num_labels,
        "id2label": None if id2label is None else len(id2label),
        "label_tokens": rows,
    }
    given = {name: count for name, count in counts.items() if count is not None}
    if len(set(given.values())) > 1:
        said = ", ".join(f"{name} gives {count}" for name, count in given.items())
        raise LabelError(f"The number of labels is contradictory: {said}.", **given)


def label_pairs(id2label: Mapping[Any, str] | Iterable[str] | None) -> Any:
    """`id2label` as sorted (index, name) pairs, from a mapping (string keys too) or a list.

    Raises `LabelError` unless the keys are 0 .. n-1 and the names are distinct.
    """
    if id2label is None:
        return None
    items = id2label.items() if isinstance(id2label, Mapping) else enumerate(id2label)
    try:
        pairs = sorted((int(index), str(name)) for index, name in items)
    except ValueError as error:
        raise LabelError(f"id2label keys must be whole numbers: {error}.") from error
    if [index for index, _ in pairs] != list(range(len(pairs))) or not pairs:
        raise LabelError(
            f"id2label has the keys {[index for index, _ in pairs]}; expected 0 to n-1."
        )
    if len({name for _, name in pairs}) != len(pairs):
        raise LabelError("id2label gives one name to two labels; each column needs its own name.")
    return tuple(pairs)


def text_field(config: Any, name: str) -> Any:
    """A field of the text part of `config`; None where a downstream config lacks it."""
    return getattr(config.get_text_config(), name, None)


INEXACT = {
    "softcap": "final_logit_softcapping (a soft cap is not linear, so no score row can hold it)",
    "difference": "a difference of two capped rows",
    "head_bias": "a bias on its output rows (the stock score head has none)",
}
"""Marks of a head that a stock classification class would compute wrongly, and what they are."""


def inexact(config: Any) -> bool:
    """Whether a stock class would give other scores than headswap under this config."""
    return any(marks(config).get(name) for name in INEXACT)


def marks(config: Any) -> dict[str, Any]:
    """What headswap wrote into `config`; an empty dict for a stock one."""
    found = getattr(config, MARK, None)
    return dict(found) if isinstance(found, Mapping) else {}


def unmarked(config: Any) -> Any:
    """A copy of `config` without what an earlier conversion wrote into it."""
    config = copy.deepcopy(config)
    if hasattr(config, MARK):
        delattr(config, MARK)
    return config


def mark(config: Any, **values: Any) -> Any:
    """Write `values` into the config's mark (None removes one); returns `config`."""
    kept = {k: v for k, v in {**marks(config), **values}.items() if v is not None}
    if kept:
        setattr(config, MARK, kept)
    elif hasattr(config, MARK):
        delattr(config, MARK)
    return config
