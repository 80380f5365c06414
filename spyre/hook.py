# SPDX-License-Identifier: Apache-2.0
"""Where transformers hands attention to us, and what a backbone's layers were seen to want.

An attention name and a mask name are registered together: without the second, transformers hands a
mask of None to the first, even for a padded batch. What a layer does is learned from one run and
never from a list of families: how often attention is called, with which mask, which features.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headswap.spyre.backends import ATTENTION, AttentionBackend
from headswap.spyre.cache import PagedBatch, Pages
from headswap.spyre.errors import AttentionError
from headswap.spyre.masks import additive
from headswap.spyre.native import at
from headswap.spyre.packing import PackedBatch
from headswap.spyre.reference import Reference
from headswap.spyre.visibility import Feature, Scores, Visibility, learned

PREFIX = "headswap-"
"""How our attention functions are called in transformers' table."""
BATCH = "headswap_batch"
"""The keyword that carries a batch through a backbone's layers to its attention."""
TOLD = torch.zeros(1, 1, 0, 0)
"""The mask that goes with a batch: of four dimensions, so that it is taken as it is, and of no
size, so that attention which the batch did not reach fails instead of seeing everything."""
UNDERSTOOD = frozenset((
    "dropout", "is_causal", "sliding_window", "deterministic", "position_ids", "use_cache",
    "cache_position", "output_attentions", "output_hidden_states", "return_dict", "head_mask",
    "position_embeddings", "past_key_values", "past_key_value", "layer_head_mask",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "num_items_in_batch",
    "training", "output_router_logits", "token_type_ids",
))  # fmt: skip
"""Keywords of an attention call that change no number beyond what mask and scores say."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What one call of attention wants.

    visibility  which keys a query sees; None where the mask follows no rule that we know
    features    what a backend must be able to do
    cache       `(kv_heads, key_dim, value_dim)`
    head_dim    of the queries
    """

    visibility: Visibility | None
    features: frozenset[Feature]
    cache: tuple[int, int, int]
    head_dim: int


@dataclass(eq=False)
class Probe:
    """Goes through a backbone in a batch's place and notes every call of attention."""

    layers: list[tuple[nn.Module, Layer]] = field(default_factory=list)

    def note(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any,
        scores: Scores, unknown: bool,
    ) -> None:  # fmt: skip
        """Keep what this call wants."""
        rule = getattr(mask, _RULE, None)
        wanted = set(scores.features())
        if query.shape[1] != key.shape[1]:
            wanted.add("grouped")
        if rule is not None and not rule.causal:
            wanted.add("bidirectional")
        if rule is not None and rule.window is not None:
            wanted.add("window")
        same = query.shape[2] == key.shape[2]  # a decoder's view of its encoder is another matter
        layer = Layer(
            visibility=rule if same and not unknown and scores.bias is None else None,
            features=frozenset(wanted),
            cache=(key.shape[1], key.shape[3], value.shape[3]),
            head_dim=query.shape[3],
        )
        self.layers.append((module, layer))


_RULE = "headswap_rule"
_PROBING = "headswap_probing"


def install(backbone: nn.Module, backend: str) -> None:
    """Let `backbone`'s attention be computed by the backend of that name; an unknown backend is an
    `AttentionError`.

    Its configs are changed, so give a copy that shares the weights (`shared_copy`).
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    name = PREFIX + backend
    AttentionInterface.register(name, partial(attend, backend=ATTENTION.get(backend)))
    AttentionMaskInterface.register(name, make_mask)
    for config in configs(backbone):
        config._attn_implementation_internal = name


def implementations(backbone: nn.Module) -> list[tuple[Any, Any]]:
    """Each config of `backbone` with the name of its attention, for `restore`."""
    return [(c, getattr(c, "_attn_implementation_internal", None)) for c in configs(backbone)]


def restore(before: list[tuple[Any, Any]]) -> None:
    """Undo `install`."""
    for config, name in before:
        config._attn_implementation_internal = name


def configs(backbone: nn.Module) -> list[Any]:
    """Every config that a module of `backbone` holds, and the configs in them; each once."""
    from transformers import PretrainedConfig

    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        if isinstance(config, PretrainedConfig) and id(config) not in found:
            found[id(config)] = config
            for value in vars(config).values():
                add(value)

    for module in backbone.modules():
        for value in vars(module).values():
            add(value)
    return list(found.values())


def probe(backbone: nn.Module, inputs: Mapping[str, Any]) -> list[tuple[nn.Module, Layer]]:
    """The calls of attention in a run over `inputs`, in their order; empty where `backbone` does
    not hand its attention to us."""
    seen = Probe()
    found = configs(backbone)
    try:
        for config in found:
            setattr(config, _PROBING, True)
        with torch.no_grad():
            backbone(**inputs, **{BATCH: seen})
    finally:
        for config in found:
            vars(config).pop(_PROBING, None)
    return seen.layers


def remember(layers: list[tuple[nn.Module, Layer]]) -> None:
    """Write what was learned on the modules, where `attend` finds it."""
    for module, layer in layers:
        vars(module)["headswap_visibility"] = layer.visibility


def keep_cache(layers: list[tuple[nn.Module, Layer]], pages: tuple[Pages, ...]) -> None:
    """Give each layer its pages. They are attributes of the module, so that a compiled layer takes
    them as inputs, as it does with weights, and one graph serves all layers."""
    for (module, _), own in zip(layers, pages, strict=True):
        vars(module)["headswap_pages"] = own


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    backend: AttentionBackend,
    headswap_batch: Any = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: `query` `[batch, heads, queries, head_dim]`, `key` and
    `value` `[batch, kv_heads, keys, head_dim]` -> `[batch, queries, heads, head_dim]`."""
    scores = Scores(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=softcap, sinks=s_aux, bias=more.pop("position_bias", None),
        slopes=more.pop("alibi_slopes", None),
    )  # fmt: skip
    if headswap_batch is None:
        if attention_mask is not None and not attention_mask.shape[-1]:
            raise AttentionError("A batch did not reach a layer's attention.")
        if scores.slopes is not None:
            places = torch.arange(key.shape[2])
            scores = at(scores, places[: query.shape[2]], places)
        return backend.padded(query, key, value, attention_mask, scores), None
    if isinstance(headswap_batch, Probe):
        unknown = any(value is not None for name, value in more.items() if name not in UNDERSTOOD)
        headswap_batch.note(module, query, key, value, attention_mask, scores, unknown)
        return Reference().padded(query, key, value, attention_mask, scores), None
    visibility: Any = module.headswap_visibility
    if isinstance(headswap_batch, PagedBatch):
        pages: Any = module.headswap_pages
        return backend.paged(query, key, value, pages, headswap_batch, visibility, scores), None
    if isinstance(headswap_batch, PackedBatch):
        last = headswap_batch.last
        if last is not None and last.now:
            return last.attend(query, key, value, visibility, scores), None
        return backend.packed(query, key, value, headswap_batch, visibility, scores), None
    raise AttentionError(f"Attention was given a batch of type {type(headswap_batch).__name__}.")


def make_mask(
    batch_size: int, *arguments: Any, mask_function: Callable[..., Any], dtype: torch.dtype,
    config: Any = None, **more: Any,
) -> Tensor:  # fmt: skip
    """transformers' mask function: additive `[batch, 1, queries, keys]`, never None.

    Both releases' signatures: 4.57 says which queries by `cache_position`, 5 by lengths.
    """
    from transformers import masking_utils

    maker: Any = masking_utils.sdpa_mask
    more["allow_is_causal_skip"] = False
    if "allow_is_bidirectional_skip" in inspect.signature(maker).parameters:
        more["allow_is_bidirectional_skip"] = False
    seen: Tensor = maker(batch_size, *arguments, mask_function=mask_function, **more)
    mask = additive(seen, dtype)
    if getattr(config, _PROBING, False):
        setattr(mask, _RULE, learned(mask_function, more.get("local_size")))
    return mask
