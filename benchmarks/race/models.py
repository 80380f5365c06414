# SPDX-License-Identifier: Apache-2.0
"""Classifiers of real shapes: random weights (or real ones under a random head), one label, saved
as fp32 safetensors beside a real tokenizer.

Vocabularies are those of the tokenizers at hand, MiniLM's (30,522) and SmolLM2's (49,152), so the
embeddings are smaller than the originals' where those have more words; no product grows with them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Chosen so that a round of one peer takes some tens of seconds in fp32 on one core.
COUNTS = {
    "minilm-l6": (256, 100), "minilm-real": (256, 100), "bert-base": (64, 48),
    "deberta-v3-small": (64, 48), "modernbert-base": (48, 24), "llama-135m": (48, 48),
    "smollm2-real": (32, 32), "qwen3-0.6b": (12, 12),
}  # fmt: skip
"""How many texts the skewed set has, and how many passages the rerank set."""


@dataclass(frozen=True)
class Model:
    """A saved model; `linear` counts the weights that each token is multiplied with."""

    name: str
    folder: Path
    causal: bool
    linear: int
    parameters: int


def _bert(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {"model_type": "bert", "hidden_size": width, "intermediate_size": 4 * width,
            "num_hidden_layers": layers, "num_attention_heads": heads}  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "minilm-l6": _bert(384, 6, 12),
    "bert-base": _bert(768, 12, 12),
    "deberta-v3-small": {
        "model_type": "deberta-v2", "hidden_size": 768, "intermediate_size": 3072,
        "num_hidden_layers": 6, "num_attention_heads": 12, "relative_attention": True,
        "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "type_vocab_size": 0,
        "layer_norm_eps": 1e-7, "max_relative_positions": -1,
    },
    "modernbert-base": {
        "model_type": "modernbert", "hidden_size": 768, "intermediate_size": 1152,
        "num_hidden_layers": 22, "num_attention_heads": 12, "max_position_embeddings": 8192,
    },
    "llama-135m": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 8192,
    },
}  # fmt: skip
NAMES = (*SHAPES, "minilm-real", "smollm2-real")
CAUSAL = ("llama-135m", "qwen3-0.6b", "smollm2-real")


def made(name: str, root: Path) -> Model:
    """The model of that name in `root`, made there the first time."""
    folder = root / name
    if not (folder / "bench.json").exists():
        unfinished = root / f".{name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        _make(name, unfinished, _source(name, root))
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    facts = json.loads((folder / "bench.json").read_text("utf-8"))
    return Model(name, folder, name in CAUSAL, facts["linear"], facts["parameters"])


def _source(name: str, root: Path) -> Path:
    """Where the tokenizer, and a real model's weights, come from."""
    from headswap.cli.demo import unpack
    from headswap.cli.packages import MINILM, SMOLLM2, locate

    if name not in CAUSAL:
        return locate(MINILM).parent
    plain = root / "smollm2-plain"
    if not (plain / "config.json").exists():
        unpack(locate(SMOLLM2), plain)
    return plain


def _make(name: str, folder: Path, source: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(source)
    if name in ("deberta-v3-small", "modernbert-base"):  # they have no segments
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
    auto = AutoModelForSequenceClassification
    if name in SHAPES:
        config = AutoConfig.for_model(**SHAPES[name], **_ids(tokenizer), num_labels=1)
        model = auto.from_config(config, dtype=torch.float32)
    else:
        model = auto.from_pretrained(source, num_labels=1, dtype=torch.float32)
        model.config.pad_token_id = tokenizer.pad_token_id
    _scale(model.eval(), tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    linear = [
        module.weight.numel() for path, module in model.named_modules()
        if type(module) is torch.nn.Linear and re.search(r"\.\d+\.", path)
    ]  # fmt: skip
    facts = {"linear": sum(linear), "parameters": sum(p.numel() for p in model.parameters())}
    (folder / "bench.json").write_text(json.dumps(facts), "utf-8")


def _ids(tokenizer: Any) -> Mapping[str, Any]:
    """The config's special ids; encoders' tokenizers begin with [CLS] and end with [SEP]."""
    found = {name: getattr(tokenizer, f"{name}_token_id") for name in ("pad", "cls", "sep")}
    found["bos"] = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else found["cls"]
    found["eos"] = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else found["sep"]
    marks = {f"{name}_token_id": value for name, value in found.items() if value is not None}
    return {**marks, "vocab_size": len(tokenizer)}


def _scale(model: Any, tokenizer: Any) -> None:
    """Multiply the head until logits have a standard deviation of 1, so that a difference means
    something."""
    import torch

    texts = [" ".join(f"{word} {i * j}" for j, word in enumerate(("red", "old", "fast", "sum")))
             for i in range(1, 17)]  # fmt: skip
    with torch.inference_mode():
        found = [model(**tokenizer(text, return_tensors="pt")).logits for text in texts]
    head = getattr(model, "score", None) or model.classifier
    with torch.no_grad():
        head.weight /= torch.cat(found).std()
