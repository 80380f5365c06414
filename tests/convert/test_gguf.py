# SPDX-License-Identifier: Apache-2.0
"""A GGUF file's own statements about its tokenizer decide, whatever class transformers picks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers
from tiny_models import word_tokenizer

from headswap.convert.gguf import gguf_tokenizer, save_tokenizer

BOS, PAD, EOS, UNK = range(4)  # as in `word_tokenizer`


def _file(folder: Path, **said: Any) -> Path:
    """A GGUF file that holds statements about a tokenizer, and one tensor."""
    import numpy as np

    file = folder / "tiny.gguf"
    writer = gguf.GGUFWriter(str(file), "llama")
    for key, value in said.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"tokenizer.ggml.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(
    ("bos", "eos", "single", "pair"),
    [
        (False, False, [4, 5], [4, 5, 4]),
        (True, False, [BOS, 4, 5], [BOS, 4, 5, BOS, 4]),
        (False, True, [4, 5, EOS], [4, 5, EOS, 4, EOS]),
        (True, True, [BOS, 4, 5, EOS], [BOS, 4, 5, EOS, BOS, 4, EOS]),
    ],
)
def test_marks_around_a_text_are_the_file_s(
    tmp_path: Path, bos: bool, eos: bool, single: list[int], pair: list[int]
) -> None:
    file = _file(tmp_path, add_bos_token=bos, add_eos_token=eos)
    found = gguf_tokenizer(word_tokenizer(), file)
    assert found("no yes")["input_ids"] == single
    assert found("no yes", "no")["input_ids"] == pair
    assert "token_type_ids" not in found("no yes")


def test_special_ids_are_the_file_s(tmp_path: Path) -> None:
    made = word_tokenizer()
    made.eos_token, made.pad_token = "<s>", None  # as 4.57 mistakes them
    file = _file(tmp_path, bos_token_id=BOS, eos_token_id=EOS, padding_token_id=PAD)
    found = gguf_tokenizer(made, file)
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (BOS, EOS, PAD)
    assert found.unk_token_id == UNK  # not stated: as transformers has it


def test_a_saved_tokenizer_is_read_by_every_release(tmp_path: Path) -> None:
    found = gguf_tokenizer(word_tokenizer(), _file(tmp_path, add_bos_token=True, bos_token_id=BOS))
    found.chat_template = "{{ messages[0]['content'] }}"
    save_tokenizer(found, tmp_path)
    assert '"PreTrainedTokenizerFast"' in (tmp_path / "tokenizer_config.json").read_text("utf-8")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again("no yes")["input_ids"] == [BOS, 4, 5]
    assert again.chat_template == found.chat_template
