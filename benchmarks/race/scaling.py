# SPDX-License-Identifier: Apache-2.0
"""How time and memory grow: with the number of texts, with their length, and with the number of
requests that begin alike. The exponent is the slope of log(seconds) over log(x)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

from race.processes import PeerError, Process
from race.running import Plan, awake, unfit
from race.sets import rerank, short

CHUNK = 2_000
"""Texts that are handed over at once: a stream is read in pieces."""
REPEATED = 20.0
"""A point that takes less seconds is measured `rounds` times."""
SLOW_MOST = 10_000
"""Texts at most for others than headswap, which need no memory beyond a batch either."""

Given = Callable[[int, int], Iterator[list[Any]]]  # x, round -> pieces


@dataclass(frozen=True)
class Curve:
    title: str
    model: str
    points: tuple[int, ...]
    peers: tuple[str, ...]
    given: Callable[[Plan], Given]
    longest: int = 512


def stream(plan: Plan) -> Given:
    def given(count: int, round_: int) -> Iterator[list[Any]]:
        for start in range(0, count, CHUNK):
            size = min(CHUNK, count - start)
            yield short(plan.words, size, 1_000_000 * (round_ + 1) + start)

    return given


def lengths(plan: Plan) -> Given:
    def given(length: int, round_: int) -> Iterator[list[Any]]:
        import random

        yield [plan.words.text(length, random.Random(f"length {round_}"))]

    return given


def prefixes(plan: Plan) -> Given:
    def given(count: int, round_: int) -> Iterator[list[Any]]:
        yield rerank(plan.words, count, round_)

    return given


def all_curves(most: int, longest: int) -> list[Curve]:
    counts = tuple(n for n in (100, 1_000, 10_000, 100_000) if n <= most)
    sizes = tuple(n for n in (128, 512, 2_048, 8_192) if n <= longest)
    alike = tuple(n for n in (1, 4, 16, 64) if n <= max(1, most))
    plain = ("one", "sorted", "headswap")
    return [
        Curve("number of short texts", "minilm-l6", counts, plain, stream),
        Curve("tokens of a text, causal", "llama-135m", sizes, ("one", "headswap"), lengths, 8_192),
        Curve("tokens of a text, encoder", "modernbert-base", sizes, ("one", "headswap"), lengths,
              8_192),
        Curve("requests with one beginning", "llama-135m", alike,
              ("one", "vllm", "headswap", "headswap-shared"), prefixes),
    ]  # fmt: skip


def curves(plan_of: Callable[[str], Plan], most: int, longest: int) -> dict[str, Any]:
    """Every curve with every peer of it that was asked for."""
    found = {}
    for curve in all_curves(most, longest):
        plan = replace(plan_of(curve.model), longest=curve.longest)
        plan.say(f"{curve.title}: {curve.model}, {plan.dtype}")
        found[curve.title] = {
            "model": curve.model, "x": curve.points, "peers": measured(plan, curve),
        }  # fmt: skip
    return {"curves": found}


def measured(plan: Plan, curve: Curve) -> dict[str, Any]:
    found: dict[str, Any] = {}
    given = curve.given(plan)
    with ExitStack() as stack:
        ready: dict[str, Process] = {}
        for peer in (p for p in curve.peers if p in plan.peers):
            found[peer] = {"missing": unfit(plan, peer), "x": [], "seconds": [], "mib": []}
            if not found[peer]["missing"]:
                ready[peer] = stack.enter_context(closing(plan.process(peer)))
                _guarded(plan, peer, ready, found, lambda p: p.ask("load", **plan.spec))
        for x in curve.points:
            for peer in list(ready):
                if not (curve.given is stream and "headswap" not in peer and x > SLOW_MOST):
                    _guarded(
                        plan,
                        peer,
                        ready,
                        found,
                        lambda p, x=x, peer=peer: _point(plan, p, given, x, found[peer]),
                    )
    for peer, one in found.items():
        one["exponent"] = exponent(one["x"], one["seconds"])
        one["last_exponent"] = exponent(one["x"][-2:], one["seconds"][-2:])
        plan.say(f"  {peer}: {one['missing'] or said(one)}")
    return found


def _guarded(
    plan: Plan, peer: str, ready: dict[str, Process], found: dict[str, Any],
    step: Callable[[Process], Any],
) -> None:  # fmt: skip
    try:
        with awake(ready[peer]):
            step(ready[peer])
    except PeerError as error:
        found[peer]["missing"] = str(error)
        plan.say(f"  {peer}: {error}")
        ready.pop(peer).close()


def _point(plan: Plan, process: Process, given: Given, x: int, one: dict[str, Any]) -> None:
    process.ask("single", texts=short(plan.words, 2, -x))
    spent: list[float] = []
    while len(spent) < plan.rounds and (not spent or spent[0] < REPEATED):
        spent.append(sum(process.ask("run", set="", texts=piece)["seconds"]
                         for piece in given(x, len(spent))))  # fmt: skip
    one["x"].append(x)
    one["seconds"].append(statistics.median(spent))
    one["mib"].append(process.peak_mib())
    plan.say(f"  {process.name}: {x}: {one['seconds'][-1]:.3f} s, {one['mib'][-1]:.0f} MiB")


def exponent(x: Sequence[float], y: Sequence[float]) -> float | None:
    """The slope of log y over log x, by least squares."""
    if len(x) < 2:
        return None
    across, up = [math.log(v) for v in x], [math.log(v) for v in y]
    mid, mean = statistics.mean(across), statistics.mean(up)
    spread = sum((a - mid) ** 2 for a in across)
    return sum((a - mid) * (b - mean) for a, b in zip(across, up, strict=True)) / spread


def said(one: dict[str, Any]) -> str:
    """A curve in words."""
    if one["exponent"] is None:
        return f"one point, {one['seconds'][0]:.3f} s" if one["seconds"] else "no point"
    return (
        f"seconds grow with exponent {one['exponent']:.2f} ({one['last_exponent']:.2f} between the "
        f"last two points), memory from {one['mib'][0]:.0f} to {one['mib'][-1]:.0f} MiB"
    )
