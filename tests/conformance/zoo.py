# SPDX-License-Identifier: Apache-2.0
"""A tiny random model of any type that transformers registers for classification or causal LM.

The default config of a type is shrunk by the names of its fields (`SIZES`), nested configs too;
what a type needs beyond that stands in `zoo_sizes.EXTRA`.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tiny_models import shake
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from zoo_sizes import EXTRA, SIZES

from headswap.heads import Dropout

SEQUENCE = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
TOKEN = modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
MAJOR = int(transformers.__version__.split(".")[0])
NO_TEXT = ("DbrxAttentionConfig", "DbrxFFNConfig")
LENGTHS = (6, 12, 9, 5)


def zoo_config(cls: Any, **more: Any) -> Any:
    """A small config of class `cls`, with pad id 1, begin 0, end 2 and a vocabulary of 99."""
    kind = cls.model_type
    needs = {**EXTRA.get(kind, {}), **EXTRA.get(f"{kind}@{MAJOR}", {})}
    return cls(**shrunk(cls, {**needs, **more}))


def shrunk(cls: type, extra: dict[str, Any]) -> dict[str, Any]:
    """Arguments that make a small config of `cls`."""
    default: Any = cls()
    names = set(vars(default)) | {name.lstrip("_") for name in vars(default)}
    found: dict[str, Any] = {}
    for name in names - set(extra):
        value = vars(default).get(name)
        if isinstance(value, PretrainedConfig):
            found[name] = shrunk(type(value), {}) | {"model_type": value.model_type}
        elif name in SIZES and not (name.endswith("_token_id") and cls.__name__ in NO_TEXT):
            found[name] = SIZES[name]
    if "kv_lora_rank" in names and "num_key_value_heads" in found:
        found["num_key_value_heads"] = SIZES["num_attention_heads"]  # latent attention expands
    for name, value in extra.items():
        sub = vars(default).get(name)
        if isinstance(value, dict) and isinstance(sub, PretrainedConfig):
            value = shrunk(type(sub), value) | {"model_type": sub.model_type}
        found[name] = value
    return found


def zoo_model(model_type: str, table: Any, **more: Any) -> Any:
    """A random model of `model_type` out of `table`, in eval mode, fp32."""
    torch.manual_seed(0)
    names = table[model_type]
    cls = getattr(transformers, names if isinstance(names, str) else names[0])
    # One class serves several types: the type's own config, unless the class wants an inner one.
    config = CONFIG_MAPPING[model_type]
    config = config if issubclass(config, cls.config_class) else cls.config_class
    return shake(cls(zoo_config(config, **more)).float())


def check_dropout(reference: Any, model: Any) -> None:
    """The head drops at the rates that the class drops at, outside its backbone."""
    inside = f"{model.backbone_name}."
    own = {module.p for name, module in reference.named_modules()
           if isinstance(module, torch.nn.Dropout) and not name.startswith(inside)}  # fmt: skip
    found = {float(layer.rate) for layer in model.head_spec.layers if isinstance(layer, Dropout)}
    assert found - {0.0} == own - {0.0}


def batch(left: bool = False, seed: int = 0) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
    """Random rows that end in the end mark, and the padded batch of them."""
    generator = torch.Generator().manual_seed(seed)
    rows = [[*torch.randint(5, 99, (n - 1,), generator=generator).tolist(), 2] for n in LENGTHS]
    width = max(LENGTHS) + 4

    def padded(row: list[int], fill: int) -> list[int]:
        rest = [fill] * (width - len(row))
        return rest + row if left else row + rest

    return rows, {
        "input_ids": torch.tensor([padded(row, 1) for row in rows]),
        "attention_mask": torch.tensor([padded([1] * len(row), 0) for row in rows]),
    }
