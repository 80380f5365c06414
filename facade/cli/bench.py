# SPDX-License-Identifier: Apache-2.0
"""`headswap bench`: a user's checkpoint here and under plain transformers, in turns."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Annotated, Any

import typer

from headswap.cli.inputs import read_texts
from headswap.cli.options import AsJson, Source, dtype_of, with_load_options
from headswap.cli.output import note, print_json, print_table, progress, quiet_libraries
from headswap.cli.racing import BATCHES, ONE, OURS, Racer, Row, Task
from headswap.registry.errors import ConversionError

TEXTS, SINGLES = 64, 5
COLUMNS = ("way", "texts/s", "tokens/s", "one text, ms", "load, s", "first answer, s", "peak, MiB",
           "largest difference")  # fmt: skip


@with_load_options
def bench(
    path: Source,
    *,
    load: dict[str, Any],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16, float16; auto: by this CPU; int8: here, others fp32."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each way has its turn.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="Of each way (torch's own).")] = None,
    file: Annotated[
        list[str] | None, typer.Option(help="A file of texts, one a line, or .jsonl.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a classifier here and under plain transformers: the same ids, in turns, medians."""
    if load.get("allow_untrained_head"):
        raise ConversionError("An untrained head is random, another one in each process.")
    dtype, int8 = numbers_of(dtype)  # a wrong name is refused before anything is started
    texts = read_texts([], file) if file else sample_texts(TEXTS)
    quiet_libraries()
    found = measured(path, load, dtype, threads, rounds, texts, int8=int8)
    if as_json:
        print_json(found)
        return
    note(_heading(found))
    print_table(COLUMNS, [_cells(way) for way in found["ways"]])


def numbers_of(dtype: str | None) -> tuple[str, bool]:
    """The dtype in which all ways load, and whether ours multiplies in int8."""
    if dtype == "int8":
        return "float32", True
    if dtype == "auto":
        from headswap.spyre.precision import best

        found, why = best()
        note(f"dtype auto: {found}, {why}")
        return str(found).removeprefix("torch."), False
    dtype_of(dtype)
    return dtype or "float32", False


def sample_texts(count: int) -> list[Any]:
    """Real sentences joined to texts of skewed (log-normal) lengths, always the same."""
    from headswap.cli.demo import read_sentences

    draw = random.Random(0)
    sentences = [sentence for _, sentence in read_sentences()]
    return [" ".join(draw.choices(sentences, k=max(1, round(3 * draw.lognormvariate(0, 0.9)))))
            for _ in range(count)]  # fmt: skip


def measured(
    path: str, load: dict[str, Any], dtype: str, threads: int | None, rounds: int,
    texts: Sequence[Any], *, int8: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The whole measurement as plain values."""
    from headswap.cli.machine import machine

    with ExitStack() as stack:
        racers = [stack.enter_context(closing(Racer(Task(way, path, load, dtype, threads, int8))))
                  for way in (OURS, ONE, BATCHES)]  # fmt: skip
        rows: list[Row] = racers[0].ask("encode", texts)
        wanted = _reference(path, load, threads, rows) if dtype != "float32" else None
        for racer in racers:
            racer.ask("run", rows[:BATCHED])
        turns, singles, logits = _race(racers, rows, rounds)
        tokens = sum(len(ids) for ids, _ in rows)
        ways = [
            {
                "way": racer.way,
                "texts_per_second": len(rows) / statistics.median(turns[racer.way]),
                "tokens_per_second": tokens / statistics.median(turns[racer.way]),
                "seconds": turns[racer.way],
                "one_text_ms": 1000 * statistics.median(singles[racer.way]),
                "load_s": racer.load_s,
                "first_answer_s": racer.started_s,
                "peak_mib": racer.ask("memory"),
                "difference": _furthest(logits[racer.way], wanted or logits[ONE]),
            }
            for racer in racers
        ]
        return {"source": path, "reference": racers[1].reference, "dtype": dtype, "int8": int8,
                "threads": threads, "rounds": rounds, "texts": len(rows), "tokens": tokens,
                "machine": machine(), "ways": ways}  # fmt: skip


BATCHED = 8
"""Texts that each way runs before it is measured."""


def _race(
    racers: Sequence[Racer], rows: list[Row], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, Any]]:
    """Seconds of each turn and of single texts, and the first turn's logits, by way."""
    turns: dict[str, list[float]] = {racer.way: [] for racer in racers}
    singles: dict[str, list[float]] = {racer.way: [] for racer in racers}
    logits: dict[str, Any] = {}
    short = min(rows, key=lambda row: len(row[0]))
    with progress("measuring") as update:
        for round_ in range(rounds):
            given = rows if round_ == 0 else [reordered(row, round_) for row in rows]
            for racer in racers:
                seconds, found = racer.ask("run", given)
                turns[racer.way].append(seconds)
                logits.setdefault(racer.way, found)
            for racer in racers:
                alone = [reordered(short, SINGLES * round_ + i) for i in range(SINGLES)]
                singles[racer.way] += [racer.ask("run", [row])[0] for row in alone]
            update(round_ + 1, rounds)
    return turns, singles, logits


def reordered(row: Row, seed: int) -> Row:
    """The row with the second half of its ids in another order, the last one kept: as long, and no
    cache of an earlier turn can answer."""
    ids, types = row
    half = len(ids) // 2
    moved = ids[half:-1]
    random.Random(seed).shuffle(moved)
    return [*ids[:half], *moved, *ids[-1:]], types


def _reference(path: str, load: dict[str, Any], threads: int | None, rows: list[Row]) -> Any:
    """fp32 logits of plain transformers, a text at a time."""
    with closing(Racer(Task(ONE, path, load, None, threads))) as racer:
        return racer.ask("run", rows)[1]


def _furthest(found: Sequence[Sequence[float]], wanted: Sequence[Sequence[float]]) -> float:
    return max(abs(a - b) for one, two in zip(found, wanted, strict=True)
               for a, b in zip(one, two, strict=True))  # fmt: skip


def _heading(found: dict[str, Any]) -> str:
    on = found["machine"]
    threads = found["threads"] or "torch's own number of"
    return (
        f"{found['source']} against {found['reference']}, {found['dtype']}"
        f"{' (int8 here)' if found['int8'] else ''}, {threads} threads, "
        f"{found['texts']} texts of {found['tokens']} tokens, medians of {found['rounds']} rounds; "
        f"{on['date']}, {on['cpu']}, {on['cores']} cores, {' '.join(on['flags'])}. From token ids "
        "to logits; differences from plain transformers in fp32."
    )


def _cells(way: dict[str, Any]) -> list[str]:
    peak = way["peak_mib"]
    return [way["way"], f"{way['texts_per_second']:.1f}", f"{way['tokens_per_second']:.0f}",
            f"{way['one_text_ms']:.1f}", f"{way['load_s']:.1f}", f"{way['first_answer_s']:.1f}",
            "" if peak is None else f"{peak:.0f}", f"{way['difference']:.1e}"]  # fmt: skip
