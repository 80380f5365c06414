# SPDX-License-Identifier: Apache-2.0
"""Under which names a checkpoint stores the tensors of its head."""

from __future__ import annotations

from collections.abc import Mapping

from headswap.convert.checkpoint import Checkpoint
from headswap.convert.weights import Header
from headswap.heads import HeadSpec
from headswap.registry.errors import WeightError

# Where reward trainers and old conversions put a head that is one linear layer (TRL's value head
# is `v_head.summary`).
LINEAR = ("score", "scores", "classifier", "value_head", "v_head.summary")
# Qwen's reward models, of answers and of their steps, have a linear, a ReLU and a linear, in an
# nn.Sequential called `score`.
_MLP = ("score.0.weight", "score.0.bias", "score.2.weight", "score.2.bias")
_MLP_CLASSES = ("Qwen2ForRewardModel", "Qwen2ForProcessRewardModel")


def stored_names(headers: Mapping[str, Header], spec: HeadSpec) -> dict[str, str]:
    """The head's tensors as the model calls them -> as the checkpoint does; {} without a head.

    A head stands at its own place, inside the language model's prefix, or, where it is one linear
    layer, under one of the names in `LINEAR`. A bias that the class lacks is among the names.
    Raises `WeightError` where two such heads are stored.
    """
    weight, bias = (f"{spec.output.path}.{kind}" for kind in ("weight", "bias"))
    wanted = {*spec.tensors(), *({bias} & headers.keys())}
    if weight in headers:
        return {name: name for name in wanted if name in headers}
    for at in sorted(headers):
        prefix = at.removesuffix(weight)
        if at.endswith(f".{weight}") and all(prefix + name in headers for name in spec.tensors()):
            return {
                name: prefix + name for name in (*spec.tensors(), bias) if prefix + name in headers
            }
    if len(spec.stored) != 1:
        return {}
    stems = [stem for stem in LINEAR if len(headers.get(f"{stem}.weight", [()])[0]) == 2]
    if len(stems) > 1:
        raise WeightError(
            f"Two heads are stored, {stems[0]}.weight and {stems[1]}.weight, and none is called "
            f"{weight}. Remove one, or say which with headswap.register_weight_rule().",
            missing=(weight,),
            unexpected=tuple(f"{stem}.weight" for stem in stems),
        )
    named = {weight: "weight", bias: "bias"}
    return {name: f"{stem}.{kind}" for stem in stems for name, kind in named.items()
            if f"{stem}.{kind}" in headers}  # fmt: skip


def stored_family(checkpoint: Checkpoint) -> str | None:
    """The head family that the checkpoint's class is known to have beyond its model type's."""
    layered = set(_MLP) <= checkpoint.headers.keys()
    return "score-mlp" if layered and checkpoint.architecture in _MLP_CLASSES else None
