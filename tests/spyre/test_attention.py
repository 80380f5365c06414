# SPDX-License-Identifier: Apache-2.0
"""Every attention backend gives what the reference gives: features, pages, packs, operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headswap.spyre.backends import ATTENTION, SHIPPED, AttentionBackends
from headswap.spyre.cache import KVCache, PagedBatch, chunks, decode, prefill
from headswap.spyre.errors import AttentionError, DeviceError
from headswap.spyre.masks import additive, hidden_score, real_tokens
from headswap.spyre.native import at
from headswap.spyre.packing import PackedBatch, Segment
from headswap.spyre.pool import BlockPool
from headswap.spyre.reference import Reference
from headswap.spyre.visibility import Scores, Visibility, learned

BLOCK = 4
HEADS = {"one each": (4, 4), "grouped": (4, 2), "one for all": (4, 1)}
WANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "alibi": {"slopes": torch.tensor([0.5, 0.25, 0.125, 0.06])},
}
RULES = {
    "causal": Visibility(True),
    "window": Visibility(True, 3),
    "both ways": Visibility(False),
    "both ways, window": Visibility(False, 3),
}


def rectangle(real: torch.Tensor, visibility: Visibility, dtype: torch.dtype) -> torch.Tensor:
    """The additive mask `[batch, 1, length, length]` of rows whose tokens are `real`
    `[batch, length]`: no query sees a pad."""
    places = torch.arange(real.shape[1], device=real.device)
    seen = visibility.of(places, places).unsqueeze(0) & real.unsqueeze(1)
    return additive(seen, dtype).unsqueeze(1)


def states(heads: int, tokens: int, dim: int = 8, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, heads, tokens, dim)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def able(backend: str, mode: str, wants: str) -> Any:
    made = ATTENTION.get(backend)
    missing = Scores(1.0, **WANTS[wants]).features() - made.features
    return made if mode in made.modes and not missing else None


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("wants", WANTS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("backend", sorted(set(SHIPPED) - {"reference"}))
def test_padded_rows_equal_the_reference(backend: str, heads: str, wants: str, rule: str) -> None:
    made = able(backend, "padded", wants)
    if made is None:
        return
    many, few = HEADS[heads]
    query, key, value = states(many, 7, rows=3), states(few, 7, rows=3), states(few, 7, rows=3)
    mask = rectangle(real_tokens([7, 2, 5], 7, "right"), RULES[rule], torch.float32)
    scores = at(Scores(0.3, **WANTS[wants]), torch.arange(7), torch.arange(7))
    found = made.padded(query, key, value, mask, scores)
    torch.testing.assert_close(
        found, Reference().padded(query, key, value, mask, scores), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("wants", WANTS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("backend", sorted(set(SHIPPED) - {"reference"}))
def test_packs_equal_each_text_alone(backend: str, heads: str, wants: str, rule: str) -> None:
    made = able(backend, "packed", wants)
    if made is None:
        return
    many, few = HEADS[heads]
    query, key, value = states(many, 12), states(few, 12), states(few, 12)
    batch = PackedBatch((Segment(0, 5), Segment(5, 6), Segment(6, 12)), 12)
    scores = Scores(0.3, **WANTS[wants])
    found = made.packed(query, key, value, batch, RULES[rule], scores)
    for start, end in ((0, 5), (5, 6), (6, 12)):
        own = slice(start, end)
        places = torch.arange(end - start)
        mask = additive(RULES[rule].of(places, places), torch.float32)[None, None]
        alone = Reference().padded(query[:, :, own], key[:, :, own], value[:, :, own], mask,
                                   at(scores, places, places))  # fmt: skip
        torch.testing.assert_close(found[:, own], alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("rule", ["causal", "window"])
@pytest.mark.parametrize("backend", ["native", "packed", "reference"])
def test_a_shared_prefix_gives_what_the_whole_text_gives(backend: str, rule: str) -> None:
    query, key, value = states(4, 9), states(2, 9), states(2, 9)
    shared = PackedBatch((Segment(0, 4), Segment(4, 7, (0, 4)), Segment(7, 9, (0, 4))), 9)
    found = ATTENTION.get(backend).packed(query, key, value, shared, RULES[rule], Scores(0.3))
    for start, end in ((4, 7), (7, 9)):
        whole = [*range(4), *range(start, end)]
        places = torch.arange(len(whole))
        mask = additive(RULES[rule].of(places, places), torch.float32)[None, None]
        parts = (query[:, :, whole], key[:, :, whole], value[:, :, whole])
        alone = Reference().padded(*parts, mask, Scores(0.3))
        torch.testing.assert_close(found[:, start:end], alone[:, 4:], atol=1e-6, rtol=0)


def paged(backend: Any, rule: Visibility, scores: Scores, many: int, few: int, **how: Any) -> Any:
    """Two texts of 11 and 6 tokens: prompts in chunks, then three steps together; the states of
    every token `[tokens, heads, dim]`, whatever the blocks held before."""
    generator = torch.Generator().manual_seed(1)
    lengths, new = (11, 6), 3
    text = [[torch.randn(1, h, n + new, 8, generator=generator) for h in (many, few, few)]
            for n in lengths]  # fmt: skip
    pool = BlockPool(how.get("blocks", 12), BLOCK)
    cache = KVCache.of([(few, 8, 8)], pool.num_blocks, BLOCK, torch.float32)
    pages = cache.layers[0]
    pages.key.fill_(float("nan"))
    pages.value.fill_(float("nan"))
    for spared in range(how.get("spared", 0)):
        pool.admit([spared])
    leases = [pool.admit(list(range(100 * i, 100 * i + n)), new) for i, n in enumerate(lengths)]
    if how.get("shuffled"):
        for lease in leases:
            lease.blocks.reverse()
    cache.zero([block for lease in leases for block in lease.blocks])
    cache.zero([0])
    found: list[list[Any]] = [[], []]
    for row, n in enumerate(lengths):
        for chunk in chunks(n, 0, how.get("chunk", 4), BLOCK, static=how.get("static", False)):
            step = prefill(leases[row], chunk, BLOCK)
            parts = [torch.cat([t[:, :, chunk.start : chunk.end],
                                torch.full((1, t.shape[1], chunk.right, 8), 1e4)], 2)
                     for t in text[row]]  # fmt: skip
            states_ = backend.paged(*parts, pages, step, rule, scores)
            found[row].append(states_[0, : chunk.end - chunk.start])
    for i in range(new):
        filled = [n + i + 1 for n in lengths]
        step = decode(leases, filled, BLOCK, how.get("rows"), how.get("width"))
        extra = len(step.filled) - 2
        parts = [
            torch.cat([text[row][part][:, :, lengths[row] + i : lengths[row] + i + 1]
                       for row in (0, 1, *[0] * extra)])
            for part in range(3)
        ]  # fmt: skip
        states_ = backend.paged(*parts, pages, step, rule, scores)
        for row in (0, 1):
            found[row].append(states_[row])
    return [torch.cat(rows) for rows in found], text


@pytest.mark.parametrize("rule", ["causal", "window"])
@pytest.mark.parametrize("wants", WANTS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("backend", sorted(SHIPPED))
def test_pages_equal_whole_rows(backend: str, heads: str, wants: str, rule: str) -> None:
    made = able(backend, "paged", wants)
    if made is None:
        return
    many, few = HEADS[heads]
    scores = Scores(0.3, **WANTS[wants])
    found, text = paged(made, RULES[rule], scores, many, few)
    for states_, parts in zip(found, text, strict=True):
        places = torch.arange(states_.shape[0])
        mask = additive(RULES[rule].of(places, places), torch.float32)[None, None]
        whole = Reference().padded(*parts, mask, at(scores, places, places))
        torch.testing.assert_close(states_, whole[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "how",
    [{"chunk": 8}, {"chunk": 12}, {"chunk": 8, "static": True}, {"spared": 3}, {"shuffled": True},
     {"rows": 4, "width": 9}, {"blocks": 30}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("backend", ["native", "sdpa", "operators", "reference"])
def test_nothing_depends_on_chunks_blocks_or_filler(backend: str, how: dict[str, Any]) -> None:
    made = ATTENTION.get(backend)
    plain, _ = paged(made, RULES["window"], Scores(0.3), 4, 2)
    other, _ = paged(made, RULES["window"], Scores(0.3), 4, 2, **how)
    for one, two in zip(plain, other, strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=0)


def test_blocks_side_by_side_are_read_without_a_copy() -> None:
    cache = KVCache.of([(2, 8, 8)], 6, BLOCK, torch.float32)
    pages = cache.layers[0]
    pages.key.normal_()
    batch = PagedBatch(torch.tensor([[2, 3]]), torch.zeros(1, 1, dtype=torch.int64),
                       torch.tensor([7]), torch.tensor([0]), BLOCK, run=(2, 3))  # fmt: skip
    keys, _ = pages.read(batch)
    assert keys.data_ptr() == pages.key[2].data_ptr()
    torch.testing.assert_close(keys[0, 1], pages.key[2:4, :, 1].flatten(0, 1))


def test_left_pads_are_not_seen_and_their_queries_give_zero() -> None:
    from headswap.spyre.operators import paged_attention

    cache = torch.randn(3, BLOCK, 2, 8)
    query = torch.randn(1, 6, 4, 8)
    tables, filled, left = torch.tensor([[1, 2]]), torch.tensor([6]), torch.tensor([3])
    found = paged_attention(query, cache, cache, 0.3, filled, left, tables)
    assert bool((found[0, :3] == 0).all())
    changed = cache.clone()
    changed[1, :3] = 50.0
    again = paged_attention(query, changed, changed, 0.3, filled, left, tables)
    torch.testing.assert_close(found, again, atol=0, rtol=0)


def test_operators_pass_torchs_own_check() -> None:
    from headswap.spyre.operators import paged_attention, paged_store, paged_store_

    cache = torch.zeros(3, BLOCK, 2, 8)
    key, slots = torch.randn(1, 2, 2, 8), torch.tensor([[4, 5]])
    for operator, given in (
        (paged_store, (key, key, cache, cache.clone(), slots)),
        (paged_store_, (key, key, cache, cache.clone(), slots)),
        (paged_attention, (torch.randn(1, 2, 4, 8), cache, cache.clone(), 0.3, torch.tensor([2]),
                           torch.tensor([0]), torch.tensor([[1]]), True, 5, 2.0, None,
                           torch.zeros(4))),
    ):  # fmt: skip
        torch.library.opcheck(operator, given)


def test_a_store_without_underscore_leaves_the_given_caches() -> None:
    from headswap.spyre.operators import paged_store

    cache, key = torch.zeros(2, BLOCK, 2, 8), torch.randn(1, 1, 2, 8)
    stored, _ = paged_store(key, key, cache, cache.clone(), torch.tensor([[5]]))
    assert not cache.any()
    torch.testing.assert_close(stored[1, 1], key[0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_that_see_nothing_stay_finite(side: Any, dtype: torch.dtype) -> None:
    mask = rectangle(real_tokens([1, 3], 4, side), Visibility(True), dtype)
    assert bool(mask.isfinite().all())
    assert bool((mask + hidden_score(dtype)).isfinite().all())
    value = states(2, 4, rows=2).to(dtype)
    for name in ("native", "sdpa"):
        found = ATTENTION.get(name).padded(value, value, value, mask, Scores(1.0))
        assert bool(found.isfinite().all())


@pytest.mark.parametrize(("rule", "window"), [(r, w) for r in RULES for w in (None,)])
def test_a_rule_is_learned_from_transformers_mask_functions(rule: str, window: Any) -> None:
    visibility = RULES[rule]

    def function(batch: Any, head: Any, query: Any, key: Any) -> Any:
        seen = (key - query).abs() < (visibility.window or 10**6)
        return seen & (key <= query) if visibility.causal else seen

    assert learned(function, visibility.window) == visibility


def test_attention_in_chunks_is_no_rule_of_ours() -> None:
    assert learned(lambda b, h, q, k: (q // 8 == k // 8) & (k <= q), 8) is None


def test_a_backend_can_be_added_by_name_and_not_by_accident() -> None:
    backends = AttentionBackends(SHIPPED.items())

    @backends.register("mine")
    class Mine(Reference):
        name = "mine"

    assert isinstance(backends.get("mine"), Mine)
    with pytest.raises(AttentionError, match="registered already"):
        backends.register("mine", Reference)
    backends.register("mine", Reference, replace=True)
    assert type(backends.get("mine")) is Reference
    backends.register("lazy", "headswap.spyre.native:Native")
    assert backends.get("lazy").name == "native"
    with pytest.raises(AttentionError, match="did you mean native"):
        backends.get("nativ")


def test_a_chunk_must_be_whole_blocks() -> None:
    with pytest.raises(DeviceError, match="multiple of the block size 4"):
        chunks(10, 0, 6, BLOCK, static=False)
