# SPDX-License-Identifier: Apache-2.0
"""One interleaved run: peers take turns at the same texts, and those who wait are stopped."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from race.machine import free_bytes
from race.models import Model
from race.processes import PeerError, Process
from race.sets import LONGEST, SETS, Words, short
from race.ways import Spec
from race.worker import way_class

Say = Callable[[str], None]
WARM_TEXTS = 16
"""Of each set, for a warm-up, and to choose a batch size."""
SINGLES = 10


@dataclass(frozen=True)
class Plan:
    """What is run: `python` maps a peer to its environment's Python."""

    model: Model
    words: Words
    dtype: str
    threads: int
    rounds: int
    counts: Mapping[str, int]
    peers: Sequence[str]
    python: Mapping[str, str]
    logs: Path
    say: Say
    longest: int = LONGEST
    rehearse: bool = False  # every peer loads once before it is timed, so that its files are cached

    @property
    def spec(self) -> dict[str, Any]:
        return {"folder": str(self.model.folder), "dtype": self.dtype, "threads": self.threads,
                "causal": self.model.causal, "longest": self.longest}  # fmt: skip

    def texts(self, name: str, round_: int) -> list[Any]:
        return SETS[name](self.words, self.counts[name], round_)

    def process(self, peer: str) -> Process:
        log = self.logs / f"{self.model.name}-{self.dtype}-{peer}.log"
        return Process(self.python.get(peer, self.python[""]), peer, self.threads, log)


@dataclass
class Found:
    """What was measured of one peer; `missing` says why there is nothing, or nothing more."""

    missing: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    logits: dict[str, list[list[float]]] = field(default_factory=dict)
    singles: list[float] = field(default_factory=list)


def rehearse(plan: Plan, peer: str) -> dict[str, float]:
    """A first load in a process that is ended again, where one converts or compiles, or was asked
    for; its seconds are told apart."""
    unprepared = way_class(peer).unprepared(Spec(**plan.spec))
    if not (unprepared or plan.rehearse):
        return {}
    with closing(plan.process(peer)) as process:
        process.ask("load", **plan.spec)
        process.ask("single", texts=short(plan.words, 1, -1))
        return {"prepared_s": time.perf_counter() - process.started} if unprepared else {}


def race(plan: Plan) -> dict[str, Any]:
    """The run as plain values; a peer that fails is left out from there on, and it is said why."""
    reference = referenced(plan)
    for file in plan.model.folder.glob("*.safetensors"):
        file.read_bytes()  # every peer finds it in the system's cache
    found: dict[str, Found] = {}
    peaks: list[float] = []
    with ExitStack() as stack:
        gemm = stack.enter_context(closing(plan.process("gemm")))
        gemm.ask("load", **plan.spec)
        gemm.stop()
        ready = started(plan, found, stack)
        for round_ in range(plan.rounds):
            peaks.append(_peak(gemm))
            take_turns(plan, ready, found, round_)
        for peer, process in list(ready.items()):
            found[peer].facts["peak_mib"] = process.peak_mib()
            with said(plan, peer, found[peer], ready), awake(process):
                found[peer].facts |= process.ask("settings")
    return summed(plan, found, reference, max(peaks))


def started(plan: Plan, found: dict[str, Found], stack: ExitStack) -> dict[str, Process]:
    """The peers that could be loaded, warm and stopped; what became of each stands in `found`."""
    ready: dict[str, Process] = {}
    for peer in plan.peers:
        found[peer] = Found(missing=unfit(plan, peer))
        if not found[peer].missing:
            with said(plan, peer, found[peer], ready):
                found[peer].facts |= rehearse(plan, peer)
                ready[peer] = stack.enter_context(closing(plan.process(peer)))
                start(plan, ready[peer], found[peer])
    return ready


def take_turns(plan: Plan, ready: dict[str, Process], found: dict[str, Found], round_: int) -> None:
    """A round: every set with every peer, then single texts."""
    for name in SETS:
        texts = plan.texts(name, round_)
        for peer in list(ready):
            with said(plan, peer, found[peer], ready), awake(ready[peer]):
                take_turn(plan, ready[peer], found[peer], name, round_, texts)
    for peer in list(ready):
        with said(plan, peer, found[peer], ready), awake(ready[peer]):
            texts = short(plan.words, SINGLES + 1, round_ + 1)
            found[peer].singles += ready[peer].ask("single", texts=texts)["seconds"][1:]


def _peak(gemm: Process) -> float:
    with awake(gemm):
        found: float = gemm.ask("run", set="", texts=[""], logits=True)["logits"][0][0]
    return found


def unfit(plan: Plan, peer: str) -> str:
    """Why a peer is not started; empty where it is."""
    cls = way_class(peer)
    if plan.dtype not in cls.dtypes:
        return f"runs in {', '.join(cls.dtypes)} only"
    if cls.causal_only and not plan.model.causal:
        return "for causal models"
    if cls.encoders_only and plan.model.causal:
        return "takes pairs only, in a form of its own"
    wanted = 2 * plan.model.parameters * 4 + (3 << 30 if "vllm" in peer else 1 << 30)
    if free_bytes() < wanted:
        return f"not started: {free_bytes() >> 20} MiB are free, it may take {wanted >> 20}"
    return ""


@contextmanager
def said(plan: Plan, peer: str, found: Found, ready: dict[str, Process]) -> Iterator[None]:
    """A peer's failure ends its part of the run and is written down."""
    try:
        yield
    except PeerError as error:
        found.missing = str(error)
        plan.say(f"  {peer}: {error}")
        if peer in ready:
            ready.pop(peer).close()


@contextmanager
def awake(process: Process) -> Iterator[None]:
    """The process runs inside and is stopped before and after."""
    process.go_on()
    try:
        yield
    finally:
        process.stop()


def start(plan: Plan, process: Process, found: Found) -> None:
    """Load, first answer, warm-up; then stop the process."""
    loaded = process.ask("load", **plan.spec)
    process.ask("single", texts=short(plan.words, 1, -1))
    found.facts |= {"load_s": loaded["seconds"], "versions": loaded["versions"],
                    "first_answer_s": time.perf_counter() - process.started}  # fmt: skip
    warmed, batches = 0.0, {}
    for name in SETS:
        texts = plan.texts(name, -1)[:WARM_TEXTS]
        said_ = process.ask("warm", set=name, texts=texts)
        warmed += said_["seconds"]
        batches[name] = said_["batch"]
    found.facts |= {"warm_s": warmed, "batch": batches}
    process.stop()
    plan.say(f"  {process.name}: loaded in {loaded['seconds']:.1f} s, warm in {warmed:.1f} s")


def take_turn(
    plan: Plan, process: Process, found: Found, name: str, round_: int, texts: list[Any]
) -> None:
    process.ask("single", texts=short(plan.words, 1, -2 - round_))  # threads and caches wake up
    used = process.cpu_seconds()
    done = process.ask("run", set=name, texts=texts, logits=round_ == 0)
    found.seconds.setdefault(name, []).append(done["seconds"])
    found.cpu.setdefault(name, []).append(process.cpu_seconds() - used)
    if round_ == 0:
        found.logits[name] = done["logits"]
    plan.say(f"  {process.name}: {name} {round_ + 1}: {len(texts) / done['seconds']:.2f} texts/s")


def referenced(plan: Plan) -> dict[str, Any]:
    """fp32 logits of plain transformers, a text at a time, for the first round's texts; kept beside
    the model."""
    texts = {name: plan.texts(name, 0) for name in SETS}
    key = hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
    file = plan.model.folder / f"reference-{key}.json"
    if not file.exists():
        plan.say("  reference: fp32, a text at a time")
        with closing(plan.process("one")) as process:
            process.ask("load", **{**plan.spec, "dtype": "float32"})
            found = {name: process.ask("run", set=name, texts=given, logits=True)["logits"]
                     for name, given in texts.items()}  # fmt: skip
        beside = file.with_suffix(".part")
        beside.write_text(json.dumps(found), "utf-8")
        beside.rename(file)
    kept: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return kept


def summed(
    plan: Plan, found: Mapping[str, Found], reference: Mapping[str, Any], peak: float
) -> dict[str, Any]:
    """Medians, and what follows from them."""
    tokens = {name: plan.words.tokens(plan.texts(name, 0)) for name in SETS}
    return {
        "rounds": plan.rounds,
        "texts": dict(plan.counts),
        "tokens": tokens,
        "gemm_gflops": peak / 1e9,
        "peers": {
            peer: {
                "missing": one.missing,
                **one.facts,
                **_measured(plan, one, reference, tokens, peak),
            }
            for peer, one in found.items()
        },
    }


def _measured(
    plan: Plan, one: Found, reference: Mapping[str, Any], tokens: Mapping[str, int], peak: float
) -> dict[str, Any]:
    sets = {}
    for name, seconds in one.seconds.items():
        middle = statistics.median(seconds)
        sets[name] = {
            "seconds": seconds,
            "cpu_seconds": one.cpu[name],
            "texts_s": plan.counts[name] / middle,
            "tokens_s": tokens[name] / middle,
            "peak_percent": 100 * 2 * plan.model.linear * tokens[name] / middle / peak,
            "difference": furthest(one.logits[name], reference[name]),
        }
    single = statistics.median(one.singles) * 1000 if one.singles else None
    return {"sets": sets, "single_ms": single}


def furthest(found: Sequence[Sequence[float]], wanted: Sequence[Sequence[float]]) -> float:
    """The largest difference of any logit; infinite where one is no number."""
    gaps = [abs(a - b) for one, two in zip(found, wanted, strict=True)
            for a, b in zip(one, two, strict=True)]  # fmt: skip
    return max((gap if gap == gap else float("inf") for gap in gaps), default=0.0)
