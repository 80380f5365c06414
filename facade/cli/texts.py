# SPDX-License-Identifier: Apache-2.0
"""The commands that run texts: `classify`, `rerank`, `embed` and `reward`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from headswap.cli.inputs import read_conversations, read_texts
from headswap.cli.options import (
    AsJson,
    Source,
    with_load_options,
    with_running_options,
    with_scoring_options,
)
from headswap.cli.output import print_json_line, print_table, progress, quiet_libraries, say
from headswap.registry.errors import InputError

Files = Annotated[list[str] | None, typer.Option(help="A file of texts, one a line, or .jsonl.")]
Jsonl = Annotated[
    bool, typer.Option("--jsonl", help="Files and stdin hold JSON lines, whatever their names.")
]
Texts = Annotated[list[str] | None, typer.Argument(help='Texts; "-" reads stdin.')]


@with_load_options
@with_running_options
@with_scoring_options
def classify(
    path: Source,
    texts: Texts = None,
    *,
    load: dict[str, Any],
    running: dict[str, Any],
    scoring: dict[str, Any],
    file: Files = None,
    jsonl: Jsonl = False,
    top_k: Annotated[int | None, typer.Option(min=1, help="Scores in JSON: the best ones.")] = None,
    as_json: AsJson = False,
) -> None:
    """Classify texts given as arguments, in files or on standard input."""
    given = read_texts(texts or [], file or [], jsonl)
    from headswap.text import Classifier

    quiet_libraries()
    classifier = Classifier(path, **scoring, **running, **load)
    with progress("classifying") as update:
        answers = classifier.classify(given, top_k=top_k, progress=update)
    if as_json:
        for text, answer in zip(given, answers, strict=True):
            print_json_line({"text": text, **answer.to_dict()})
        return
    print_table(
        ("label", "score", "text"),
        [(a.label, f"{a.score:.4f}", _shown(text)) for text, a in zip(given, answers, strict=True)],
    )


@with_load_options
@with_running_options
@with_scoring_options
def rerank(
    path: Source,
    query: Annotated[str, typer.Argument(help="What the documents are ranked for.")],
    documents: Annotated[
        list[str] | None, typer.Argument(help='Documents; "-" reads stdin.')
    ] = None,
    *,
    load: dict[str, Any],
    running: dict[str, Any],
    scoring: dict[str, Any],
    file: Files = None,
    jsonl: Jsonl = False,
    top_n: Annotated[int | None, typer.Option(min=1, help="Keep that many.")] = None,
    instruction: Annotated[str | None, typer.Option(help="For a template's slot.")] = None,
    bare: Annotated[bool, typer.Option("--no-template", help="Use no template.")] = False,
    relevance: Annotated[str | None, typer.Option(help="The label that means relevant.")] = None,
    max_query_tokens: Annotated[int, typer.Option(help="Cut the query to that many.")] = 0,
    max_document_tokens: Annotated[int, typer.Option(help="Cut a document to that many.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Rank documents given as arguments, in files or on standard input for a query."""
    given = _strings(read_texts(documents or [], file or [], jsonl))
    template = load.pop("template", None)
    if bare and template is not None:
        raise typer.BadParameter("give --template or --no-template, not both")
    from headswap.text import Reranker

    quiet_libraries()
    reranker = Reranker(
        path, template=None if bare else template or "auto", instruction=instruction,
        relevance=relevance, max_query_tokens=max_query_tokens,
        max_document_tokens=max_document_tokens, **scoring, **running, **load,
    )  # fmt: skip
    with progress("ranking") as update:
        hits = reranker.rank(query, given, top_n=top_n, progress=update)
    if as_json:
        for hit in hits:
            print_json_line(hit.to_dict())
        return
    rows = [(str(hit.index), f"{hit.score:.4f}", hit.document) for hit in hits]
    print_table(("index", "score", "document"), rows)


@with_load_options
@with_running_options
def embed(
    path: Source,
    texts: Texts = None,
    *,
    load: dict[str, Any],
    running: dict[str, Any],
    file: Files = None,
    jsonl: Jsonl = False,
    dimensions: Annotated[int | None, typer.Option(min=1, help="Keep that many numbers.")] = None,
    normalize: Annotated[
        bool | None, typer.Option(help="Vectors of length 1, whatever the checkpoint says.")
    ] = None,
    prompt_name: Annotated[str | None, typer.Option(help="query, document, ...")] = None,
    prompt: Annotated[str | None, typer.Option(help="What stands before each text.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print a vector for each text: numbers with tabs between them, or JSON lines."""
    given = _strings(read_texts(texts or [], file or [], jsonl))
    from headswap.text import Embedder

    quiet_libraries()
    embedder = Embedder(path, **running, **load)
    with progress("embedding") as update:
        vectors = embedder.embed(given, dimensions=dimensions, normalize=normalize,
                                 prompt_name=prompt_name, prompt=prompt,
                                 progress=update)  # fmt: skip
    for text, vector in zip(given, vectors.tolist(), strict=True):
        if as_json:
            print_json_line({"text": text, "embedding": vector})
        else:
            say("\t".join(f"{number:.6g}" for number in vector))


@with_load_options
@with_running_options
def reward(
    path: Source,
    *,
    load: dict[str, Any],
    running: dict[str, Any],
    file: Annotated[
        list[str] | None,
        typer.Option(help='JSON lines: a list of messages, or {"messages": [...]}; "-": stdin.'),
    ] = None,
    good: Annotated[
        str | None, typer.Option("--good", help="Of two labels, the one that means good.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the raw number of each conversation, one a line, or JSON lines."""
    given = read_conversations(file or [])
    from headswap.text import RewardModel

    quiet_libraries()
    running["truncation"] = running.get("truncation", False)
    model = RewardModel(path, label=good, **running, **load)
    with progress("rating") as update:
        numbers = model.reward(given, progress=update)
    for messages, number in zip(given, numbers, strict=True):
        if as_json:
            print_json_line({"messages": messages, "reward": number})
        else:
            say(f"{number:.6g}")


def _shown(text: Any) -> str:
    return text if isinstance(text, str) else " | ".join(text)


def _strings(texts: list[Any]) -> list[str]:
    pairs = tuple(i for i, text in enumerate(texts) if not isinstance(text, str))
    if pairs:
        raise InputError(f"Text {pairs[0]} is a pair; single texts are wanted here.", rows=pairs)
    return texts
