# SPDX-License-Identifier: Apache-2.0
"""The commands. Exit status: 0 done, 1 a check failed, 2 wrong usage, 3 refused with a reason."""

from __future__ import annotations

import io
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from headswap.cli.bench import bench
from headswap.cli.options import AsJson, Dtype, Source, dtype_of, with_load_options
from headswap.cli.output import (
    note,
    print_json,
    print_table,
    quiet_libraries,
    say,
)
from headswap.cli.texts import classify, embed, rerank, reward
from headswap.registry.errors import HeadswapError

FAILED, REFUSED, INTERRUPTED = 1, 3, 130

app = typer.Typer(
    name="headswap",
    help="Turn language models and encoders into classifiers, with the reference's own numbers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
@with_load_options
def inspect(
    path: Source,
    *,
    load: dict[str, Any],
    device: Annotated[
        str | None,
        typer.Option(help="spyre or sendnn: also run its graphs against that stack's rules."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what would be done with a checkpoint and why. Reads no weights, unless --device is given:
    then the model's graphs are made and checked against the card's rules."""
    import headswap
    from headswap.cli.device import checked
    from headswap.spyre import detect

    quiet_libraries()
    plan = headswap.plan(path, **load)
    stack = detect()
    rules = checked(path, device, load) if device is not None and plan.ok else None
    if as_json:
        more = {} if rules is None else {"rules": rules.to_dict()}
        print_json({**plan.to_dict(), "device": stack.name.lower(), **more})
    else:
        found = "no Spyre compiler found" if stack.name == "NONE" else f"Spyre by {stack.name}"
        say(f"{plan}\n  device     {found if stack.name != 'NONE' else f'CPU ({found})'}")
        if rules is not None:
            say(f"  rules      {device}, {len(rules.errors)} broken\n{rules}")
        elif device is not None:
            say(f"  rules      {device}, not looked at: what is missing above comes first")
    if not plan.ok:
        raise typer.Exit(FAILED)


@app.command()
@with_load_options
def convert(
    source: Source,
    target: Annotated[Path, typer.Argument(help="The folder to write; must not exist.")],
    *,
    load: dict[str, Any],
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint converted into a classifier, checked and complete or not at all."""
    import headswap

    quiet_libraries()
    report = headswap.convert_checkpoint(source, target, dtype=dtype_of(dtype), **load)
    if as_json:
        print_json(report.to_dict())
    else:
        say(str(report))


@app.command()
@with_load_options
def verify(path: Source, *, load: dict[str, Any], as_json: AsJson = False) -> None:
    """Run the reference class and ours on the same ids and print the largest differences."""
    quiet_libraries()
    from headswap.convert import verify as run

    report = run(path, **load)
    if as_json:
        print_json(report.to_dict())
    else:
        note(f"{report.source} against {report.reference}, fp32, largest logit {report.scale:.3g}")
        if not report.independent:
            note("transformers has no such head: this shows that padding changes nothing, no more")
        print_table(
            ("input", "largest difference"),
            [(c.name, c.note if c.difference is None else f"{c.difference:.1e}")
             for c in report.cases],
        )  # fmt: skip
        note(f"the reference's own batch differs from its rows one by one by {report.spread:.1e}")
    if not report.ok:
        note(f"differs by more than {report.tolerance:g} of the logits' size")
        raise typer.Exit(FAILED)


app.command()(classify)
app.command()(rerank)
app.command()(embed)
app.command()(reward)
app.command()(bench)


@app.command()
def demo(
    cache: Annotated[
        Path | None, typer.Option(help="Where converted checkpoints are kept.")
    ] = None,
) -> None:
    """Classify real sentences with two real checkpoints, and compare with their own classes."""
    from headswap.cli.demo import run

    quiet_libraries()
    if not run(cache):
        raise typer.Exit(FAILED)


def main() -> None:
    """Run the command line; every expected failure ends in one line and a status."""
    warnings.showwarning = _warn
    for stream in (sys.stdout, sys.stderr):  # as what is read, whatever the locale is
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        app()
    except HeadswapError as error:
        note(f"error: {error}")
        sys.exit(REFUSED)
    except BrokenPipeError:
        # The reader of our output is gone; a second error at shutdown would only be noise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except OSError as error:
        note(f"error: {error}")
        sys.exit(REFUSED)
    except KeyboardInterrupt:
        note("interrupted")
        sys.exit(INTERRUPTED)


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    note(f"warning: {message}")
