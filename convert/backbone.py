# SPDX-License-Identifier: Apache-2.0
"""Where a class of transformers has its backbone."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from headswap.registry.errors import UnsupportedHeadError

# Classes of transformers whose base_model_prefix is that of the multimodal model around them.
_BACKBONES = dict.fromkeys(
    ("FuyuForCausalLM", "Gemma3ForCausalLM", "JetMoeForCausalLM", "Llama4ForCausalLM",
     "MllamaForCausalLM"), "model"
)  # fmt: skip


def backbone_name(source: type[PreTrainedModel]) -> str:
    """The attribute that holds the backbone ("model" where the class names none)."""
    return _BACKBONES.get(source.__name__) or source.base_model_prefix or "model"


def lift(source: PreTrainedModel) -> nn.Module:
    """The backbone of `source`: the module under its prefix, or `source` itself if it is one.

    Raises `UnsupportedHeadError` for a class with an output embedding and no backbone under its
    prefix: its output would be taken for hidden states.
    """
    name = backbone_name(type(source))
    if hasattr(source, name):
        return getattr(source, name)  # type: ignore[no-any-return]
    if source.get_output_embeddings() is not None:
        raise UnsupportedHeadError(
            f"{type(source).__name__} names its backbone {name!r} (base_model_prefix), but has no "
            "such attribute; mend the class."
        )
    return source


def row_width(source: PreTrainedModel) -> int:
    """Width of the rows that the source feeds its own output embedding, else its hidden size."""
    output = source.get_output_embeddings()
    if isinstance(output, nn.Linear):
        return output.in_features
    return int(source.config.get_text_config().hidden_size)
