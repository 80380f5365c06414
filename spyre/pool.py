# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a paged KV cache are free, who holds which, and which hold a known prefix.

Bookkeeping only: no torch and no memory, so that it can be tested by the thousand. Block 0 is never
handed out: writes of pads go there (FMS' paged cache; spyre-inference).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headswap.spyre.errors import CapacityError, DeviceError

Key = tuple[int, tuple[int, ...]]
"""A full block's content: the number of the block of tokens before it (0 at a start), and its ids.
Numbers are given once and never again, so equal keys mean equal prefixes, with no chance of a
collision."""

START = 0


@dataclass(eq=False)
class Lease:
    """The blocks that one sequence holds, in order, and how many tokens they have room for.

    `cached` tokens at the start were there already and need not be computed. The last block may be
    partly filled; `tokens` counts what the sequence was admitted or extended for.
    """

    blocks: list[int]
    tokens: int
    cached: int = 0
    ended: bool = False
    _last: int = START
    _published: int = 0


@dataclass
class _Block:
    holders: int = 0
    key: Key | None = None
    number: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Blocks by what becomes of them: held by a sequence, kept for their prefix, free."""

    held: int
    kept: int
    free: int


class BlockPool:
    """Hands out blocks of `block_size` tokens out of `num_blocks`, of which block 0 is reserved.

    A block has as many holders as sequences share it, and is free when the last one lets go of it.
    A full block that was published stays findable by its content after that, until its place is
    needed (the longest unused first). A block whose content was dropped is given out again only
    through `stale`, the list of blocks that must be zeroed before they are written to.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2 or block_size < 1:
            raise DeviceError(
                f"A pool of {num_blocks} blocks of {block_size} tokens holds nothing: block 0 is "
                "reserved, so give two blocks at least.",
                num_blocks=num_blocks,
                block_size=block_size,
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._free: list[int] = list(range(num_blocks - 1, 0, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._by_key: dict[Key, int] = {}
        self._numbers = START
        self._stale: list[int] = []

    @property
    def usage(self) -> Usage:
        """How many blocks are held, kept and free; they sum up to `num_blocks` - 1."""
        kept, free = len(self._kept), len(self._free)
        return Usage(self.num_blocks - 1 - kept - free, kept, free)

    @property
    def available(self) -> int:
        """Blocks that could be given out now."""
        return len(self._free) + len(self._kept)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def match(self, ids: Sequence[int]) -> list[int]:
        """Blocks that hold a prefix of `ids`, in order; takes none of them.

        At least one token is left to be computed, since its state is what the caller wants.
        """
        found: list[int] = []
        number, size = START, self.block_size
        for start in range(0, len(ids) - size, size):
            block = self._by_key.get((number, tuple(ids[start : start + size])))
            if block is None:
                break
            found.append(block)
            number = self._blocks[block].number
        return found

    def can_admit(self, ids: Sequence[int], new: int = 0) -> bool:
        """Whether `admit` with the same arguments would succeed."""
        shared = self.match(ids)
        return self._needed(shared, len(ids) + new) <= self._spare(shared)

    def admit(self, ids: Sequence[int], new: int = 0) -> Lease:
        """Blocks for `ids` and `new` more tokens; those of a known prefix are shared.

        Raises `CapacityError` with both numbers, and takes nothing, where they do not fit.
        """
        if not ids or new < 0:
            raise DeviceError(f"Cannot admit {len(ids)} ids and {new} more tokens.", new=new)
        shared = self.match(ids)
        needed = self._needed(shared, len(ids) + new)
        self._check(needed, self._spare(shared), len(ids) + new)
        for block in shared:
            self._hold(block)
        lease = Lease([*shared, *(self._take() for _ in range(needed))], len(ids) + new)
        lease.cached = len(shared) * self.block_size
        lease._published = len(shared)
        lease._last = self._blocks[shared[-1]].number if shared else START
        return lease

    def extend(self, lease: Lease, tokens: int = 1) -> None:
        """Room for `tokens` more; raises `CapacityError`, and changes nothing, without it."""
        self._live(lease)
        needed = self.blocks_for(lease.tokens + tokens) - len(lease.blocks)
        self._check(needed, self.available, lease.tokens + tokens)
        lease.blocks.extend(self._take() for _ in range(needed))
        lease.tokens += tokens

    def publish(self, lease: Lease, ids: Sequence[int]) -> None:
        """Make the full blocks of `lease` findable; `ids` are the tokens whose keys and values are
        written. A block whose content another block has already stays private."""
        self._live(lease)
        size = self.block_size
        for index in range(lease._published, min(len(ids) // size, len(lease.blocks))):
            key = (lease._last, tuple(ids[index * size : (index + 1) * size]))
            known = self._by_key.get(key)
            if known is None:
                self._numbers += 1
                known = lease.blocks[index]
                self._blocks[known].key, self._blocks[known].number = key, self._numbers
                self._by_key[key] = known
            lease._last = self._blocks[known].number
            lease._published = index + 1

    def release(self, lease: Lease) -> None:
        """Let go of every block of `lease`; a second time is an error."""
        self._live(lease)
        lease.ended = True
        for block in reversed(lease.blocks):  # a prefix outlives what stands behind it
            self._let_go(block)

    def stale(self) -> list[int]:
        """Blocks that hold what nobody may read any more; zero them. Each is named once."""
        named, self._stale = self._stale, []
        return named

    def forget(self) -> None:
        """Drop every kept prefix, as after a change of the weights."""
        for block in list(self._kept):
            self._drop(block)
            self._free.append(block)
        self._kept.clear()

    # -- one block at a time ----------------------------------------------------------------------

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._kept.popitem(last=False)
            self._drop(block)
        self._blocks[block].holders = 1
        return block

    def _hold(self, block: int) -> None:
        self._kept.pop(block, None)
        self._blocks[block].holders += 1

    def _let_go(self, block: int) -> None:
        state = self._blocks[block]
        state.holders -= 1
        if state.holders:
            return
        if state.key is None:
            self._stale.append(block)
            self._free.append(block)
        else:
            self._kept[block] = None

    def _drop(self, block: int) -> None:
        state = self._blocks[block]
        if state.key is not None:
            del self._by_key[state.key]
        state.key, state.number = None, START
        self._stale.append(block)

    # -- how many ---------------------------------------------------------------------------------

    def _needed(self, shared: list[int], tokens: int) -> int:
        return self.blocks_for(tokens) - len(shared)

    def _spare(self, shared: Iterable[int]) -> int:
        return self.available - sum(block in self._kept for block in shared)

    def _check(self, needed: int, spare: int, tokens: int) -> None:
        if needed > spare:
            raise CapacityError(
                f"{tokens} tokens need {needed} more KV blocks of {self.block_size} tokens, and "
                f"{spare} of {self.num_blocks - 1} are free. Release a sequence, or give "
                "num_blocks=.",
                needed=needed,
                free=spare,
            )

    def _live(self, lease: Lease) -> None:
        if lease.ended:
            raise DeviceError("The blocks of this sequence were released already.")
