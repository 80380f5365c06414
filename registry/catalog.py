# SPDX-License-Identifier: Apache-2.0
"""Names that checkpoints still carry although transformers no longer has them. Data only, sorted.

A name that the installed transformers does have is served by it, whatever stands here.
"""

from __future__ import annotations

from headswap.registry.state import Head, Retired


def _heads(module: str, *names: str) -> dict[str, Head]:
    at = f"headswap.heads.{module}"
    return {n: Head(f"{at}:{n.upper().replace('-', '_')}", "headswap") for n in names}


HEADS: dict[str, Head] = {
    **_heads(
        "families",
        "albert",
        "bart",
        "bert",
        "big-bird",
        "canine",
        "cohere-compass",
        "ctrl",
        "deberta",
        "distilbert",
        "electra",
        "eurobert",
        "funnel",
        "inkling",
        "mobilebert",
        "perceiver",
        "roberta",
        "score",
        "score-by-count",
        "score-mlp",
        "t5gemma",
        "xlm",
        "xlnet",
    ),
    **_heads("prediction_families", "modernbert", "modernbert-decoder", "modernvbert", "ultrabert"),
    **_heads(
        "token_families",
        "token-classifier",
        "token-classifier-plain",
        "token-modernbert",
        "token-modernvbert",
        "token-score",
        "token-score-unbiased",
        "token-t5gemma",
    ),
}
"""The head table's rows, by name; imported on use."""

ALIASES: dict[str, str] = {
    # Early conversions of LLaMA, before transformers settled on the spelling.
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "LLaMAForSequenceClassification": "LlamaForSequenceClassification",
}

_REMOVED = (
    "ErnieMForSequenceClassification",
    "ErnieMForTokenClassification",
    "ErnieMModel",
    "LEDForSequenceClassification",
    "MegaForCausalLM",
    "MegaForMaskedLM",
    "MegaForSequenceClassification",
    "MegaForTokenClassification",
    "MegaModel",
    "NezhaForMaskedLM",
    "NezhaForSequenceClassification",
    "NezhaForTokenClassification",
    "NezhaModel",
    "OpenLlamaForCausalLM",
    "OpenLlamaForSequenceClassification",
    "OpenLlamaModel",
    "QDQBertForMaskedLM",
    "QDQBertForSequenceClassification",
    "QDQBertForTokenClassification",
    "QDQBertLMHeadModel",
    "QDQBertModel",
    "Speech2Text2ForCausalLM",
    "TransfoXLForSequenceClassification",
    "TransfoXLLMHeadModel",
    "TransfoXLModel",
    "XLMProphetNetForCausalLM",
    "XLMProphetNetForConditionalGeneration",
    "XLMProphetNetModel",
)

# Code that lived in checkpoints before transformers took the family in, under another config.
_RENAMED = {
    "MPTForCausalLM": "MptForCausalLM",
    "RWForCausalLM": "FalconForCausalLM",
    "RWForSequenceClassification": "FalconForSequenceClassification",
    "RWModel": "FalconModel",
}

RETIRED: dict[str, Retired] = {
    **{
        name: Retired(
            removed_in="transformers 5.0", install_hint="pip install 'transformers>=4.57,<5'"
        )
        for name in _REMOVED
    },
    **{name: Retired(renamed_to=new) for name, new in _RENAMED.items()},
}
