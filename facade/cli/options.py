# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, declared once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

Source = Annotated[str, typer.Argument(help="A checkpoint folder, a .gguf file or a hub id.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16: the backbone's numbers.")
]

LABEL_TOKEN = "--label-token"
LABEL_ID = "--label-id"

# Name of the keyword of `headswap.load` -> how the command line spells it.
LOAD: dict[str, Any] = {
    "task": Annotated[str | None, typer.Option(help="classify, reward, embed or token-classify.")],
    "label_tokens": Annotated[
        list[str] | None,
        typer.Option(LABEL_TOKEN, help="A word that is one token; one for each label, in order."),
    ],
    "label_ids": Annotated[
        list[int] | None, typer.Option(LABEL_ID, help="A token id in place of a word.")
    ],
    "method": Annotated[
        str | None, typer.Option(help="rows (a row a token) or difference (second - first).")
    ],
    "num_labels": Annotated[int | None, typer.Option(min=1, help="How many labels.")],
    "id2label": Annotated[
        list[str] | None, typer.Option("--label", help="A label's name; repeat, in order.")
    ],
    "problem_type": Annotated[
        str | None,
        typer.Option(help="regression, single_label_classification or multi_label_classification."),
    ],
    "head": Annotated[str | None, typer.Option(help="Another head family, such as bert.")],
    "pooling": Annotated[str | None, typer.Option(help="last, first, mean or compat.")],
    "template": Annotated[
        str | None, typer.Option(help="Around a text ({text}) or a pair ({query}, {document}).")
    ],
    "allow_untrained_head": Annotated[
        bool, typer.Option("--allow-untrained-head", help="Start a missing head at random.")
    ],
    "trust_remote_code": Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that lies in the checkpoint.")
    ],
    "adapter": Annotated[str | None, typer.Option(help="A PEFT adapter to merge: folder or id.")],
}


# How scores are made of logits, for `classify` and `rerank`.
SCORING: dict[str, Any] = {
    "activation": Annotated[str | None, typer.Option(help="softmax, sigmoid or identity.")],
    "mean": Annotated[
        float | None,
        typer.Option(help="(logit - mean) / sigma / temperature stands before the activation."),
    ],
    "sigma": Annotated[float | None, typer.Option(help="See --mean.")],
    "temperature": Annotated[float | None, typer.Option(help="See --mean.")],
    "raw": Annotated[
        bool, typer.Option("--raw", help="The model's own logits: no calibration, no activation.")
    ],
}

# How texts are run, for every command that runs some.
RUNNING: dict[str, Any] = {
    "batch_size": Annotated[int | None, typer.Option(min=1, help="Texts in one run (32).")],
    "max_length": Annotated[int | None, typer.Option(min=1, help="Tokens of a text or pair.")],
    "truncation": Annotated[
        bool | None, typer.Option(help="Cut a longer text (the default), or refuse it.")
    ],
    "cut": Annotated[
        str | None, typer.Option(help="left or right: the side that is cut (the tokenizer's own).")
    ],
    "dtype": Dtype,
}


def with_load_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `headswap.load` to a command, which gets them as the dict `load`."""
    return _with("load", LOAD, given_options, command)


def with_scoring_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of scores; the command gets `activation` and `calibration` as `scoring`."""
    return _with("scoring", SCORING, scoring_options, command)


def with_running_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of runs; the command gets those that were given as the dict `running`."""
    return _with("running", RUNNING, running_options, command)


def _with(
    name: str,
    table: dict[str, Any],
    read: Callable[[dict[str, Any]], dict[str, Any]],
    command: Callable[..., Any],
) -> Callable[..., Any]:
    """Add the options in `table` to a command, which gets what `read` makes of them as `name`."""
    own = inspect.signature(command, eval_str=True)
    kept = [p for key, p in own.parameters.items() if key != name]
    shared = [
        inspect.Parameter(
            key,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if hint.__args__[0] is bool else None,
            annotation=hint,
        )
        for key, hint in table.items()
    ]

    @functools.wraps(command)
    def run(**given: Any) -> Any:
        return command(**{name: read({key: given.pop(key) for key in table})}, **given)

    signature = own.replace(parameters=[*kept, *shared])
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return run


def scoring_options(values: dict[str, Any]) -> dict[str, Any]:
    """`activation` and `calibration` as the classes in `headswap.text` take them."""
    numbers = {n: values[n] for n in ("mean", "sigma", "temperature") if values[n] is not None}
    activation = values["activation"]
    if not values["raw"]:
        return {"activation": activation, "calibration": numbers or None}
    if numbers or activation not in (None, "identity"):
        raise typer.BadParameter("--raw means no calibration and no activation; give one of them")
    return {"activation": "identity", "calibration": {}}


def running_options(values: dict[str, Any]) -> dict[str, Any]:
    """The options of runs that were given, the side that is cut among them as `truncation`."""
    side, dtype = values.pop("cut"), dtype_of(values.pop("dtype"))
    if side is not None and values["truncation"] is False:
        raise typer.BadParameter("give --cut or --no-truncation, not both")
    if side is not None:
        values["truncation"] = side
    values["dtype"] = dtype
    return {name: value for name, value in values.items() if value is not None}


def given_options(values: dict[str, Any]) -> dict[str, Any]:
    """The keywords of `headswap.load` that were given, label ids joined with label words."""
    ids = values.pop("label_ids")
    words = values.pop("label_tokens")
    if ids and words:
        raise typer.BadParameter(f"give {LABEL_TOKEN} or {LABEL_ID}, not both")
    values["label_tokens"] = ids or words
    return {name: value for name, value in values.items() if value not in (None, False, [])}


def dtype_of(name: str | None) -> Any:
    """torch's dtype of that name; None for none."""
    if name is None:
        return None
    import torch

    known = ("float32", "bfloat16", "float16")
    if name not in known:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(known)}")
    return getattr(torch, name)
