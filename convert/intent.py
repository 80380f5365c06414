# SPDX-License-Identifier: Apache-2.0
"""What a causal checkpoint itself says of the tokens that are its labels.

Two spellings are in use: sentence-transformers' `LogitScore` module (from 5.4 on), and fields of
config.json that vLLM reads (`classifier_from_token`, `method`, `is_original_qwen3_reranker`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headswap.convert.checkpoint import Checkpoint
from headswap.convert.conversion import Method
from headswap.convert.decide import Options
from headswap.convert.derive import label_token_ids
from headswap.registry.errors import CheckpointError, ConversionError, LabelError

TOKENS, METHOD, QWEN = "classifier_from_token", "method", "is_original_qwen3_reranker"
FIELDS = (TOKENS, METHOD, QWEN)
METHODS: dict[str, Method] = {"from_2_way_softmax": "difference", "no_post_processing": "rows"}
_INPUT = "causal_logits"


@dataclass(frozen=True)
class Intent:
    """Label tokens and method, as `headswap.load` takes them, and the file that says so."""

    tokens: tuple[str | int, ...]
    method: Method
    source: str


def stored_intent(checkpoint: Checkpoint) -> Intent | None:
    """The label tokens that `checkpoint` names; None where it names none.

    Raises `LabelError` for half of a statement, for an unknown method, and where two places
    contradict each other; each names the file and the field.
    """
    if checkpoint.gguf_file:
        return None
    module, fields = _logit_score(checkpoint.folder), _config_fields(checkpoint)
    if module is not None and fields is not None:
        _check_same(checkpoint, module, fields)
    found = module or fields
    return None if found is None else _in_words(found, checkpoint)


def intended(
    checkpoint: Checkpoint, options: Options, has_head: Callable[[], bool]
) -> tuple[Options, tuple[str, ...]]:
    """`options` with the checkpoint's own label tokens where the caller gave none, and a note.

    A head that is stored already (`has_head()`) is used; it was made from those tokens once.
    """
    free = options.label_tokens is None and options.task in (None, "classify", "reward")
    found = stored_intent(checkpoint) if free and not options.allow_untrained_head else None
    if found is None:
        return options, ()
    said = f"{found.source} makes the head of the tokens {list(found.tokens)}"
    if has_head():
        return options, (f"{said}; not done again, since a head is stored",)
    if options.head is not None:
        raise ConversionError(
            f"head={options.head!r} was asked for, but {said}. Pass allow_untrained_head=True for "
            "a new head."
        )
    method = options.method or found.method
    return replace(options, label_tokens=list(found.tokens), method=method), (said,)


def without_intent(config: Any) -> Any:
    """`config` without the statement, which the head that was made of it replaces."""
    for level in (config, config.get_text_config()):
        if level.__dict__.get(TOKENS) is not None:
            for name in FIELDS:
                level.__dict__.pop(name, None)
    return config


def _logit_score(folder: Path) -> Intent | None:
    """sentence-transformers' module: the true token's logit, less the false one's if it has one."""
    file = folder / "modules.json"
    listed = _read(file, list) if file.is_file() else []
    paths = [str(module.get("path", "")) for module in listed if isinstance(module, Mapping)
             and str(module.get("type", "")).endswith(".LogitScore")]  # fmt: skip
    if not paths:
        return None
    at = folder / paths[0] / "config.json"
    if len(paths) > 1 or not at.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(
            f"{file} lists the LogitScore modules {paths}; expected one, inside the folder.",
            path=str(file),
        )
    config = _read(at, dict)
    true, false = config.get("true_token_id"), config.get("false_token_id")
    if type(true) is not int or type(false) not in (int, type(None)):
        raise LabelError(
            f"{at}: true_token_id is {true!r} and false_token_id {false!r}; expected a token id, "
            "and a token id or null."
        )
    if config.get("module_input_name", _INPUT) != _INPUT:
        raise LabelError(
            f"{at}: module_input_name is {config['module_input_name']!r}; headswap scores "
            f"{_INPUT!r} only. Pass label_tokens."
        )
    if false is None:
        return Intent((true,), "rows", str(at))
    return Intent((false, true), "difference", str(at))


def _config_fields(checkpoint: Checkpoint) -> Intent | None:
    """The fields of config.json, on its outer level or on that of its text model."""
    file = f"{checkpoint.folder / 'config.json'}"
    inner = checkpoint.raw.get("text_config")
    levels = [checkpoint.raw, inner if isinstance(inner, Mapping) else {}]
    said = {name: _agreed(file, name, levels) for name in FIELDS}
    tokens, method, qwen = said[TOKENS], said[METHOD], said[QWEN] is True
    if tokens is None:
        if method in METHODS or qwen:
            name = QWEN if qwen else METHOD
            raise LabelError(
                f"{file} has {name}={said[name]!r} but no {TOKENS}; add the label tokens there, or "
                "pass label_tokens."
            )
        return None  # other tools may have a `method` of their own
    if not isinstance(tokens, list) or not tokens:
        raise LabelError(f"{file}: {TOKENS} is {tokens!r}; expected a list of tokens.")
    if method is None and not qwen:
        raise LabelError(
            f"{file} has {TOKENS}={tokens!r} but no {METHOD}; add one of {', '.join(METHODS)}, or "
            "pass label_tokens and method."
        )
    if method is not None and method not in METHODS:
        raise LabelError(
            f"{file}: {METHOD}={method!r} is unknown; known: {', '.join(METHODS)}. Or pass "
            "label_tokens and method."
        )
    chosen: Method = "difference" if method is None else METHODS[method]
    if chosen == "difference" and len(tokens) != 2:
        raise LabelError(
            f"{file}: {TOKENS} has {len(tokens)} tokens; a two-way softmax needs two, the negative "
            "one first."
        )
    return Intent(tuple(tokens), chosen, file)


def _agreed(file: str, name: str, levels: list[Mapping[str, Any]]) -> Any:
    values = [level[name] for level in levels if level.get(name) is not None]
    if len(values) == 2 and values[0] != values[1]:
        raise LabelError(
            f"{file}: {name} is {values[0]!r}, and {values[1]!r} in text_config. Keep one."
        )
    return values[0] if values else None


def _check_same(checkpoint: Checkpoint, one: Intent, other: Intent) -> None:
    if (_ids(one, checkpoint), one.method) != (_ids(other, checkpoint), other.method):
        raise LabelError(
            f"{one.source} makes the head of the tokens {list(one.tokens)} ({one.method}), and "
            f"{other.source} of {list(other.tokens)} ({other.method}). Keep one, or pass "
            "label_tokens and method."
        )


def _ids(intent: Intent, checkpoint: Checkpoint) -> tuple[int, ...]:
    words = any(isinstance(token, str) for token in intent.tokens)
    tokenizer = checkpoint.tokenizer() if words else None
    size = checkpoint.config.get_text_config().vocab_size
    return label_token_ids(list(intent.tokens), tokenizer, size)


def _in_words(intent: Intent, checkpoint: Checkpoint) -> Intent:
    """Ids as the words that they stand for, so that labels have names people can read."""
    if not checkpoint.has_tokenizer or any(isinstance(token, str) for token in intent.tokens):
        return intent
    words = tuple(checkpoint.tokenizer().convert_ids_to_tokens(list(intent.tokens)))
    if any(not isinstance(word, str) for word in words):
        return intent  # out of range: refused later, with the size of the vocabulary
    spelled = Intent(words, intent.method, intent.source)
    return spelled if _ids(spelled, checkpoint) == intent.tokens else intent


def _read(file: Path, kind: type) -> Any:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} can't be read: {error}", path=str(file)) from error
    if not isinstance(found, kind):
        raise CheckpointError(f"{file} does not hold a JSON {kind.__name__}.", path=str(file))
    return found
