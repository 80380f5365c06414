# SPDX-License-Identifier: Apache-2.0
"""Texts from arguments, files (plain or JSON lines) and standard input."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from headswap.registry.errors import InputError

Text = str | tuple[str, str]


def read_texts(arguments: Sequence[str], files: Sequence[str], as_json: bool = False) -> list[Text]:
    """All texts, in order: arguments first, then files; "-" is standard input.

    With neither, standard input is read unless it is a terminal. A .jsonl file, and with `as_json`
    every file and standard input, holds {"text": ..., "text_pair": ...} or a string a line; else
    they hold a text a line.
    """
    texts: list[Text] = [text for text in arguments if text != "-"]
    sources = [*(["-"] if "-" in arguments else []), *files]
    if not texts and not sources:
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError("No text: give texts, --file FILE, or pipe them in.", rows=())
        sources = ["-"]
    for source in sources:
        texts.extend(_read(source, as_json))
    for number, text in enumerate(texts):
        _check_unicode(text, number)
    if not texts:
        raise InputError(f"No text in {', '.join(sources)}.", rows=())
    return texts


def read_conversations(files: Sequence[str]) -> list[Any]:
    """Conversations, one a line: a list of messages, or {"messages": [...]}.

    "-", or no file, is standard input, as in `read_texts`.
    """
    if not files and (sys.stdin is None or sys.stdin.isatty()):
        raise InputError("No conversation: give --file FILE, or pipe JSON lines in.", rows=())
    found = []
    for source in files or ["-"]:
        for where, line in _numbered(source):
            value = _json(line, where)
            value = value.get("messages") if isinstance(value, dict) else value
            if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
                raise InputError(
                    f'{where}: expected a list of messages, or {{"messages": [...]}}.', rows=()
                )
            found.append(value)
    if not found:
        raise InputError(f"No conversation in {', '.join(files) or 'standard input'}.", rows=())
    return found


def _check_unicode(text: Text, number: int) -> None:
    """Refuse what can't be encoded (half of a surrogate pair), which tokenizers choke on."""
    try:
        "".join(text).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"Text {number} is not valid Unicode: {error}", rows=(number,)) from error


def _read(source: str, as_json: bool) -> Iterable[Text]:
    as_json = as_json or Path(source).suffix == ".jsonl"
    for where, line in _numbered(source):
        yield _object(line, where) if as_json else line


def _numbered(source: str) -> list[tuple[str, str]]:
    """The lines of a file, or of standard input ("-"), that hold something, and where they are."""
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        lines = io.StringIO(data.decode("utf-8-sig"), newline=None)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{source} can't be read: {error}", rows=()) from error
    name = "standard input" if source == "-" else source
    return [(f"{name}:{number}", line.rstrip("\n"))
            for number, line in enumerate(lines, 1) if line.strip()]  # fmt: skip


def _json(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not a JSON value: {error}", rows=()) from error


def _object(line: str, where: str) -> Text:
    found = _json(line, where)
    if isinstance(found, str):
        return found
    text = found.get("text") if isinstance(found, dict) else None
    pair = found.get("text_pair") if isinstance(found, dict) else None
    if not isinstance(text, str) or not isinstance(pair, (str, type(None))):
        raise InputError(f'{where}: expected {{"text": ..., "text_pair": ...}} strings.', rows=())
    return text if pair is None else (text, pair)
