# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint can do: one rule, from its config and head, never from a folder's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Literal, get_args

from headswap.convert.checkpoint import Checkpoint, open_checkpoint
from headswap.convert.conversion import marks
from headswap.convert.decide import Options, own_task
from headswap.convert.intent import stored_intent
from headswap.convert.job import decide
from headswap.registry import Task, global_registry
from headswap.registry.errors import ArchitectureError, ConversionError

Role = Literal["classify", "score", "reward", "embed", "generate"]
ROLES: tuple[Role, ...] = get_args(Role)

_SAYS: dict[Role, str] = {
    "classify": "gives no label for a text",
    "score": "gives no score for a pair of texts",
    "reward": "gives no reward for a conversation",
    "embed": "gives no vector for a text",
    "generate": "writes no text",
}
_NO_HEAD = "a head: task='classify' or 'reward' with label_tokens=[...], or one that was trained"
_HEAD_INSIDE = "a checkpoint without a classification head"


@dataclass(frozen=True, slots=True)
class Roles:
    """What a model of kind `kind` offers, and what it would need for each other role."""

    kind: str
    offered: tuple[Role, ...]
    needs: Mapping[Role, str] = field(default_factory=dict)

    def require(self, role: Role, name: str) -> None:
        """Raise `ConversionError` saying what is offered and what `role` would need."""
        if role in self.offered:
            return
        missing = self.needs.get(role)
        raise ConversionError(
            f"{name} {_SAYS[role]} (it is for {self.kind}). It can: "
            f"{', '.join(self.offered) or 'nothing of ' + ', '.join(ROLES)}."
            + (f" For {role!r} it needs {missing}." if missing else "")
            + (" Cosines of vectors: Embedder(...).cosine(...)." if _cosine(self, role) else ""),
            role=role,
            offered=self.offered,
        )


def _cosine(roles: Roles, role: Role) -> bool:
    return role == "score" and "embed" in roles.offered


def roles_by_kind(kind: str | None, labels: int = 0) -> Roles:
    """The rule: `kind` is a task of the registry, `labels` how many the head has."""
    if kind in ("classify", "reward") and labels == 1:
        return Roles(kind, ("classify", "score", "reward"), {"embed": _HEAD_INSIDE})
    if kind in ("classify", "reward"):
        named = "relevance=, the name of the label that means relevant"
        return Roles(kind, ("classify",), {"score": named, "reward": _one_label(labels),
                                           "embed": _HEAD_INSIDE})  # fmt: skip
    if kind == "token-classify":
        return Roles(kind, ("reward",) if labels == 1 else (), {"reward": _one_label(labels)})
    needs: dict[Role, str] = {"classify": _NO_HEAD, "score": _NO_HEAD, "reward": _NO_HEAD}
    if kind == "generate":
        return Roles(kind, ("generate", "embed"), needs)
    if kind == "embed":
        return Roles(kind, ("embed",), needs)
    return Roles(kind or "something unknown", (), needs if kind is None else {})


def _one_label(labels: int) -> str:
    more = ", so label=, the name of the one that means good" if labels == 2 else ""
    return f"a head with one label; this one has {labels}{more}"


def roles(source: Any) -> Roles:
    """What the checkpoint at a path, or a loaded model, can do: `.offered` and `.needs`."""
    if isinstance(source, (str, PathLike)):
        return roles_of(open_checkpoint(source), Options())
    return roles_of_model(source) or roles_by_kind(None)


def roles_of(checkpoint: Checkpoint, options: Options) -> Roles:
    """What `checkpoint` loaded with `options` can do; reads config and headers only."""
    asked = (options.label_tokens, options.head, options.allow_untrained_head or None)
    named = any(option is not None for option in asked)
    if named or stored_intent(checkpoint) is not None:
        kind: str | None = options.task or "classify"
    else:
        kind = marks(checkpoint.config).get("task") or own_task(checkpoint)
    if kind not in ("classify", "reward", "token-classify"):
        return roles_by_kind(kind)
    if not named or options.task not in ("classify", "reward"):  # what is stored counts
        options = Options(
            label_tokens=options.label_tokens, method=options.method,
            num_labels=options.num_labels, id2label=options.id2label, head=options.head,
            tokenizer=options.tokenizer, trust_remote_code=options.trust_remote_code,
        )  # fmt: skip
    return roles_by_kind(kind, _labels(checkpoint, options))


def _labels(checkpoint: Checkpoint, options: Options) -> int:
    job = decide(checkpoint, options)
    return int(job.serving.cls.conversion.apply(job.config).num_labels)


def roles_of_model(model: Any) -> Roles | None:
    """What a loaded model can do. None for a class that is not transformers' and may be called
    anything; the shape of what it returns shows what it is. A compiled model is judged by the one
    inside."""
    from transformers import PreTrainedModel

    model = getattr(model, "_orig_mod", model)
    conversion = getattr(model, "conversion", None)
    if conversion is None and not isinstance(model, PreTrainedModel):
        return None
    kind = conversion.task if conversion is not None else _kind_of_class(type(model).__name__)
    return roles_by_kind(kind, int(getattr(model.config, "num_labels", 0) or 0))


def _kind_of_class(name: str) -> Task | None:
    if name.endswith("SequenceClassification"):
        return "classify"
    try:
        return global_registry.resolve(name).task
    except ArchitectureError:
        return None


def require(model: Any, role: Role) -> None:
    """Refuse a loaded model that can't do `role`.

    Whether one of several labels can be a score is the reranker's question, not its class's.
    """
    found = roles_of_model(model)
    if found is None or (role == "score" and "classify" in found.offered):
        return
    found.require(role, type(getattr(model, "_orig_mod", model)).__name__)
