# SPDX-License-Identifier: Apache-2.0
"""The head table: one row a family. Data only; the order of a row's layers is the formula.

Each row was compared with transformers' own classes (see `tests/conformance`).
"""

from __future__ import annotations

from headswap.heads.spec import (
    BASE,
    HEAD_DROPOUT,
    Activation,
    Dense,
    Divide,
    Dropout,
    Field,
    HeadFamily,
    When,
)

DROPOUT = Dropout(Field(HEAD_DROPOUT, 0.0))
CLASSIFIER = Dense("classifier", "labels")

# -- on the last token ----------------------------------------------------------------------------

SCORE = HeadFamily(
    "score",
    "last",
    (Dense("score", "labels", bias=False),),
    # These repeat transformers' generic class instead of inheriting it; `native_family` knows
    # the ones that inherit.
    frozenset({"biogpt@5", "bloom", "falcon", "gemma3", "gpt-sw3", "gpt2", "gpt_bigcode",
               "gpt_neo", "gpt_neox", "gptj", "mpt", "open-llama", "openai-gpt", "opt",
               "qwen3_5", "zamba", "zamba2"}),
)  # fmt: skip
"""GPT style: one linear without bias on the last real token."""

SCORE_BY_COUNT = HeadFamily(
    "score-by-count", "last", SCORE.layers, frozenset({"biogpt@4"}), pad_rule="count"
)
"""The same, in the release whose BioGPT counts the ids that are not the pad id."""

INKLING = HeadFamily(
    "inkling",
    "last",
    (Divide(Field(("logits_mup_width_multiplier",), 1.0)), *SCORE.layers),
    causal_types=frozenset({"inkling_text"}),
)
"""The score head on the state that the causal class feeds its output embedding."""

SCORE_MLP = HeadFamily(
    "score-mlp", "last", (Dense("score.0"), Activation("relu"), Dense("score.2", "labels"))
)
"""Two linears with a ReLU between: Qwen2.5's reward models."""

CTRL = HeadFamily("ctrl", "last", (Dense("classifier", "labels", bias=False),), frozenset({"ctrl"}))
"""The score head under another name."""

COHERE_COMPASS = HeadFamily(
    "cohere-compass",
    # The class takes the mean of scores, which without a bias is the score of the mean.
    Field(("pooling",), "eos", words={"eos": "last", "bos": "first", "mean": "mean"}),
    SCORE.layers,
    frozenset({"cohere_compass_text"}),
)
"""The score head with a choice of pooling."""

# -- dense, activation and projection in the head, on the first token -----------------------------


def _roberta(activation: str | Field) -> tuple[Dropout | Dense | Activation, ...]:
    return (
        DROPOUT,
        Dense("classifier.dense"),
        Activation(activation),
        DROPOUT,
        Dense("classifier.out_proj", "labels"),
    )


ROBERTA = HeadFamily(
    "roberta",
    "first",
    _roberta("tanh"),
    frozenset({"camembert", "data2vec-text", "esm", "esmc", "ibert", "jina_embeddings_v3",
               "layoutlmv3", "lilt", "longformer", "mega", "mpnet", "reformer", "roberta",
               "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"}),
)  # fmt: skip
"""RoBERTa style: dense, tanh and a projection in the head itself, on the first token."""

ELECTRA = HeadFamily("electra", "first", _roberta("gelu"), frozenset({"electra"}))
"""RoBERTa's head with gelu."""

BIG_BIRD = HeadFamily(
    "big-bird",
    "first",
    _roberta(Field(("hidden_act",), "gelu")),
    frozenset({"big_bird", "convbert", "mra", "nystromformer", "roformer", "yoso"}),
)
"""RoBERTa's head with the backbone's own activation."""

FUNNEL = HeadFamily(
    "funnel",
    "first",
    (
        Dense("classifier.linear_hidden"),
        Activation("tanh"),
        Dropout(Field(("hidden_dropout",), 0.0)),
        Dense("classifier.linear_out", "labels"),
    ),
    frozenset({"funnel"}),
)
"""RoBERTa's head under other names, on the shortened states."""

# -- a pooler on the first token, then a linear ---------------------------------------------------

BERT = HeadFamily(
    "bert",
    "first",
    (Dense(f"{BASE}.pooler.dense"), Activation("tanh"), DROPOUT, CLASSIFIER),
    frozenset({"bert", "ernie", "ernie_m", "fnet", "gte", "layoutlm", "luke", "markuplm",
               "megatron-bert", "nezha", "nomic_bert", "rembert", "roc_bert", "squeezebert",
               "tapas"}),
)  # fmt: skip
"""BERT style: the backbone's pooler (dense, tanh) on the first token, then a linear."""

ALBERT = HeadFamily(
    "albert",
    "first",
    (Dense(f"{BASE}.pooler"), Activation("tanh"), DROPOUT, CLASSIFIER),
    frozenset({"albert"}),
)
"""BERT's head, with a pooler that is a bare linear layer."""

MOBILEBERT = HeadFamily(
    "mobilebert",
    "first",
    (
        When(
            Field(("classifier_activation",), True),
            (Dense(f"{BASE}.pooler.dense"), Activation("tanh")),
        ),
        DROPOUT,
        CLASSIFIER,
    ),
    frozenset({"mobilebert"}),
)
"""BERT's head, whose pooler can be switched off."""

DEBERTA = HeadFamily(
    "deberta",
    "first",
    (
        Dropout(Field(("pooler_dropout",), 0.0)),
        Dense("pooler.dense"),
        Activation(Field(("pooler_hidden_act",), "gelu")),
        Dropout(Field(("cls_dropout", "hidden_dropout_prob"), 0.0)),
        CLASSIFIER,
    ),
    frozenset({"deberta", "deberta-v2"}),
)
"""BERT's head with the pooler beside the backbone and an activation of its own."""

DISTILBERT = HeadFamily(
    "distilbert",
    "first",
    (
        Dense("pre_classifier"),
        Activation("relu"),
        Dropout(Field(("seq_classif_dropout",), 0.0)),
        CLASSIFIER,
    ),
    frozenset({"distilbert"}),
)
"""A pooler under another name, with ReLU."""

EUROBERT = HeadFamily(
    "eurobert",
    Field(("classifier_pooling",), "late", words={"late": "late", "bos": "first", "mean": "mean"}),
    (Dense("dense"), Activation("gelu"), CLASSIFIER),
    frozenset({"eurobert"}),
)
"""A pooler under another name, with gelu and a choice of pooling."""

CANINE = HeadFamily("canine", "pooler", (DROPOUT, CLASSIFIER), frozenset({"canine"}))
"""A linear on what the backbone pools by itself, out of states that it does not return."""

# -- encoder-decoders -----------------------------------------------------------------------------

BART = HeadFamily(
    "bart",
    "eos",
    (
        Dropout(Field(("classifier_dropout",), 0.0)),
        Dense("classification_head.dense"),
        Activation("tanh"),
        Dropout(Field(("classifier_dropout",), 0.0)),
        Dense("classification_head.out_proj", "labels"),
    ),
    frozenset({"bart", "bigbird_pegasus", "led", "mbart", "mt5", "mvp", "plbart", "t5", "umt5"}),
    pad_rule="position",
)
"""RoBERTa's head on the decoder's state at the last end mark."""

T5GEMMA = HeadFamily(
    "t5gemma",
    # The class adds one to the index of the last token, "due to the right shift".
    Field(("is_encoder_decoder",), True, words={True: "next", False: "last"}),
    (Dropout(Field(("classifier_dropout_rate",), 0.0)), Dense("score.out_proj", "labels")),
    frozenset({"t5gemma", "t5gemma2"}),
)
"""A linear on the decoder's state behind the last token, or at the end of the padded row."""

# -- sequence summaries ---------------------------------------------------------------------------

_SUMMARY = {"last": "last", "first": "first", "mean": "mean", "cls_index": "last"}


def _summary(width: dict[bool, str]) -> tuple[Dropout | When | Activation, ...]:
    return (
        Dropout(Field(("summary_first_dropout",), 0.0)),
        When(
            Field(("summary_use_proj",), True),
            (
                Dense(
                    "sequence_summary.summary",
                    Field(("summary_proj_to_labels",), True, words=width),
                ),
            ),
        ),
        Activation(Field(("summary_activation",), "linear")),
        Dropout(Field(("summary_last_dropout",), 0.0)),
    )


XLM = HeadFamily(
    "xlm",
    Field(("summary_type",), "first", words=_SUMMARY),
    _summary({True: "labels", False: "hidden"}),
    frozenset({"flaubert", "xlm"}),
    pad_rule="position",
)
"""XLM's sequence summary, which gives the labels itself."""

XLNET = HeadFamily(
    "xlnet",
    Field(("summary_type",), "last", words=_SUMMARY),
    (*_summary({True: "hidden", False: "hidden"}), Dense("logits_proj", "labels")),
    frozenset({"xlnet"}),
    pad_rule="position",
)
"""XLNet's sequence summary (dense, activation) and a projection, on the last token."""

# -- heads that the backbone runs -----------------------------------------------------------------

PERCEIVER = HeadFamily(
    "perceiver",
    "logits",
    (Dense(f"{BASE}.decoder.decoder.final_layer", "labels", applied=True),),
    frozenset({"perceiver"}),
)
"""Perceiver's decoder: a learned query over the latents, inside the backbone."""
