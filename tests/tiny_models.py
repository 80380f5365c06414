# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints: hidden 32, two layers, four heads, vocabulary of 99."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
EXTRA: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 64},
    "gemma2": {"head_dim": 8, "sliding_window": 8, "num_key_value_heads": 2},
    "gemma": {"head_dim": 8, "num_key_value_heads": 2},
    "mistral": {"sliding_window": 8, "num_key_value_heads": 2},
    "qwen3": {"head_dim": 8, "num_key_value_heads": 2},
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "granite": {"num_key_value_heads": 2, "logits_scaling": 8.0},
    "cohere": {"num_key_value_heads": 2, "logit_scale": 0.25},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "bert": {"type_vocab_size": 2},
}
DECODERS = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2", "gpt_neox", "phi", "mixtral")
ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert")


def tiny_config(model_type: str, **more: Any) -> Any:
    """A small config of `model_type` with fixed special ids."""
    return transformers.AutoConfig.for_model(
        model_type, **{**SIZES, **EXTRA.get(model_type, {}), **more}
    )


def shake(model: Any, seed: int = 0) -> Any:
    """Weights large enough that a wrong formula shows; biases and norms too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def tiny(model_type: str, auto: str = "AutoModelForCausalLM", **more: Any) -> Any:
    """A random model of `model_type`, in eval mode, fp32."""
    torch.manual_seed(0)
    return shake(getattr(transformers, auto).from_config(tiny_config(model_type, **more)))


def rows(lengths: tuple[int, ...] = (5, 11, 8, 3), seed: int = 0) -> list[list[int]]:
    """Random ids without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 99, (n,), generator=generator).tolist() for n in lengths]


def padded(ids: list[list[int]], left: list[int], width: int, pad: int = 1) -> dict[str, Any]:
    """A batch with `left[i]` pads before row i and the rest behind it."""
    rest = [width - n - len(row) for n, row in zip(left, ids, strict=True)]
    return {
        "input_ids": torch.tensor([[pad] * a + row + [pad] * b
                                   for a, row, b in zip(left, ids, rest, strict=True)]),
        "attention_mask": torch.tensor([[0] * a + [1] * len(row) + [0] * b
                                        for a, row, b in zip(left, ids, rest, strict=True)]),
    }  # fmt: skip


@torch.no_grad()
def alone(model: Any, ids: list[list[int]], **more: Any) -> torch.Tensor:
    """Logits of each row on its own, unpadded: where every reference class is right."""
    found = []
    for row in ids:
        batch = torch.tensor([row])
        found.append(model(input_ids=batch, attention_mask=torch.ones_like(batch), **more).logits)
    return torch.cat(found)


def word_tokenizer() -> Any:
    """A word-level tokenizer over w0..w89 and a few words, whose ids fit the tiny vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<s>", "<pad>", "</s>", "<unk>", "no", "yes", "Yes", "good"]
    known = {word: i for i, word in enumerate([*words, *(f"w{i}" for i in range(90))])}
    inner = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        pad_token="<pad>",
    )  # fmt: skip
