# SPDX-License-Identifier: Apache-2.0
"""What the files of a CrossEncoder of sentence-transformers say of the form of a pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headswap.convert.checkpoint import Checkpoint
from headswap.convert.modules import listed_modules, read_modules, settings, transformer_settings
from headswap.registry.errors import UnsupportedHeadError
from headswap.text.notices import notify

# Arguments of the chat template that cut or pad, or say how the result is handed over.
_SIZES = ("max_length", "padding", "truncation", "return_tensors", "return_dict", "tokenize")
_HARMLESS = {"padding": True, "padding_side": None, "truncation": True}


@dataclass(frozen=True, slots=True)
class PairFiles:
    """`listed`: there is a modules.json. `chat`: pairs go through the chat template, with contents
    that are `structured` or plain and with `options`. `prompt`: the default one's text."""

    listed: bool = False
    chat: bool = False
    structured: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    prompt: str = ""


def pair_files(folder: Path) -> PairFiles:
    """What the files in `folder` say.

    Raises `UnsupportedHeadError` for a default prompt without a text, and for arguments of the
    tokenizer that would change what is run.
    """
    said = settings(folder)
    prompt = _prompt(folder, said)
    listed = listed_modules(folder)
    if not listed:
        return PairFiles(prompt=prompt)
    found = transformer_settings(listed[0][1])
    message = (found.get("modality_config") or {}).get("message")
    structured = isinstance(message, Mapping) and message.get("format") == "structured"
    return PairFiles(True, message is not None, structured, _options(folder, found), prompt)


def _prompt(folder: Path, said: Mapping[str, Any]) -> str:
    name = said.get("default_prompt_name")
    prompts = said.get("prompts") or {}
    if name is not None and name not in prompts:
        raise UnsupportedHeadError(
            f"{folder}: the default prompt is {name!r}, and the prompts are "
            f"{', '.join(prompts) or 'none'}. Mend config_sentence_transformers.json.",
            prompt=str(name),
        )
    return "" if name is None else str(prompts[name] or "")


def _options(folder: Path, found: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the chat template; any other that would change what is run is refused."""
    given = {k: dict(v) for k, v in (found.get("processing_kwargs") or {}).items()}
    chat = given.pop("chat_template", {})
    chat.pop("restore_suffix", None)  # here the fixed end is never cut
    wrong = {k: v for part in given.values() for k, v in part.items()
             if k not in _HARMLESS or _HARMLESS[k] not in (v, None)}  # fmt: skip
    wrong.update({name: chat[name] for name in _SIZES if name in chat})
    if found.get("do_lower_case"):
        wrong["do_lower_case"] = True
    if wrong:
        raise UnsupportedHeadError(
            f"{folder}: the Transformer module sets {wrong} (in processing_kwargs or "
            "beside it), which headswap does not do; remove it, and use max_length= and "
            "truncation=, or the tokenizer's own files.",
            settings=tuple(wrong),
        )
    return chat


def check_modules(checkpoint: Checkpoint, options: dict[str, Any]) -> dict[str, Any]:
    """`options` as they are; refuses what a CrossEncoder has and headswap does not run.

    Label tokens that a LogitScore module names are read by loading itself.
    """
    after = read_modules(checkpoint.folder)[1:]
    unknown = [module.kind for module in after if module.kind != "LogitScore"]
    if unknown or len(after) > 1:
        kinds = ", ".join(unknown or [module.kind for module in after])
        raise UnsupportedHeadError(
            f"{checkpoint.name}: modules.json lists {kinds} behind the Transformer; a reranker "
            "here has nothing there, or one LogitScore.",
            module=kinds,
        )
    pair_files(checkpoint.folder)
    return options


def check_settings(checkpoint: Checkpoint, options: dict[str, Any]) -> dict[str, Any]:
    """`options` as they are, for a classifier, which gives texts the tokenizer's own form: refuses
    settings that change what is run, and warns of a form of pairs that only a reranker follows."""
    found = pair_files(checkpoint.folder)
    if found.chat or found.prompt:
        form = f"the prompt {found.prompt!r} before" if found.prompt else "the chat template around"
        notify(
            f"{checkpoint.name} was saved to be run with {form} each pair; a Classifier does not "
            "put it there, a Reranker does. Give template=, or take a Reranker."
        )
    return options
