# SPDX-License-Identifier: Apache-2.0
"""Runs a converted model the way a card wants it: planned shapes, nothing compiled after warm-up.

On a CPU the same prepared model runs in packs without padding (`eager`), in compiled rectangles
(`inductor`), or in rectangles that are checked against the card's rules (`checked`).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from headswap.spyre.choosing import choose_attention
from headswap.spyre.compiling import alone, explained
from headswap.spyre.device import DeviceSpec
from headswap.spyre.errors import DeviceError, RuleWarning
from headswap.spyre.findings import RuleReport
from headswap.spyre.generating import end_ids, generate
from headswap.spyre.given import (
    buckets,
    checked_rows,
    chosen,
    distinct,
    most_together,
    plain_ids,
    refuse_non_finite,
    refuse_plan,
)
from headswap.spyre.learning import probe_rows
from headswap.spyre.looking import InputGuard
from headswap.spyre.packs import PACK_TOKENS, run_pack
from headswap.spyre.paging import Pages, run_rows, shares
from headswap.spyre.passes import card_memory, compile_for, fit
from headswap.spyre.precision import precision
from headswap.spyre.prefixes import places_of, plan_packs
from headswap.spyre.prepare import prepare
from headswap.spyre.rectangles import Ids, run_rectangle
from headswap.spyre.remembered import Remembered
from headswap.spyre.reporting import Counts, Progress, Told, compiled, described
from headswap.spyre.shapes import Shape, planned
from headswap.spyre.stack import choose


class Executor:
    """Runs `model` (one of headswap's; a causal language model for `generate`) on a backend.

    backend    "auto" (a card's stack where one is installed, else eager), "eager", "inductor",
               "checked", "sendnn", "spyre"
    attention  a name in `ATTENTION`; "auto" takes packs on eager, else torch's kernel where it has
               what the layers want, else plain operators
    shapes     (batch, length) rectangles; where graphs are compiled, only these run. Default: the
               lengths 64 to 512 in powers of two. On eager without shapes nothing is padded
    rules      what becomes of findings in graphs and their inputs: "raise", "warn" or "record"
    device     the card's limits; default by backend
    dtype      of the backbone (default: as it is), or of all of a causal language model; a
               classifier's head always runs in fp32. "auto": what the machine is made for.
               torch.int8: products of the backbone's linear layers; `report()` says what it costs
    block_size, num_blocks
               of the paged cache, in tokens and in blocks with the reserved one (default: the
               device's size; where shapes are free as many blocks as a call needs, else room for
               8,192 tokens)
    share_prefixes
               run rows over the paged cache: in chunks, and what stands at their start and is known
               from earlier rows is not computed again. For causal models that pool the last token;
               with others it is off, as `report()` says
    remember   so many rows' results, which are given again where the same is asked of the same ids
    pad_weights
               pad heads and feed-forwards to whole sticks for "checked" and "spyre", with zeros

    The model is not changed: an executor works on a copy around its weights; threads take turns.
    Weights that change later (training, load_state_dict) are refused: make a new executor.
    """

    def __init__(
        self,
        model: Any,
        *,
        backend: str = "auto",
        attention: str = "auto",
        shapes: Iterable[Shape | tuple[int, int]] | None = None,
        rules: str = "raise",
        device: DeviceSpec | None = None,
        dtype: torch.dtype | str | None = None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        share_prefixes: bool = False,
        remember: int = 0,
        pad_weights: bool = True,
    ) -> None:
        self._remembered = Remembered(remember)
        self.backend = choose(backend, device, rules)
        wanted = precision(dtype, self.backend)  # refused before the model is looked at
        self.plan = planned(shapes, self.backend.spec, compiled=self.backend.compiler is not None)
        self.model = model
        self.prepared = prepare(model, 0 if self.plan is None else self.plan.longest)
        if self.plan is not None:
            refuse_plan(self.prepared, self.plan.longest)
        self.shares_prefixes = share_prefixes and shares(self.prepared)
        pages = self.prepared.head_spec is None or self.shares_prefixes
        self.attention, self.packs = choose_attention(
            self.prepared, attention, planned=self.plan is not None, paged=pages,
            fused=self.backend.name in ("eager", "inductor"),
        )  # fmt: skip
        fit(self.prepared, self.backend, wanted, packs=self.packs, pad_weights=pad_weights)
        static = None
        if self.backend.compiler is not None and self.plan is not None:
            static = (max(shape.batch for shape in self.plan.shapes), self.plan.longest)
        self._pages = Pages(self.prepared, self.backend, block_size, num_blocks, static)
        cached = self._pages.tokens * pages
        self.memory = card_memory(self.prepared, self.backend, self.plan, cached)
        if rules == "warn" and self.memory is not None and not self.memory.report().clean:
            warnings.warn(str(self.memory.report()), RuleWarning, stacklevel=2)
        self._guard = InputGuard(self.backend.spec, rules) if self.backend.ruled else None
        self._compiler = compile_for(self.prepared, self.backend, self.plan, self._guard)
        self._counts, self._lock = Counts(), threading.RLock()
        self.ready = self._compiler is None

    # -- what users call --------------------------------------------------------------------------

    def warmup(self) -> Executor:
        """Compile every planned shape, put the programs on the card where there is one, and
        freeze: from now on a compile is an error. Returns the executor."""
        with self._lock:
            if self._compiler is not None and not self.ready:
                with alone(compiled=True):
                    with self.backend.warming():
                        self._run_plan()
                    if self.backend.deploys:
                        self._run_plan()
                self._compiler.frozen = True
            self.ready = True
        return self

    def _run_plan(self) -> None:
        mark = plain_ids(self.prepared.model.config)[0]  # a stack may treat special ids its own way
        longest = 0 if self.plan is None else self.plan.longest
        if self.prepared.head_spec is None:
            self._generate([[mark] * (longest - 64 or 1)], 2, frozenset())
            return
        if self.shares_prefixes:
            list(run_rows(self._pages.room([], 0), [[mark] * longest]))
            return
        for shape in () if self.plan is None else self.plan.shapes:
            for length in (shape.length, shape.length - 1):  # a full batch may need no mask
                self._rectangle([[mark] * length] * shape.batch, None, shape)

    def logits(
        self, ids: Sequence[Ids], token_type_ids: Sequence[Ids] | None = None,
        progress: Progress | None = None,
    ) -> Tensor:  # fmt: skip
        """fp32 logits `[rows, num_labels]` of rows of token ids, in their order.

        `progress(done, total)` is called with numbers of rows after each run. Raises `ShapeError`
        for a row that is empty or longer than what is planned or than the model takes (both
        numbers, before any work), `NonFiniteError` naming the rows whose logits are not finite.
        """
        head: Any = self.prepared.model
        if not hasattr(head, "logits_of"):
            raise DeviceError(
                f"{type(head).__name__} has no classification head; logits() needs one: "
                "headswap.as_seq_cls_model(). generate() works."
            )
        function = head.logits_of if self.prepared.pools else Tensor.float
        return self._each(ids, token_type_ids, function, progress)

    def embed(
        self, ids: Sequence[Ids], token_type_ids: Sequence[Ids] | None = None,
        progress: Progress | None = None,
    ) -> Tensor:  # fmt: skip
        """fp32 vectors `[rows, hidden]`: an embedding model's, or the states that a head reads;
        `progress` as in `logits`."""
        model: Any = self.prepared.model
        if self.prepared.head_spec is None or not self.prepared.pools:
            raise DeviceError(
                f"{type(model).__name__} pools no row of its states, which embed() would give. "
                "headswap.as_embedding_model() makes a model that does."
            )
        embeds = hasattr(model, "conversion") and model.conversion.task == "embed"
        function = model.logits_of if embeds else Tensor.float
        return self._each(ids, token_type_ids, function, progress)

    def generate(
        self, prompts: Sequence[Ids], max_new_tokens: int, eos_token_id: Iterable[int] | int | None
        = None,
    ) -> list[list[int]]:  # fmt: skip
        """The ids that follow each prompt by greedy decoding over the paged cache, at most
        `max_new_tokens` and up to an end mark (default: the generation config's, else the
        config's), which is kept.

        Needs a causal language model. Raises `CapacityError` with both numbers, before any work,
        for a prompt that could never fit, `NonFiniteError` naming rows whose logits are no numbers;
        blocks are given back whatever happens.
        """
        rows, _ = checked_rows(self.prepared, prompts, new=max_new_tokens)
        marks = end_ids(self.prepared, eos_token_id)
        with self._lock, alone(compiled=self._compiler is not None):
            self.warmup()
            return self._generate(rows, max_new_tokens, marks)

    def _generate(self, rows: list[list[int]], new: int, marks: frozenset[int]) -> list[list[int]]:
        pages = self._pages.room(rows, new)
        with self._running("a chunk or step over the paged cache"):
            return generate(pages, rows, new, marks)

    def _running(self, what: str) -> Any:
        """The context in which layers run, for `what`."""
        if self._compiler is None:
            return nullcontext()
        self._compiler.running = what
        return explained(self._compiler, self.prepared.model)

    def _each(
        self, ids: Sequence[Ids], segments: Sequence[Ids] | None, function: Callable[..., Tensor],
        progress: Progress | None,
    ) -> Tensor:  # fmt: skip
        rows, kinds = checked_rows(self.prepared, ids, segments)
        if not rows:
            one = probe_rows(self.prepared.model.config, (1,))[0].tolist()
            return self._each([one], None, function, None)[:0]  # its width is the model's matter
        different, first, index = distinct(rows, kinds)
        keys, told = [(function, *key) for key in different], Told(progress, index)
        with self._lock, alone(compiled=self._compiler is not None):
            self.warmup()
            found: Any = self._remembered.of(keys)
            new = [i for i, value in enumerate(found) if value is None]
            told.done([i for i, value in enumerate(found) if value is not None])
            wanted = chosen(rows, kinds, [first[i] for i in new])
            for places, pooled in self._pooled(*wanted) if new else ():
                for place, value in zip(places, function(pooled).float(), strict=True):
                    found[new[place]] = value
                told.done([new[place] for place in places])
            self._counts.done(wanted[0])
        every = torch.stack([found[i] for i in index])  # out here, so that training may use it
        refuse_non_finite(every)
        with self._lock:
            self._remembered.keep(keys, found)
        return every

    def _pooled(self, rows: list[list[int]], kinds: list[list[int]] | None) -> Any:
        """Rows and what the head gets for them, run after run."""
        lengths = [len(row) for row in rows]
        if self.shares_prefixes and kinds is None:  # pages are known by their ids alone
            yield from run_rows(self._pages.room(rows, 0), rows)
        elif self.plan is not None:
            for run in self.plan.fit(lengths).runs:
                yield run.rows, self._rectangle(*chosen(rows, kinds, run.rows), run.shape)
        elif self.packs:
            most, shares = most_together(self.prepared, PACK_TOKENS), self.prepared.shares
            for pack in plan_packs(rows, most, shares=shares and kinds is None):
                self._note(Shape(1, sum(group.tokens(lengths) for group in pack)), "packs")
                yield places_of(pack), run_pack(self.prepared, rows, kinds, pack)
        else:
            for bucket in buckets(lengths, PACK_TOKENS):
                shape = Shape(len(bucket), lengths[bucket[0]])
                yield bucket, self._rectangle(*chosen(rows, kinds, bucket), shape)

    def _rectangle(
        self, rows: list[list[int]], kinds: list[list[int]] | None, shape: Shape
    ) -> Tensor:
        self._note(shape, str(shape) if self.plan is not None else "buckets")
        with self._running(f"shape {shape}"):
            return run_rectangle(self.prepared, rows, kinds, shape, self.backend.spec.pad_side)

    def _note(self, shape: Shape, name: str) -> None:
        if self.ready:
            self._counts.add(shape.volume, name)

    @property
    def rules(self) -> RuleReport | None:
        """What plan, graphs and their inputs so far break of a card's rules; None without one."""
        if self.memory is None or self._guard is None:
            return None
        graphs: RuleReport = getattr(self.backend.compiler, "report", RuleReport())
        return graphs + self.memory.report() + self._guard.report

    def report(self) -> dict[str, Any]:
        """What was prepared, run, compiled and found, as plain values."""
        return {
            "backend": self.backend.name,
            "dialect": self.backend.spec.dialect,
            "attention": self.attention if self.prepared.layers else "the model's own",
            **described(self.prepared),
            "shapes": None if self.plan is None else [str(shape) for shape in self.plan.shapes],
            "shares_prefixes": self.shares_prefixes,
            **compiled(self._compiler),
            **self._counts.described(),
            "blocks": self._pages.usage(),
            "remembered": self._remembered.described(),
            "memory": None if self.memory is None else self.memory.described(),
            "rules": None if self.rules is None else self.rules.to_dict(),
        }
