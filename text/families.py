# SPDX-License-Identifier: Apache-2.0
"""Default templates of reranker families whose checkpoints are language models. Data.

A family is known by what the checkpoint says: its model type and the words of its label tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RerankerFamily:
    """Pieces of a template (see `text/pairs.py`), and the checkpoints that it belongs to.

    `labels` are the label words, the last of which means relevant; `instructed` stands in place of
    `pieces` where an instruction is given, and is None where the family takes none. `complete`
    pieces hold every mark, so none is added; `strips`: blanks at the ends of texts are dropped.
    """

    name: str
    model_type: str
    labels: tuple[str, ...]
    pieces: tuple[str, ...]
    instructed: tuple[str, ...] | None
    instruction: str
    source: str
    complete: bool = False
    strips: bool = False


_QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n",
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)

_MXBAI_BEFORE = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    "<|im_end|>\n<|im_start|>user\n"
)
_MXBAI_AFTER = (
    "\n",
    "document: {document}",
    "\n",
    "You are a search relevance expert who evaluates how well documents match search queries. For "
    "each query-document pair, carefully analyze the semantic relationship between them, then "
    "provide your binary relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:",
    "<|im_end|>\n<|im_start|>assistant\n",
)

FAMILIES: tuple[RerankerFamily, ...] = (
    RerankerFamily(
        name="Qwen3-Reranker",
        model_type="qwen3",
        labels=("no", "yes"),
        pieces=_QWEN3,
        instructed=_QWEN3,
        instruction="Given a web search query, retrieve relevant passages that answer the query",
        source="the model card of Qwen/Qwen3-Reranker-0.6B: format_instruction, process_inputs",
    ),
    RerankerFamily(
        name="mxbai-rerank-v2",
        model_type="qwen2",
        labels=("0", "1"),
        pieces=(_MXBAI_BEFORE, "query: {query}", *_MXBAI_AFTER),
        instructed=(
            _MXBAI_BEFORE,
            "instruction: {instruction}\nquery: {query}",
            *_MXBAI_AFTER,
        ),
        instruction="",
        source="github.com/mixedbread-ai/mxbai-rerank, mxbai_rerank/mxbai_rerank_v2.py",
    ),
    RerankerFamily(
        name="bge-reranker-v2-gemma",
        model_type="gemma",
        labels=("Yes",),
        pieces=(
            "A: {query}",
            "\n",
            "B: {document}",
            "\n",
            "Given a query A and a passage B, determine whether the passage contains an answer to "
            "the query by providing a prediction of either 'Yes' or 'No'.",
        ),
        instructed=None,
        instruction="",
        source="github.com/FlagOpen/FlagEmbedding, get_inputs of the LLM reranker",
    ),
)


def family_of(model_type: str, labels: Sequence[str]) -> RerankerFamily | None:
    """The family of a model type with these label words: all of them, or the relevant one alone
    (a head made from the difference of two has one label)."""
    for family in FAMILIES:
        if family.model_type == model_type and tuple(labels) in (family.labels, family.labels[-1:]):
            return family
    return None
