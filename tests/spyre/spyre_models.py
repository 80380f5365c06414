# SPDX-License-Identifier: Apache-2.0
"""Tiny models for the executor's tests, and what their own classes give."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
import transformers
from tiny_models import alone, tiny

import headswap

MAJOR = int(transformers.__version__.split(".")[0])
MORE: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
                "num_key_value_heads": 2, "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3_text": {"sliding_window": 8, "head_dim": 8, "num_key_value_heads": 2,
                    "layer_types": ["sliding_attention", "full_attention"]},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2},
    "gpt2": {"n_positions": 200}, "opt": {"word_embed_proj_dim": 32, "ffn_dim": 64},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"],
                   "position_biased_input": False},
    "distilbert": {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4},
    "electra": {"embedding_size": 32},
}  # fmt: skip
FAMILIES = (
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt2", "phi", "granite",
    "gpt_oss", "opt", "bert", "roberta", "xlm-roberta", "distilbert", "electra", "modernbert",
    "deberta-v2", "mpnet",
)  # fmt: skip
DECODERS = FAMILIES[:11]
OWN = ("deberta-v2", "mpnet")
"""Families that compute their own attention in both releases."""


@cache
def converted(kind: str, **more: Any) -> Any:
    given = {"max_position_embeddings": 200, **MORE.get(kind, {}), **more}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = tiny(kind, "AutoModelForCausalLM" if kind in DECODERS else "AutoModel", **given)
        torch.manual_seed(1)
        return headswap.as_seq_cls_model(source, num_labels=3).eval()


def pressing_keys() -> Any:
    """DeepSeek V4, which presses keys of many tokens into one (transformers 5 only)."""
    source = tiny("deepseek_v4", head_dim=16, q_lora_rank=16, n_routed_experts=4,
                  num_experts_per_tok=2, moe_intermediate_size=32,
                  max_position_embeddings=512)  # fmt: skip
    return headswap.as_seq_cls_model(source, num_labels=3).eval()


def expected(model: Any, ids: list[list[int]]) -> torch.Tensor:
    return alone(model, ids)


def greedy(model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    model.generation_config.pad_token_id = 1
    return [
        model.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p)).long(),
                       max_new_tokens=new, do_sample=False)[0, len(p):].tolist()
        for p in prompts
    ]  # fmt: skip


@cache
def causal(kind: str) -> Any:
    return tiny(kind, max_position_embeddings=200, **MORE.get(kind, {}))
