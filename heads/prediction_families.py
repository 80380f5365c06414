# SPDX-License-Identifier: Apache-2.0
"""The head table's rows with ModernBERT's prediction head, and those that left it out."""

from __future__ import annotations

from headswap.heads.families import CLASSIFIER
from headswap.heads.spec import Activation, Dense, Dropout, Field, HeadFamily, Norm

_CLS_OR_MEAN = Field(("classifier_pooling",), "cls", words={"cls": "first", "mean": "mean"})


def prediction(
    section: str | None, output: Dense
) -> tuple[Dense | Activation | Norm | Dropout, ...]:
    """ModernBERT's layers before and with `output`, steered by the config's inner `section`."""

    def read(name: str, default: object) -> Field:
        return Field((name,), default, section)

    return (
        Dense("head.dense", bias=read("classifier_bias", False)),
        Activation(read("classifier_activation", "gelu")),
        Norm("head.norm", read("norm_eps", 1e-5), read("norm_bias", False)),
        Dropout(Field(("classifier_dropout",), 0.0)),
        output,
    )


MODERNBERT = HeadFamily(
    "modernbert", _CLS_OR_MEAN, prediction(None, CLASSIFIER), frozenset({"modernbert"})
)
"""ModernBERT's prediction head: dense, activation, norm, linear."""

MODERNVBERT = HeadFamily(
    "modernvbert", _CLS_OR_MEAN, prediction("text_config", CLASSIFIER), frozenset({"modernvbert"})
)
"""The same, steered by the text model's own config."""

MODERNBERT_DECODER = HeadFamily(
    "modernbert-decoder",
    "last",
    prediction(None, Dense("classifier", "labels", Field(("classifier_bias",), False))),
    frozenset({"modernbert-decoder"}),
)
"""The same on the last token."""

ULTRABERT = HeadFamily(
    "ultrabert",
    _CLS_OR_MEAN,
    (Dropout(Field(("classifier_dropout",), 0.0)), CLASSIFIER),
    frozenset({"ultrabert", "ultravbert"}),
)
"""A linear on the first token or the mean."""
