# SPDX-License-Identifier: Apache-2.0
"""What rows of a pack begin with runs once, and each row has its own numbers all the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spyre_models import FAMILIES, MAJOR, converted, expected, pressing_keys
from tiny_models import rows, tiny

import headswap
from headswap.spyre import Executor, prefixes
from headswap.spyre.prefixes import Group, alike, places_of, plan_packs

QUERY = rows((40,))[0]
OTHER = [*QUERY[:20], *rows((31,))[0][10:]]
ROWS = [
    *([*QUERY, *tail] for tail in rows((5, 30, 1, 17))),
    *([*OTHER, *tail] for tail in rows((3, 9))),
    QUERY, QUERY[:30], *rows((7, 60)),
]  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES)
def test_rows_that_begin_alike_have_their_own_numbers(kind: str) -> None:
    model = converted(kind)
    executor = Executor(model, backend="eager")
    found = executor.logits(ROWS)
    torch.testing.assert_close(found, expected(model, ROWS), atol=1e-5, rtol=0)
    report = executor.report()
    causal = report["hooked"] and executor.prepared.causal
    assert executor.prepared.shares is causal
    assert (report["computed"] < report["tokens"] - 150) is causal
    executor.prepared.shares = False
    torch.testing.assert_close(executor.logits(ROWS), found, atol=1e-5, rtol=0)


@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_every_pooling_rule_reads_the_shared_part_too(kind: str, pooling: str) -> None:
    model = headswap.as_seq_cls_model(
        tiny(kind, max_position_embeddings=200, **({"n_positions": 200} if kind == "gpt2" else {})),
        num_labels=2, pooling=pooling,
    ).eval()  # fmt: skip
    executor = Executor(model, backend="eager")
    torch.testing.assert_close(executor.logits(ROWS), expected(model, ROWS), atol=1e-5, rtol=0)
    assert executor.prepared.shares


@pytest.mark.parametrize("attention", ["packed", "native", "sdpa", "reference"])
def test_every_attention_shares(attention: str) -> None:
    model = converted("mistral", sliding_window=24)
    executor = Executor(model, backend="eager", attention=attention)
    torch.testing.assert_close(executor.logits(ROWS), expected(model, ROWS), atol=1e-5, rtol=0)
    assert executor.report()["computed"] < executor.report()["tokens"]


def test_groups_larger_than_a_pack_share_in_each() -> None:
    model = converted("llama", max_position_embeddings=4096)
    ids = [[*rows((900,))[0], *tail] for tail in rows((400, 401, 402, 403, 404))]
    executor = Executor(model, backend="eager")
    torch.testing.assert_close(executor.logits(ids), expected(model, ids), atol=1e-5, rtol=0)
    assert executor.report()["runs"]["packs"] == 3
    assert executor.report()["computed"] == 2 * 900 + 900 + 2010


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_rows_with_segments_share_nothing(kind: str) -> None:
    model = converted(kind)
    executor = Executor(model, backend="eager")
    kinds = [[0] * len(row) for row in ROWS]
    found = executor.logits(ROWS, kinds)
    if kind == "bert":  # GPT-2 adds word 0 to every token
        torch.testing.assert_close(found, expected(model, ROWS), atol=1e-5, rtol=0)
    assert executor.report()["computed"] == executor.report()["tokens"]


def test_sharing_that_changes_a_number_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from headswap.spyre import packed

    joined = packed.joined
    monkeypatch.setattr(packed, "joined", lambda t, prefix, own: joined(t, None, own))
    monkeypatch.setattr("headswap.spyre.native.joined", packed.joined)
    model = converted("llama")
    executor = Executor(model, backend="eager")
    assert executor.prepared.packable
    assert not executor.prepared.shares
    torch.testing.assert_close(executor.logits(ROWS), expected(model, ROWS), atol=1e-5, rtol=0)


@pytest.mark.skipif(MAJOR < 5, reason="4.57 has no DeepSeek V4")
def test_keys_pressed_together_are_not_shared() -> None:
    assert not Executor(pressing_keys(), backend="eager").prepared.shares


def common(texts: list[Any]) -> int:
    """Tokens that all of sorted `texts` begin with; each keeps its last for itself."""
    short = min(map(len, texts)) - 1
    pairs = zip(texts[0][:short], texts[-1][:short], strict=True)
    return next((i for i, (one, two) in enumerate(pairs) if one != two), short)


TEXTS = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple), min_size=1, max_size=12,
    unique=True,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.integers(1, 4))
def test_no_one_group_saves_more(texts: list[Any], least: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "LEAST", least)
        groups = alike(texts)
    assert sorted(places_of(groups)) == list(range(len(texts)))
    for group in groups:
        starts = {tuple(texts[row][: group.shared]) for row in group.rows}
        assert len(starts) == 1
        assert min(len(texts[row]) for row in group.rows) > group.shared
        assert group.shared == 0 or (group.shared >= least and len(group.rows) > 1)
    saved = sum((len(group.rows) - 1) * group.shared for group in groups)
    ordered = sorted(texts)
    for start in range(len(texts)):  # nothing saves more than any one group would
        for end in range(start + 2, len(texts) + 1):
            own = ordered[start:end]
            shared = common(own)
            assert saved >= (len(own) - 1) * shared * (shared >= least)


def test_one_query_within_an_instruction_stays_apart_where_that_saves_more() -> None:
    told, query = tuple(range(20)), tuple(range(20, 60))
    texts = [(*told, *query, i) for i in range(200, 206)] + [(*told, i) for i in range(300, 304)]
    found = {group.shared: len(group.rows) for group in alike(texts)}
    assert found == {60: 6, 20: 4}
    texts = [(*told, 70, i) for i in range(200, 206)] + texts[-4:]
    assert [group.shared for group in alike(texts)] == [20]


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(1, 40), st.booleans())
def test_packs_hold_every_row_once_within_their_tokens(
    texts: list[Any], tokens: int, shares: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "LEAST", 2)
        packs = plan_packs(texts, tokens, shares=shares)
    assert sorted(itertools.chain(*map(places_of, packs))) == list(range(len(texts)))
    lengths = [*map(len, texts)]
    for pack in packs:
        total = sum(group.tokens(lengths) for group in pack)
        assert total <= tokens or pack == [Group(pack[0].rows[:1])]
