# SPDX-License-Identifier: Apache-2.0
"""What was measured, as Markdown tables, a plot, and a page's marked places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from race.scaling import said
from race.sets import SETS

Results = Mapping[str, Mapping[str, Any]]  # threads -> "MODEL DTYPE" -> run
OURS = "headswap"
COLUMNS = ("peer", "skewed texts/s", "tokens/s", "% GEMM peak", "rerank texts/s", "tokens/s",
           "% GEMM peak", "one short text, p50 ms", "load s", "warm-up s", "first answer s",
           "peak MiB", "largest difference")  # fmt: skip
SUMMARY = ("model", "skewed", "rerank", "one short text", "peak memory", "first answer")


def write(results: Results, folder: Path, docs: Path | None) -> None:
    """table.md and plot.png in `folder`; with `docs` the tables between that page's marks."""
    parts = {threads: page(threads, runs) for threads, runs in sorted(results.items())}
    (folder / "table.md").write_text("\n".join(parts.values()), "utf-8")
    if docs is not None:
        text = docs.read_text("utf-8")
        for threads, part in parts.items():
            text = placed(text, f"peers, threads {threads}", part)
        beside = docs.with_suffix(".part")
        beside.write_text(text, "utf-8")
        beside.rename(docs)
    for threads, runs in results.items():
        plot(races(runs), folder / f"plot-{threads}.png")


def placed(text: str, name: str, part: str) -> str:
    """`text` with `part` between the marks of that name; `ValueError` without them."""
    first, last = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, found, rest = text.partition(first)
    _, ended, after = rest.partition(last)
    if not (found and ended):
        raise ValueError(f"The page has no place for the table: it needs {first} and {last}.")
    return f"{before}{first}\n{part}\n{last}{after}"


def races(runs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: run for key, run in runs.items() if "peers" in run}


def page(threads: str, runs: Mapping[str, Any]) -> str:
    """Everything measured with that many threads."""
    lines = [f"### {threads} thread{'s' * (threads != '1')}", "", *machines(runs), ""]
    if races(runs):
        lines += ["headswap's best way against the best other way of the same precision (above 1: "
                  "faster; memory and first answer: against plain transformers, below 1: less).",
                  "", *summary(races(runs)), ""]  # fmt: skip
    for key, run in races(runs).items():
        lines += [*detail(key, run), ""]
    for key, run in runs.items():
        if "curves" in run:
            lines += [*grown(key, run["curves"]), ""]
    return "\n".join(lines)


def machines(runs: Mapping[str, Any]) -> list[str]:
    """One line for each kind of machine and day."""
    found = []
    for run in runs.values():
        one = run["machine"]
        found.append(
            f"{one['date']}: {one['cpu']} (family, model, stepping {one['family']}), "
            f"{one['cores']} cores, {one['memory_gib']:g} GiB, "
            f"{' '.join(one['flags'])}; {one['system']}."
        )
    return sorted(set(found))


def summary(runs: Mapping[str, Any]) -> list[str]:
    rows = [[key, *(_against(run["peers"], name) for name in (*SETS, "single")),
             _beside(run["peers"], "peak_mib"), _beside(run["peers"], "first_answer_s")]
            for key, run in runs.items()]  # fmt: skip
    return table(SUMMARY, rows)


def speed(peer: Mapping[str, Any], name: str) -> float | None:
    """Texts a second in a set, or of single texts."""
    if name == "single":
        return 1000 / peer["single_ms"] if peer.get("single_ms") else None
    found: float | None = peer.get("sets", {}).get(name, {}).get("texts_s")
    return found


def difference(peer: Mapping[str, Any]) -> float:
    return max((each["difference"] for each in peer.get("sets", {}).values()), default=0.0)


def right(peers: Mapping[str, Any]) -> dict[str, Any]:
    """The peers whose numbers are the reference's: within 1e-2, or three times what plain
    transformers differs by at the same precision. Others do other work, and are not compared."""
    limit = max(1e-2, 3 * difference(peers.get("one", {})))
    return {peer: one for peer, one in peers.items() if difference(one) <= limit}


def _against(peers: Mapping[str, Any], name: str) -> str:
    found = {peer: value for peer, one in right(peers).items() if (value := speed(one, name))}
    ours = max((value for peer, value in found.items() if peer.startswith(OURS)), default=None)
    others = {peer: value for peer, value in found.items() if not peer.startswith(OURS)}
    if ours is None or not others:
        return ""
    best = max(others, key=others.__getitem__)
    return f"{ours / others[best]:.2f} x {best}"


def _beside(peers: Mapping[str, Any], field: str) -> str:
    ours, plain = peers.get(OURS, {}).get(field), peers.get("one", {}).get(field)
    return f"{ours / plain:.2f}" if ours and plain else ""


def detail(key: str, run: Mapping[str, Any]) -> list[str]:
    counts, tokens = run["texts"], run["tokens"]
    versions = {name: value for one in run["peers"].values()
                for name, value in one.get("versions", {}).items()
                if name not in ("torch", "transformers")}  # fmt: skip
    own = run["peers"].get("one", {}).get("versions", {})
    listed = ", ".join(f"{name} {value}" for name, value in {**own, **versions}.items())
    lines = [
        f"**{key}**: {counts['skewed']} skewed texts ({tokens['skewed']} tokens), "
        f"{counts['rerank']} passages ({tokens['rerank']} tokens), {run['rounds']} interleaved "
        f"rounds, GEMM peak {run['gemm_gflops']:.0f} GFLOP/s; {listed}.",
        "",
        *table(COLUMNS, [_row(peer, one) for peer, one in run["peers"].items() if one.get("sets")]),
    ]
    first = [f"{peer} {one['prepared_s']:.0f} s" for peer, one in run["peers"].items()
             if "prepared_s" in one]  # fmt: skip
    if first:
        lines += [
            "",
            f"Converted or compiled once before, from start to answer: {', '.join(first)}.",
        ]
    wrong = [peer for peer in run["peers"] if peer not in right(run["peers"])]
    if wrong:
        lines += ["", f"Other numbers than the reference, so not compared: {', '.join(wrong)}."]
    missing = [f"{peer} ({one['missing']})" for peer, one in run["peers"].items() if one["missing"]]
    return [*lines, "", f"Missing: {'; '.join(missing)}."] if missing else lines


def _row(peer: str, one: Mapping[str, Any]) -> list[str]:
    cells = [peer]
    for name in SETS:
        found = one["sets"].get(name)
        cells += (
            ["", "", ""] if found is None else
            [f"{found['texts_s']:.2f}", f"{found['tokens_s']:.0f}", f"{found['peak_percent']:.0f}"]
        )  # fmt: skip
    single = one.get("single_ms")
    cells.append("" if single is None else f"{single:.1f}")
    cells += [f"{one[name]:.1f}" if name in one else ""
              for name in ("load_s", "warm_s", "first_answer_s")]  # fmt: skip
    cells.append(f"{one['peak_mib']:.0f}" if "peak_mib" in one else "")
    return [*cells, f"{difference(one):.1e}"]


def grown(key: str, curves: Mapping[str, Any]) -> list[str]:
    lines = [f"**{key}**", ""]
    rows = []
    for title, curve in curves.items():
        for peer, one in curve["peers"].items():
            values = zip(one["x"], one["seconds"], one["mib"], strict=True)
            points = "; ".join(f"{x}: {s:.3g} s, {m:.0f} MiB" for x, s, m in values)
            words = f"missing: {one['missing']}" if one["missing"] else said(one)
            rows.append([f"{title} ({curve['model']})", peer, points, words])
    return lines + table(("curve", "peer", "points", ""), rows)


def table(columns: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    cells = [list(columns), ["---"] * len(columns), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in cells]


def plot(runs: Mapping[str, Any], file: Path) -> None:
    """Texts a second of each peer, a panel a run and set; nothing without matplotlib."""
    try:
        from matplotlib import pyplot
    except ModuleNotFoundError:
        print(f"no {file.name}: matplotlib is missing (pip install -e '.[bench]')")
        return
    if not runs:
        return
    figure, axes = pyplot.subplots(len(runs), len(SETS), squeeze=False, layout="constrained",
                                   figsize=(5 * len(SETS), 2.4 * len(runs)))  # fmt: skip
    for row, (key, run) in zip(axes, runs.items(), strict=True):
        for panel, name in zip(row, SETS, strict=True):
            bars = dict(_bars(run["peers"], name))
            colours = ["#c44" if peer.startswith(OURS) else "#888" for peer in bars]
            panel.barh(list(bars), list(bars.values()), color=colours)
            panel.invert_yaxis()
            panel.set_title(f"{key}, {name}: texts/s", fontsize=9)
            panel.tick_params(labelsize=8)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _bars(peers: Mapping[str, Any], name: str) -> Iterator[tuple[str, float]]:
    for peer, one in peers.items():
        value = speed(one, name)
        if value is not None:
            yield peer, value
