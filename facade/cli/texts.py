# SPDX-License-Identifier: Apache-2.0
"""The commands `rerank` and `embed`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from headswap.cli.inputs import read_texts
from headswap.cli.options import AsJson, Dtype, Source, dtype_of, with_load_options
from headswap.cli.output import print_json_line, print_table, progress, quiet_libraries, say
from headswap.registry.errors import InputError

Files = Annotated[list[str] | None, typer.Option(help="A file of texts, one a line, or .jsonl.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Texts in one run.")]
MaxLength = Annotated[int | None, typer.Option(min=1, help="Tokens of a text or pair.")]
Truncation = Annotated[bool, typer.Option(help="Cut a longer text, or refuse it.")]


@with_load_options
def rerank(
    path: Source,
    query: Annotated[str, typer.Argument(help="What the documents are ranked for.")],
    documents: Annotated[
        list[str] | None, typer.Argument(help='Documents; "-" reads stdin.')
    ] = None,
    *,
    load: dict[str, Any],
    file: Files = None,
    top_n: Annotated[int | None, typer.Option(min=1, help="Keep that many.")] = None,
    instruction: Annotated[str | None, typer.Option(help="For a template's slot.")] = None,
    bare: Annotated[bool, typer.Option("--no-template", help="Use no template.")] = False,
    relevance: Annotated[str | None, typer.Option(help="The label that means relevant.")] = None,
    activation: Annotated[str | None, typer.Option(help="softmax, sigmoid or identity.")] = None,
    batch_size: BatchSize = 32,
    max_length: MaxLength = None,
    truncation: Truncation = True,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Rank documents given as arguments, in files or on standard input for a query."""
    given = _strings(read_texts(documents or [], file or []))
    template = load.pop("template", None)
    if bare and template is not None:
        raise typer.BadParameter("give --template or --no-template, not both")
    from headswap.text import Reranker

    quiet_libraries()
    reranker = Reranker(
        path, template=None if bare else template or "auto", instruction=instruction,
        relevance=relevance, activation=activation, batch_size=batch_size, max_length=max_length,
        truncation=truncation, dtype=dtype_of(dtype), **load,
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
def embed(
    path: Source,
    texts: Annotated[list[str] | None, typer.Argument(help='Texts; "-" reads stdin.')] = None,
    *,
    load: dict[str, Any],
    file: Files = None,
    dimensions: Annotated[int | None, typer.Option(min=1, help="Keep that many numbers.")] = None,
    normalize: Annotated[
        bool | None, typer.Option(help="Vectors of length 1, whatever the checkpoint says.")
    ] = None,
    prompt_name: Annotated[str | None, typer.Option(help="query, document, ...")] = None,
    batch_size: BatchSize = 32,
    max_length: MaxLength = None,
    truncation: Truncation = True,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Print a vector for each text: numbers with tabs between them, or JSON lines."""
    given = _strings(read_texts(texts or [], file or []))
    from headswap.text import Embedder

    quiet_libraries()
    embedder = Embedder(path, batch_size=batch_size, max_length=max_length, truncation=truncation,
                        dtype=dtype_of(dtype), **load)  # fmt: skip
    with progress("embedding") as update:
        vectors = embedder.embed(given, dimensions=dimensions, normalize=normalize,
                                 prompt_name=prompt_name, progress=update)  # fmt: skip
    for text, vector in zip(given, vectors.tolist(), strict=True):
        if as_json:
            print_json_line({"text": text, "embedding": vector})
        else:
            say("\t".join(f"{number:.6g}" for number in vector))


def _strings(texts: list[Any]) -> list[str]:
    pairs = tuple(i for i, text in enumerate(texts) if not isinstance(text, str))
    if pairs:
        raise InputError(f"Text {pairs[0]} is a pair; single texts are wanted here.", rows=pairs)
    return texts
