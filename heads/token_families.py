# SPDX-License-Identifier: Apache-2.0
"""The head table's rows for token classification."""

from __future__ import annotations

from headswap.heads.families import CLASSIFIER
from headswap.heads.prediction_families import prediction
from headswap.heads.spec import HEAD_DROPOUT, Dense, Dropout, Field, HeadFamily

# What the generic token classifier and its kin read, and their rate where a config has none.
_DROPOUT = Dropout(Field(("classifier_dropout", "hidden_dropout"), 0.1))

TOKEN_SCORE = HeadFamily(
    "token-score", "all", (_DROPOUT, Dense("score", "labels")), task="token-classify"
)
"""One linear on every token, as transformers' generic token classifier has it."""

TOKEN_SCORE_UNBIASED = HeadFamily(
    "token-score-unbiased",
    "all",
    (_DROPOUT, Dense("score", "labels", bias=False)),
    frozenset({"qwen3_asr"}),
    task="token-classify",
)
"""The same without a bias."""

TOKEN_CLASSIFIER = HeadFamily(
    "token-classifier",
    "all",
    (Dropout(Field((*HEAD_DROPOUT, "hidden_dropout", "dropout"), 0.1)), CLASSIFIER),
    frozenset({"albert", "bert", "big_bird", "biogpt", "bloom", "bros", "camembert", "canine",
               "convbert", "data2vec-text", "deberta", "deberta-v2", "distilbert", "electra",
               "ernie", "ernie_m", "esm", "falcon", "flaubert", "fnet", "funnel",
               "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gte", "ibert",
               "jina_embeddings_v3", "layoutlm", "lilt", "longformer", "luke", "markuplm", "mega",
               "megatron-bert", "mobilebert", "mpnet", "mpt", "mra", "mt5", "nezha", "nomic_bert",
               "nystromformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert",
               "roformer", "squeezebert", "t5", "ultrabert", "ultravbert", "umt5", "xlm",
               "xlm-roberta", "xlm-roberta-xl", "xmod", "yoso"}),
    task="token-classify",
)  # fmt: skip
"""The same under the name that encoders give it."""

TOKEN_CLASSIFIER_PLAIN = HeadFamily(
    "token-classifier-plain",
    "all",
    (CLASSIFIER,),
    frozenset({"eurobert", "xlnet"}),
    task="token-classify",
)
"""The same without dropout."""

TOKEN_MODERNBERT = HeadFamily(
    "token-modernbert",
    "all",
    prediction(None, CLASSIFIER),
    frozenset({"modernbert"}),
    task="token-classify",
)
"""ModernBERT's prediction head on every token."""

TOKEN_MODERNVBERT = HeadFamily(
    "token-modernvbert",
    "all",
    prediction("text_config", CLASSIFIER),
    frozenset({"modernvbert"}),
    task="token-classify",
)
"""The same, steered by the text model's own config."""

TOKEN_T5GEMMA = HeadFamily(
    "token-t5gemma",
    "all",
    (Dropout(Field(("classifier_dropout_rate",), 0.0)), Dense("score.out_proj", "labels")),
    frozenset({"t5gemma", "t5gemma2"}),
    task="token-classify",
)
"""T5Gemma's linear on every state of the decoder."""
