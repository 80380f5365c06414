# SPDX-License-Identifier: Apache-2.0
"""Ids of texts and pairs without a template: the tokenizer's own, whole or cut."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headswap
from headswap.text.encode import Encoded, Encoder, collate, has_pair_scheme
from headswap.text.lengths import Limit

FREE = Limit(None, "nothing")
TEXT = st.text(st.sampled_from("prefixsuf yesno\n{}<|_im>é日"), min_size=1, max_size=30)


def quiet(encoder: Encoder, texts: Sequence[Any]) -> list[Encoded]:
    """What the encoder gives, without the warning that texts were cut."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*were cut")
        return encoder.encode(texts)


# -- one text -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "ids"), [
    ("bert", [2, 5, 7, 3]), ("xlm-roberta", [0, 5, 7, 2]), ("chat", [0, 5, 7]),
    ("ends", [4, 6, 1]), ("gpt2", [2, 4]),
])  # fmt: skip
def test_a_text_gets_its_familys_marks(words: Any, family: str, ids: list[int]) -> None:
    (found,) = Encoder(words(family), FREE).encode(["w1 w3"])
    assert found.ids == ids
    assert found.types == ([0] * len(ids) if family == "bert" else None)
    assert (found.full, found.truncated) == (len(ids), False)


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "chat", "ends", "gpt2"])
@given(text=TEXT)
def test_any_text_has_the_ids_of_the_tokenizers_own_call(
    byte_pairs: Any, family: str, text: str
) -> None:
    own = byte_pairs(family, chat=True)
    (found,) = Encoder(own, FREE).encode([text])
    assert found.ids == own(text)["input_ids"]
    assert found.types == own(text).get("token_type_ids")


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "chat", "ends", "gpt2"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("limit", [3, 5, 9, 14])
def test_a_cut_text_has_the_ids_of_the_tokenizers_own_cut(
    words: Any, sentence: Any, family: str, side: str, limit: int
) -> None:
    own = words(family, truncation_side=side)
    texts = [sentence(n, n) for n in (1, 3, 4, 8, 12, 30)]
    found = quiet(Encoder(own, Limit(limit, "max_length")), texts)
    wanted = own(texts, truncation=True, max_length=limit)
    assert [row.ids for row in found] == wanted["input_ids"]
    assert [row.types for row in found] == wanted.get("token_type_ids", [None] * len(texts))
    marks = len(own("w1")["input_ids"]) - 1
    assert [row.full for row in found] == [n + marks for n in (1, 3, 4, 8, 12, 30)]
    assert [row.truncated for row in found] == [row.full > limit for row in found]


def test_a_cut_and_a_padding_in_the_tokenizers_file_are_not_applied_unseen(
    words: Any, sentence: Any
) -> None:
    own = words("bert")
    own.backend_tokenizer.enable_truncation(16)
    own.backend_tokenizer.enable_padding(length=50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = Encoder(own, Limit(64, "config")).encode([sentence(40, 0), sentence(5, 1)])
    assert [len(row.ids) for row in found] == [42, 7]
    assert [row.truncated for row in found] == [False, False]
    assert found[0].ids == words("bert")(sentence(40, 0))["input_ids"]


def test_a_cut_in_the_tokenizers_file_does_not_replace_the_limit(words: Any, sentence: Any) -> None:
    own = words("bert")
    own.backend_tokenizer.enable_truncation(6)
    (found,) = quiet(Encoder(own, Limit(20, "config")), [sentence(40, 0)])
    assert (len(found.ids), found.full, found.truncated) == (20, 42, True)


def test_the_callers_tokenizer_is_left_as_it_was(words: Any, sentence: Any) -> None:
    own = words("bert")
    own.backend_tokenizer.enable_truncation(6)
    before = own.backend_tokenizer.to_str()
    quiet(Encoder(own, Limit(10, "config"), template="w1 {text}"), [sentence(40, 0)])
    quiet(Encoder(own, Limit(10, "config")), [sentence(40, 0)])
    assert own.backend_tokenizer.to_str() == before


def test_cutting_leaves_no_trace_on_the_next_call(words: Any, sentence: Any) -> None:
    encoder = Encoder(words("xlm-roberta"), Limit(8, "max_length"))
    (first,) = encoder.encode([sentence(5, 0)])
    (cut,) = quiet(encoder, [sentence(30, 1)])
    (again,) = encoder.encode([sentence(5, 0)])
    assert len(cut.ids) == 8
    assert again == first


def test_no_texts_give_no_rows(words: Any) -> None:
    assert Encoder(words("bert"), FREE).encode([]) == []
    assert Encoder(words("bert"), FREE, template="w1 {text}").encode([]) == []


# -- pairs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "ids", "types"), [
    ("bert", [2, 5, 6, 3, 7, 3], [0, 0, 0, 0, 1, 1]),
    ("xlm-roberta", [0, 5, 6, 2, 2, 7, 2], None),
])  # fmt: skip
def test_a_pair_gets_its_familys_separators(
    words: Any, family: str, ids: list[int], types: list[int] | None
) -> None:
    (found,) = Encoder(words(family), FREE).encode([("w1 w2", "w3")])
    assert (found.ids, found.types) == (ids, types)


@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
@pytest.mark.parametrize("side", ["right", "left"])
@given(
    st.lists(st.tuples(st.integers(1, 15), st.integers(1, 15)), min_size=1, max_size=4),
    st.integers(5, 24),
)
def test_pairs_are_cut_longest_first_and_their_segments_with_them(
    words: Any, sentence: Any, family: str, side: str, sizes: list[tuple[int, int]], limit: int
) -> None:
    own = words(family, truncation_side=side)
    pairs = [(sentence(a, a), sentence(b, 100 + b)) for a, b in sizes]
    found = quiet(Encoder(own, Limit(limit, "max_length")), pairs)
    wanted = own(
        [a for a, _ in pairs], [b for _, b in pairs], truncation="longest_first", max_length=limit
    )
    assert [row.ids for row in found] == wanted["input_ids"]
    assert [row.types for row in found] == wanted.get("token_type_ids", [None] * len(pairs))
    fixed = 3 if family == "bert" else 4
    assert [row.full for row in found] == [a + b + fixed for a, b in sizes]
    assert all(len(row.ids) <= limit for row in found)


def test_segments_follow_the_second_text_after_a_cut(words: Any, sentence: Any) -> None:
    encoder = Encoder(words("bert"), Limit(9, "max_length"))
    (found,) = quiet(encoder, [(sentence(20, 0), sentence(2, 1))])
    assert found.types == [0] * 6 + [1] * 3
    assert (found.full, found.truncated) == (25, True)


@pytest.mark.parametrize("family", ["chat", "ends", "gpt2"])
@pytest.mark.parametrize("kind", ["words", "byte_pairs"])
def test_a_pair_is_refused_where_nothing_would_separate_it(
    request: pytest.FixtureRequest, kind: str, family: str
) -> None:
    own = request.getfixturevalue(kind)(family)
    assert not has_pair_scheme(own)
    encoder = Encoder(own, FREE)
    with pytest.raises(headswap.ConversionError, match="no separator between two texts"):
        encoder.encode([("w1", "w2")])
    assert len(encoder.encode(["w1"])) == 1  # a text alone is still fine


@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
def test_a_tokenizer_that_separates_pairs_is_known_as_one(words: Any, family: str) -> None:
    assert has_pair_scheme(words(family))


@pytest.mark.parametrize("texts", [["w1", ("w1", "w2")], [("w1", "w2", "w3")], [("w1",)]])
def test_texts_and_pairs_do_not_mix(words: Any, texts: Any) -> None:
    with pytest.raises(headswap.InputError, match="all strings, or all pairs"):
        Encoder(words("bert"), FREE).encode(texts)


@pytest.mark.parametrize("texts", [[None], [3], [b"ab"], [("w1", None)], [(1, 2)]])
def test_what_is_no_text_is_refused_and_never_spelt_out(words: Any, texts: Any) -> None:
    with pytest.raises(headswap.InputError, match="all strings, or all pairs"):
        Encoder(words("bert"), FREE).encode(texts)


# -- refusals and warnings ------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2"])
def test_empty_texts_are_refused_with_their_numbers(words: Any, family: str) -> None:
    with pytest.raises(headswap.InputError, match=r"\[0, 2\]") as caught:
        Encoder(words(family), FREE).encode(["", "w1", ""])
    assert caught.value.rows == (0, 2)


@pytest.mark.parametrize(("family", "ids"), [("bert", [2, 3]), ("chat", [0]), ("ends", [1])])
def test_an_empty_text_that_gets_marks_is_those_marks(
    words: Any, family: str, ids: list[int]
) -> None:
    assert Encoder(words(family), FREE).encode([""])[0].ids == ids


@pytest.mark.parametrize("template", [None, "w1 {text} w2"])
def test_too_long_is_refused_with_both_numbers_where_cutting_is_off(
    words: Any, sentence: Any, template: str | None
) -> None:
    strict = Encoder(words("chat"), Limit(10, "max_length"), template=template, truncation=False)
    fixed = 1 if template is None else 3
    texts = [sentence(4, 0), sentence(40, 1), sentence(3, 2), sentence(50, 3)]
    with pytest.raises(headswap.InputError) as caught:
        strict.encode(texts)
    assert caught.value.rows == (1, 3)
    assert f"Text 1 has {40 + fixed} tokens, and the limit is 10 (from max_length)" in str(
        caught.value
    )
    assert len(strict.encode([sentence(10 - fixed, 0)])[0].ids) == 10


def test_one_warning_tells_how_many_texts_were_cut(words: Any, sentence: Any) -> None:
    encoder = Encoder(words("bert"), Limit(8, "config.max_position_embeddings"))
    with pytest.warns(UserWarning, match="were cut") as caught:
        encoder.encode([sentence(n, n) for n in (3, 6, 7, 20, 30)])
    assert [str(warning.message) for warning in caught] == [
        "3 of 5 texts were cut to 8 tokens (limit from config.max_position_embeddings)."
    ]


def test_texts_at_the_limit_are_not_cut_and_give_no_warning(words: Any, sentence: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = Encoder(words("bert"), Limit(8, "max_length")).encode([sentence(6, 0)])
    assert (len(found.ids), found.truncated) == (8, False)


@pytest.mark.parametrize(("family", "limit", "texts"), [
    ("bert", 1, ["w1 w2 w3"]), ("xlm-roberta", 1, ["w1 w2 w3"]),
    ("bert", 2, [("w1 w2", "w3")]), ("xlm-roberta", 3, [("w1 w2", "w3")]),
])  # fmt: skip
def test_a_limit_below_the_marks_is_refused_and_never_exceeded(
    words: Any, family: str, limit: int, texts: Any
) -> None:
    with pytest.raises((headswap.InputError, headswap.ConversionError), match=str(limit)):
        quiet(Encoder(words(family), Limit(limit, "max_length")), texts)


# -- batches --------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.integers(0, 98), min_size=1, max_size=9), min_size=1, max_size=5),
    st.sampled_from(["left", "right"]),
    st.integers(0, 98),
    st.booleans(),
)
def test_a_batch_holds_each_row_and_pads_carry_the_pad_segment(
    ids: list[list[int]], side: str, pad: int, segments: bool
) -> None:
    rows = [Encoded(row, [1] * len(row) if segments else None, len(row)) for row in ids]
    batch = collate(rows, pad, side)
    assert set(batch) == {"input_ids", "attention_mask"} | (
        {"token_type_ids"} if segments else set()
    )
    width = max(map(len, ids))
    for number, row in enumerate(ids):
        start = width - len(row) if side == "left" else 0
        real = [start <= place < start + len(row) for place in range(width)]
        assert batch["attention_mask"][number].tolist() == [int(each) for each in real]
        place = batch["attention_mask"][number].bool()
        assert batch["input_ids"][number][place].tolist() == row
        assert set(batch["input_ids"][number][~place].tolist()) <= {pad}
        if segments:
            assert batch["token_type_ids"][number].tolist() == [int(each) for each in real]
