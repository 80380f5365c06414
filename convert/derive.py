# SPDX-License-Identifier: Apache-2.0
"""Heads from a language model's own output rows: label tokens become label columns.

The head's numbers are the model's own token logits, so a causal model classifies without any
training. What the class does to its logits afterwards (bias, scaling, soft cap) is carried
over, and the result is compared with the class itself before it is handed out.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headswap.convert.conversion import Method
from headswap.convert.parallel import rows_of
from headswap.heads import Dense, Difference, Softcap
from headswap.heads.spec import Layer
from headswap.registry.errors import LabelError, UnsupportedHeadError

# What causal classes do to their logits: field of the config -> power of its value
# (Granite divides by logits_scaling; Cohere and Falcon-H1 multiply).
_SCALES = {"logits_scaling": -1, "logit_scale": 1, "lm_head_multiplier": 1}
# Gemma 2, RecurrentGemma and xLSTM cap their logits, each under its own name.
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
TOLERANCE = 1e-5
"""Largest difference, relative to the largest logit, that fp32 rounding explains (about 1e-6)."""
_LOW_PRECISION_TOLERANCE = 5e-2


@dataclass(frozen=True)
class DerivedHead:
    """Rows `[labels, hidden]` and bias `[labels]` (fp32) and what is done to their products."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None = None
    difference: bool = False

    @property
    def marks(self) -> dict[str, Any]:
        """What a stock classification config cannot say about this head."""
        kept = {"softcap": self.softcap, "difference": self.difference or None}
        return {**kept, "head_bias": True if self.bias is not None else None}


def output_layers(layers: tuple[Layer, ...], marks: Mapping[str, Any]) -> tuple[Layer, ...]:
    """`layers` with the bias, soft cap and difference that a config's mark asks for."""
    index = max((i for i, x in enumerate(layers) if isinstance(x, Dense)), default=None)
    if index is None:
        return layers
    output = replace(cast(Dense, layers[index]))
    if marks.get("head_bias"):
        output = replace(output, bias=True)
    if marks.get("difference"):
        output = replace(output, out=2)
    after: list[Layer] = list(layers[index + 1 :])
    if marks.get("softcap"):
        after.append(Softcap(float(marks["softcap"])))
    if marks.get("difference"):
        after.append(Difference())
    return (*layers[:index], output, *after)


def label_token_ids(
    tokens: Sequence[str | int], tokenizer: Any | None, vocabulary: int
) -> tuple[int, ...]:
    """The token id of each label; a label is an id, or a string that is exactly one known token.

    Raises `LabelError` with the word, its pieces and close alternatives.
    """
    if not isinstance(tokens, list | tuple) or not tokens:  # a set has no order
        raise LabelError(f"label_tokens must be a list of tokens or ids; got {tokens!r}.")
    ids = tuple(_token_id(token, tokenizer, vocabulary) for token in tokens)
    if len(set(ids)) != len(ids):
        raise LabelError(
            f"Label tokens {list(tokens)} (ids {list(ids)}) hold one token twice; each label "
            "needs its own.",
            label_ids=ids,
        )
    return ids


def _token_id(token: str | int, tokenizer: Any | None, vocabulary: int) -> int:
    if isinstance(token, bool) or not isinstance(token, str | int):
        raise LabelError(f"Label token {token!r} is neither a string nor a token id.")
    if isinstance(token, int):
        if 0 <= token < vocabulary:
            return token
        raise LabelError(f"Label token id {token} is outside the vocabulary of {vocabulary} rows.")
    if tokenizer is None:
        raise LabelError(f"Label token {token!r} is a string; pass tokenizer=, or a token id.")
    return _word_id(token, tokenizer)


def _word_id(word: str, tokenizer: Any) -> int:
    known = tokenizer.get_vocab()
    if word in known and known[word] != tokenizer.unk_token_id:
        return int(known[word])
    ids = tokenizer(word, add_special_tokens=False)["input_ids"]
    if len(ids) == 1 and ids[0] != tokenizer.unk_token_id:
        return int(ids[0])
    pieces = tokenizer.convert_ids_to_tokens(ids)
    close = alternatives(word, tokenizer, known)
    raise LabelError(
        f"Label {word!r} is not one token: it becomes {pieces}. "
        + (f"Close single tokens: {', '.join(map(repr, close))}. " if close else "")
        + "Choose a word that is one token, or give a token id.",
        label=word,
        pieces=tuple(pieces),
        alternatives=close,
    )


def alternatives(word: str, tokenizer: Any, known: Mapping[str, int]) -> tuple[str, ...]:
    """Up to five single tokens near `word`: its own spellings first, then similar ones."""
    spellings = [f" {word}", word.strip(), word.lower(), word.capitalize(), f" {word.lower()}"]
    single = [s for s in spellings if s != word and _is_single(s, tokenizer)]
    near = difflib.get_close_matches(word, [k for k in known if abs(len(k) - len(word)) < 4], n=5)
    return tuple(dict.fromkeys([*single, *near]))[:5]


def _is_single(word: str, tokenizer: Any) -> bool:
    ids = tokenizer(word, add_special_tokens=False)["input_ids"]
    return len(ids) == 1 and ids[0] != tokenizer.unk_token_id


def label_names(tokens: Sequence[str | int], method: Method | None) -> list[str]:
    """Label names from label tokens: the words, without their leading space."""
    names = [token.strip() if isinstance(token, str) else f"token {token}" for token in tokens]
    return names[1:] if method == "difference" else names


def derive_head(lm: PreTrainedModel, ids: tuple[int, ...], method: Method | None) -> DerivedHead:
    """The head that gives `lm`'s own logits of tokens `ids` (method "rows"), or the second's minus
    the first's ("difference"). Rows are taken, and subtracted once, in fp32.

    Raises `UnsupportedHeadError` where the class has no linear output embedding or where its rows
    are all zero (an output matrix that was never loaded), and `LabelError` for an id out of range.
    """
    output = lm.get_output_embeddings()
    if not isinstance(output, nn.Linear):
        raise UnsupportedHeadError(
            f"{type(lm).__name__} has no linear output embedding, so label tokens have no rows; "
            "load a causal language model."
        )
    refuse_packed(output, "its output embedding")
    size = (output.out_features, output.in_features)
    check_range(ids, size[0])
    index = torch.tensor(ids, device=output.weight.device)
    weight = rows_of(output.weight, index, size)
    bias = None if output.bias is None else rows_of(output.bias, index, size[:1])
    return head_of_rows(weight, bias, lm.config, ids, method, type(lm).__name__)


def head_of_rows(
    rows: Tensor, bias: Tensor | None, config: Any, ids: tuple[int, ...], method: Method | None,
    who: str,
) -> DerivedHead:  # fmt: skip
    """The head of output rows `[labels, hidden]` (and bias `[labels]`) of tokens `ids`, as stored,
    of a causal class called `who`; errors as in `derive_head`."""
    scale = _scale(config)
    weight = rows.float() * scale
    bias = None if bias is None else bias.float() * scale
    if not bool(weight.any()):
        raise UnsupportedHeadError(
            f"The output rows of tokens {list(ids)} in {who} are all zero; the "
            "checkpoint's output matrix was not stored or not loaded."
        )
    cap = next((c for c in (_text_field(config, name) for name in _CAPS) if c), None)
    if method != "difference":
        return DerivedHead(weight, bias, softcap=cap)
    if cap is not None:  # not linear any more: both rows stay, the cap comes before subtracting
        return DerivedHead(weight, bias, softcap=cap, difference=True)
    return DerivedHead(weight[1:] - weight[:1], None if bias is None else bias[1:] - bias[:1])


def is_packed(module: nn.Module) -> bool:
    """Whether a linear layer's weight is something else than plain numbers."""
    weight: Any = getattr(module, "weight", None)
    if weight is not None and hasattr(
        weight, "to_local"
    ):  # split over processes: what each holds decides
        weight = weight.to_local()
    if not isinstance(weight, Tensor) or type(weight) not in (Tensor, nn.Parameter):
        return True
    return not weight.is_floating_point() or weight.element_size() < 2


def refuse_packed(module: nn.Module, what: str) -> None:
    """Raise `UnsupportedHeadError` for a linear layer without plain rows."""
    if is_packed(module):
        parts = ", ".join(f"{n} {t.dtype}" for n, t in module.state_dict().items())
        raise UnsupportedHeadError(
            f"The rows of {what} are quantised ({type(module).__name__}: {parts}), so they can't "
            "be taken as numbers. headswap.load(path, ...) dequantises a checkpoint that "
            "it can read; else exclude the layer when the model is quantised.",
        )


def check_range(ids: tuple[int, ...], vocabulary: int) -> None:
    """`LabelError` for an id that an output matrix of `vocabulary` rows does not have."""
    for index in ids:
        if not 0 <= index < vocabulary:
            raise LabelError(
                f"Label token id {index} is outside the output matrix of {vocabulary} rows."
            )


def _text_field(config: Any, name: str) -> Any:
    return getattr(config.get_text_config(), name, None) or getattr(config, name, None)


def _scale(config: Any) -> float:
    scale = 1.0
    for name, power in _SCALES.items():
        value = _text_field(config, name)
        if value is not None:
            scale *= float(value) ** power
    return scale


@torch.no_grad()
def check_derived(
    lm: PreTrainedModel, model: Any, ids: tuple[int, ...], method: Method | None
) -> float:
    """Largest difference between the derived head and `lm`'s own token logits on probe ids.

    Raises `UnsupportedHeadError` where rounding does not explain it: the class then does something
    to its logits that headswap doesn't know.
    """
    probe = probe_ids(lm.config.get_text_config().vocab_size, lm.device)
    mask = torch.ones_like(probe)
    state = model.rows({"input_ids": probe, "attention_mask": mask}).values
    width = model.get_submodule(model.head_spec.output.path).in_features
    if state.shape[-1] != width:
        raise UnsupportedHeadError(
            f"{type(lm).__name__} has output rows of width {width} and states of width "
            f"{state.shape[-1]}: layers stand between them that headswap does not know."
        )
    # Gemma 3n shares keys between layers, in 4.57 by way of the cache.
    cache = {} if _text_field(lm.config, "num_kv_shared_layers") else {"use_cache": False}
    logits = lm(input_ids=probe, attention_mask=mask, **cache).logits[:, -1, list(ids)].float()
    wanted = logits[:, 1:] - logits[:, :1] if method == "difference" else logits
    found = model(input_ids=probe, attention_mask=mask).logits
    difference = float((found - wanted).abs().max())
    low = lm.dtype in (torch.float16, torch.bfloat16)
    bound = (_LOW_PRECISION_TOLERANCE if low else TOLERANCE) * (1.0 + float(logits.abs().max()))
    if not difference <= bound:
        raise UnsupportedHeadError(
            f"{type(lm).__name__}'s own token logits differ by {difference:.3g} from its output "
            "rows times its hidden state: the class changes its logits in a way that headswap "
            "does not know, so label tokens would give wrong scores.",
            difference=difference,
        )
    return difference


def probe_ids(vocabulary: int, device: Any, length: int = 8) -> Tensor:
    """Fixed token ids `[1, length]` (int64), spread over the vocabulary."""
    steps = torch.arange(1, length + 1, device=device)
    return (steps * 7919 % max(vocabulary - 1, 1)).unsqueeze(0)
