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


def read_texts(arguments: Sequence[str], files: Sequence[str]) -> list[Text]:
    """All texts, in order: arguments first, then files; "-" is standard input.

    With neither, standard input is read unless it is a terminal. A .jsonl file holds
    {"text": ..., "text_pair": ...} or a string a line; other files and
    standard input a text a line.
    """
    texts: list[Text] = [text for text in arguments if text != "-"]
    sources = [*(["-"] if "-" in arguments else []), *files]
    if not texts and not sources:
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError("No text: give texts, --file FILE, or pipe them in.", rows=())
        sources = ["-"]
    for source in sources:
        texts.extend(_read(source))
    for number, text in enumerate(texts):
        _check_unicode(text, number)
    if not texts:
        raise InputError(f"No text in {', '.join(sources)}.", rows=())
    return texts


def _check_unicode(text: Text, number: int) -> None:
    """Refuse what can't be encoded (half of a surrogate pair), which tokenizers choke on."""
    try:
        "".join(text).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"Text {number} is not valid Unicode: {error}", rows=(number,)) from error


def _read(source: str) -> list[Text]:
    file = Path(source)
    try:
        if source == "-":
            data = sys.stdin.buffer.read().decode("utf-8-sig")
            return list(_lines(io.StringIO(data), "standard input", False))
        with file.open(encoding="utf-8-sig") as handle:
            return list(_lines(handle, source, file.suffix == ".jsonl"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{source} can't be read: {error}", rows=()) from error


def _lines(lines: Iterable[str], name: str, as_json: bool) -> Iterable[Text]:
    for number, line in enumerate(lines, 1):
        line = line.rstrip("\r\n")
        if as_json and line.strip():
            yield _object(line, f"{name}:{number}")
        elif line.strip():
            yield line


def _object(line: str, where: str) -> Text:
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not a JSON value: {error}", rows=()) from error
    if isinstance(found, str):
        return found
    text = found.get("text") if isinstance(found, dict) else None
    pair = found.get("text_pair") if isinstance(found, dict) else None
    if not isinstance(text, str) or not isinstance(pair, (str, type(None))):
        raise InputError(f'{where}: expected {{"text": ..., "text_pair": ...}} strings.', rows=())
    return text if pair is None else (text, pair)
