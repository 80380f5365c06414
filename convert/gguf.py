# SPDX-License-Identifier: Apache-2.0
"""A GGUF file's tokenizer, as the file itself describes it.

transformers rebuilds the vocabulary; which marks stand for begin, end and padding, and whether a
begin mark is put before a text, it takes from the class that it picks (4.57 puts one before every
text of a BPE model whose file says not to). The file decides here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def gguf_tokenizer(made: Any, file: Path) -> Any:
    """`made` (transformers' tokenizer for `file`) with the marks that the file states.

    A statement that the file lacks stays as transformers has it.
    """
    from transformers import PreTrainedTokenizerFast

    said = _statements(file)
    names = {
        name: made.convert_ids_to_tokens(said[key]) if key in said else getattr(made, name)
        for name, key in _IDS.items()
    }
    inner = made.backend_tokenizer
    flags = ("add_bos_token", "add_eos_token")
    if any(flag in said for flag in flags):
        bos, eos = (names[f"{flag[4:7]}_token"] if said.get(flag) else None for flag in flags)
        inner.post_processor = _marks_around(made, bos, eos)
    found = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **names,
    )
    found.chat_template = made.chat_template
    return found


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write `tokenizer` so that every supported transformers reads it."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    # transformers 5 writes its new name for the class, which 4.57 does not know; both know this.
    config = {**json.loads(file.read_text("utf-8")), "tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _statements(file: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    prefix = "tokenizer.ggml."
    wanted = (*_IDS.values(), "add_bos_token", "add_eos_token")
    fields = GGUFReader(str(file)).fields
    return {key: fields[prefix + key].contents() for key in wanted if prefix + key in fields}


def _marks_around(made: Any, bos: str | None, eos: str | None) -> Any:
    """Puts the given marks around each text."""
    from tokenizers import processors

    def scheme(text: str) -> str:
        return " ".join(part for part in (bos and f"{bos}:0", text, eos and f"{eos}:0") if part)

    marks = [(mark, made.convert_tokens_to_ids(mark)) for mark in {bos, eos} if mark]
    return processors.TemplateProcessing(
        single=scheme("$A:0"), pair=f"{scheme('$A:0')} {scheme('$B:0')}", special_tokens=marks
    )
