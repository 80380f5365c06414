# SPDX-License-Identifier: Apache-2.0
"""What a causal checkpoint itself says of the tokens that are its labels.

Two spellings are in use: sentence-transformers' `LogitScore` module (from 5.4 on), and fields of
config.json that vLLM reads (`classifier_from_token`, `method`, `is_original_qwen3_reranker`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headswap.convert.checkpoint import Checkpoint
from headswap.convert.conversion import Method
from headswap.convert.decide import Options
from headswap.convert.derive import label_token_ids
from headswap.convert.modules import listed_modules
from headswap.convert.weights import read_json
from headswap.registry.errors import CheckpointError, ConversionError, LabelError

TOKENS, METHOD, QWEN = "classifier_from_token", "method", "is_original_qwen3_reranker"
FIELDS = (TOKENS, METHOD, QWEN)
METHODS: dict[str, Method] = {"from_2_way_softmax": "difference", "no_post_processing": "rows"}
_INPUT = "causal_logits"


@dataclass(frozen=True)
class Intent:
    """Label tokens and method, as `headswap.load` takes them, the file that says so, and the names
    of the labels where they are not the tokens."""

    tokens: tuple[str | int, ...]
    method: Method
    source: str
    names: tuple[str, ...] | None = None


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
    return None if found is None else _named(found, checkpoint)


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
    method, names = options.method or found.method, options.id2label or found.names
    asked = replace(options, label_tokens=list(found.tokens), method=method, id2label=names)
    return asked, (said,)


def without_intent(config: Any) -> Any:
    """`config` without the statement, which the head that was made of it replaces."""
    for level in (config, config.get_text_config()):
        held = getattr(level, "__dict__", {})  # an inner config may be a plain object
        if held.get(TOKENS) is not None:
            for name in FIELDS:
                held.pop(name, None)
    return config


def _logit_score(folder: Path) -> Intent | None:
    """sentence-transformers' module: the true token's logit, less the false one's if it has one."""
    found = [place for kind, place in listed_modules(folder) if kind.endswith(".LogitScore")]
    if not found:
        return None
    if len(found) > 1:
        raise CheckpointError(
            f"{folder / 'modules.json'} lists {len(found)} LogitScore modules; expected one.",
            path=str(folder),
        )
    at = found[0] / "config.json"
    config = read_json(at)
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


def _named(intent: Intent, checkpoint: Checkpoint) -> Intent:
    """Ids with the words that they stand for, so that labels have names people can read."""
    if not checkpoint.has_tokenizer or any(isinstance(token, str) for token in intent.tokens):
        return intent
    tokenizer = checkpoint.tokenizer()
    of_labels = intent.tokens[-1:] if intent.method == "difference" else intent.tokens
    names = tuple(tokenizer.decode([token]).strip() for token in of_labels)
    clear = all(names) and len(set(names)) == len(names)
    return replace(intent, names=names) if clear else intent
