# SPDX-License-Identifier: Apache-2.0
"""Stored tensors that a converted model has no use for, each with its reason."""

from __future__ import annotations

import re
from typing import Any

_DROPS = tuple(
    (re.compile(pattern), reason)
    for pattern, reason in (
        (r"(^|\.)(lm_head|embed_out|output_projection|proj_out)\.", "language-model head"),
        (r"^(cls|predictions|generator_predictions|discriminator_predictions|vocab_transform|"
         r"vocab_layer_norm|vocab_projector|lm_predictions|pred_layer|lm_loss|"
         r"mlm_bias_fc|output)\.", "pre-training head"),
        (r"^funnel\.decoder\.", "decoder that a classifier does without"),
        (r"(^|\.)pooler\.", "pooler that this head does not use"),
        (r"(^|\.)(position_ids|token_type_ids)$", "buffer that is computed, not stored"),
        (r"\.rotary_emb\.inv_freq$|\.inv_freq$", "buffer that is computed, not stored"),
        (r"\.attn\.(masked_)?bias$|\.attention\.(masked_)?bias$", "causal mask buffer"),
    )
)  # fmt: skip
# Heads of other tasks, which a model without one leaves out.
_HEADS = re.compile(r"^(score|scores|classifier|value_head|v_head|pre_classifier)\.")


def drop_reason(name: str, cls: Any = None) -> str | None:
    """Why a converted model (of class `cls`) needs no tensor `name`; None if no reason is known."""
    if getattr(getattr(cls, "conversion", None), "task", None) == "embed" and _HEADS.match(name):
        return "head that an embedder does not use"
    return next((reason for pattern, reason in _DROPS if pattern.search(name)), None)
