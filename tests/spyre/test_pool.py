# SPDX-License-Identifier: Apache-2.0
"""The block pool: nothing leaks, nothing is owned twice, and a prefix is what it says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headswap.spyre import BlockPool, CapacityError, DeviceError, Lease

IDS = st.lists(st.integers(0, 1), min_size=1, max_size=24)  # two words, so that prefixes meet


class Pool(RuleBasedStateMachine):
    """Random steps beside a memory that says what each block holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=12, block_size=4)
        self.memory: dict[int, list[int | None]] = {}
        self.live: list[tuple[Lease, list[int]]] = []

    def write(self, lease: Lease, ids: list[int], start: int) -> None:
        """What a forward does: stale blocks are zeroed, then the tokens from `start` written."""
        self.zero()
        for at in range(start, len(ids)):
            page = self.memory.setdefault(lease.blocks[at // 4], [None] * 4)
            page[at % 4] = ids[at]
        self.pool.publish(lease, ids)

    def zero(self) -> None:
        for block in self.pool.stale():
            self.memory[block] = [None] * 4

    @rule(ids=IDS, new=st.integers(0, 9))
    def admit(self, ids: list[int], new: int) -> None:
        before, fits = self.pool.usage, self.pool.can_admit(ids, new)
        if not fits:
            with pytest.raises(CapacityError) as refused:
                self.pool.admit(ids, new)
            assert refused.value.needed > refused.value.free
            assert self.pool.usage == before
            return
        lease = self.pool.admit(ids, new)
        assert lease.cached < len(ids)
        self.write(lease, ids, lease.cached)
        self.live.append((lease, ids))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        lease, ids = data.draw(st.sampled_from(self.live))
        blocks, before = list(lease.blocks), self.pool.usage
        try:
            self.pool.extend(lease, max(0, len(ids) + 1 - lease.tokens))
        except CapacityError:
            assert lease.blocks == blocks
            assert self.pool.usage == before
            return
        ids.append(data.draw(st.integers(0, 1)))
        self.write(lease, ids, len(ids) - 1)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.pool.release(lease)
        with pytest.raises(DeviceError):
            self.pool.release(lease)
        self.zero()

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        assert self.pool.usage.kept == 0
        self.zero()

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for lease, ids in self.live:
            found = [self.memory[lease.blocks[at // 4]][at % 4] for at in range(len(ids))]
            assert found == ids

    @invariant()
    def blocks_are_counted_and_block_zero_is_nobodys(self) -> None:
        held = {block for lease, _ in self.live for block in lease.blocks}
        usage = self.pool.usage
        assert 0 not in held
        assert usage.held == len(held)
        assert usage.held + usage.kept + usage.free == 11

    @invariant()
    def only_full_blocks_are_shared(self) -> None:
        for lease, ids in self.live:
            for other, _ in self.live:
                if lease is not other:
                    shared = set(lease.blocks) & set(other.blocks)
                    full = lease.blocks[: len(ids) // 4]
                    assert shared <= set(full)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)


def test_a_prefix_is_shared_and_kept_until_its_place_is_needed() -> None:
    pool = BlockPool(num_blocks=5, block_size=2)
    ids = [1, 2, 3, 4, 5]
    first = pool.admit(ids)
    pool.publish(first, ids)
    second = pool.admit([1, 2, 3, 4, 9])
    assert (second.cached, second.blocks[:2]) == (4, first.blocks[:2])
    pool.release(first)
    pool.release(second)
    assert pool.usage.kept == 2
    assert pool.match([1, 2, 9]) == first.blocks[:1]
    big = pool.admit([7] * 8)
    assert pool.match(ids) == []
    assert set(first.blocks[:2]) <= set(big.blocks)


def test_the_last_token_is_always_left_to_compute() -> None:
    pool = BlockPool(num_blocks=5, block_size=2)
    lease = pool.admit([1, 2, 3, 4])
    pool.publish(lease, [1, 2, 3, 4])
    assert len(pool.match([1, 2, 3, 4])) == 1


def test_what_does_not_fit_is_refused_with_both_numbers() -> None:
    pool = BlockPool(num_blocks=3, block_size=64)
    with pytest.raises(CapacityError, match=r"200 tokens need 4 more KV blocks.*2 of 2 are free"):
        pool.admit([1] * 150, new=50)
    assert pool.usage.free == 2


@given(num_blocks=st.integers(-3, 1))
def test_a_pool_without_room_is_refused(num_blocks: int) -> None:
    with pytest.raises(DeviceError, match="block 0 is reserved"):
        BlockPool(num_blocks, 64)
