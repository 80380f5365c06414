# SPDX-License-Identifier: Apache-2.0
"""A row's logits are the row's, whatever stands around it: properties over random padding."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import SEQUENCE, zoo_model

import headswap

TOLERANCE = 1e-5
PAD, END = 1, 2
# One type a way of pooling: score (relative, learned and no positions), first token (with segments,
# offset positions), mean, mean of scores, end mark, sequence summary.
TYPES = {"llama": {}, "gpt2": {}, "jamba": {}, "bert": {}, "xlm-roberta": {}, "electra": {},
         "modernbert": {"classifier_pooling": "mean"}, "eurobert": {}, "bart": {}, "t5": {},
         "xlnet": {}, "xlm": {}, "opt": {}}  # fmt: skip
HERE = [model_type for model_type in TYPES if model_type in SEQUENCE]


@cache
def converted(model_type: str, **more: Any) -> Any:
    reference = zoo_model(model_type, SEQUENCE, num_labels=3, **TYPES[model_type], **more)
    folder = converted.folder  # type: ignore[attr-defined]
    path = folder / "-".join([model_type, *more])
    reference.save_pretrained(path)
    return headswap.load(path, **more)


@pytest.fixture(scope="module", autouse=True)
def _folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    converted.folder = tmp_path_factory.mktemp("models")  # type: ignore[attr-defined]
    converted.cache_clear()


def batch(rows: list[list[int]], left: list[int], right: int) -> dict[str, torch.Tensor]:
    width = max(n + len(row) for n, row in zip(left, rows, strict=True)) + right
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, (start, row) in enumerate(zip(left, rows, strict=True)):
        ids[i, start : start + len(row)] = torch.tensor(row)
        mask[i, start : start + len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def check(model: Any, rows: list[list[int]], left: list[int], right: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the pad id would say otherwise is no matter here
        found = model(**batch(rows, left, right)).logits
        alone = torch.cat([model(**batch([row], [0], 0)).logits for row in rows])
    torch.testing.assert_close(found, alone, atol=TOLERANCE, rtol=0)


# Pad ids may stand inside the text and at its end; each row holds an end mark somewhere.
TEXTS = st.lists(st.integers(PAD, 90), min_size=1, max_size=9).map(
    lambda row: [*row[:-1], END, row[-1]]
)
BATCHES = st.lists(st.tuples(TEXTS, st.integers(0, 9)), min_size=1, max_size=4)


@pytest.mark.parametrize("model_type", HERE)
@settings(max_examples=15, deadline=None)
@given(rows=BATCHES, right=st.integers(0, 9))
def test_padding_on_any_side_changes_nothing(
    model_type: str, rows: list[tuple[list[int], int]], right: int
) -> None:
    texts, left = [row for row, _ in rows], [n for _, n in rows]
    check(converted(model_type), texts, left, right)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bart"])
def test_an_end_mark_that_is_the_pad_is_a_token_where_the_mask_says_so(model_type: str) -> None:
    model = converted(model_type)
    pad = model.config.pad_token_id
    model.config.pad_token_id = END
    try:
        check(model, [[5, 6, END], [7, 8, 9, 10, END]], [2, 0], 3)
        with torch.no_grad():
            two = model(**batch([[5, 6, END], [5, 6, 9, END]], [0, 0], 0)).logits
        assert (two[0] - two[1]).abs().max() > 1e-4
    finally:
        model.config.pad_token_id = pad


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_what_the_reference_would_pool_is_said_once(model_type: str, tmp_path: Any) -> None:
    zoo_model(model_type, SEQUENCE, num_labels=3).save_pretrained(tmp_path)
    model = headswap.load(tmp_path)
    plain, odd = batch([[5, 6, 7]], [2], 1), batch([[5, 6, 7], [8, 9, PAD]], [0, 0], 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**plain)
    with pytest.warns(UserWarning, match=r"Row 1: .* token 2 .* token 1, .*pad id \(1\)"):
        model(**odd)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**odd)


@pytest.mark.parametrize("model_type", ["llama", "bert", "bart", "xlnet", "modernbert", "t5gemma"])
@pytest.mark.parametrize("left", [False, True])
@torch.no_grad()
def test_compat_repeats_the_reference(model_type: str, left: bool, tmp_path: Any) -> None:
    reference = zoo_model(model_type, SEQUENCE, num_labels=3)
    reference.save_pretrained(tmp_path)
    reference = type(reference).from_pretrained(tmp_path, dtype=torch.float32).eval()
    model = headswap.load(tmp_path, pooling="compat")
    inputs = batch(
        [[5, 6, 7, END], [8, PAD, END, PAD]], [3, 3] if left else [0, 0], 0 if left else 3
    )
    torch.testing.assert_close(
        model(**inputs).logits, reference(**inputs).logits, atol=TOLERANCE, rtol=0
    )


def test_a_row_without_an_end_mark_is_refused_by_number() -> None:
    with pytest.raises(headswap.InputError, match=r"Rows \[1\] hold no end mark \(2\)"):
        converted("bart")(**batch([[5, END], [6, 7]], [0, 0], 0))


def test_a_mask_is_refused_where_the_backbone_takes_none(tmp_path: Any) -> None:
    zoo_model("fnet", SEQUENCE).save_pretrained(tmp_path)
    with pytest.raises(headswap.InputError, match=r"attention_mask.*one length"):
        headswap.load(tmp_path)(**batch([[5, 6, 7], [8]], [0, 0], 0))
