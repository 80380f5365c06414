# SPDX-License-Identifier: Apache-2.0
"""The head table's rows for token classification."""

from __future__ import annotations

from headswap.heads.families import CLASSIFIER, DROPOUT
from headswap.heads.spec import Dense, HeadFamily

TOKEN_SCORE = HeadFamily(
    "token-score", "all", (DROPOUT, Dense("score", "labels")), task="token-classify"
)
"""One linear on every token, as transformers' generic token classifier has it."""

TOKEN_CLASSIFIER = HeadFamily(
    "token-classifier",
    "all",
    (DROPOUT, CLASSIFIER),
    frozenset({"albert", "bert", "camembert", "data2vec-text", "deberta", "deberta-v2",
               "distilbert", "ernie", "gpt2", "layoutlm", "megatron-bert", "rembert", "roberta",
               "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"}),
    task="token-classify",
)  # fmt: skip
"""The same under the name that encoders give it."""
