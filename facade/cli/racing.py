# SPDX-License-Identifier: Apache-2.0
"""Ways to run one checkpoint, each in a process of its own, which are asked in turns."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from headswap.registry.errors import ConversionError, HeadswapError

OURS, ONE, BATCHES = "headswap", "transformers, one at a time", "transformers, sorted batches"
BATCH = 32
Row = tuple[list[int], list[int] | None]
Run = Callable[[Sequence[Row]], Any]  # rows -> fp32 logits [rows, labels]


@dataclass(frozen=True)
class Task:
    """What a process is asked to load; `dtype` None is float32, `threads` None torch's own, `int8`
    for int8 products here."""

    way: str
    path: str
    load: dict[str, Any]
    dtype: str | None = None
    threads: int | None = None
    int8: bool = False


class Racer:
    """The process of one way. `started_s` is from its start to its first answer, `load_s` what of
    that loading took; `reference` names the class that transformers runs."""

    def __init__(self, task: Task) -> None:
        context = multiprocessing.get_context("spawn")
        self.way = task.way
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, task), daemon=True)
        start = time.perf_counter()
        self._process.start()
        theirs.close()
        try:
            self.load_s, self.reference = self._answer()
        except BaseException:
            self.close()
            raise
        self.started_s = time.perf_counter() - start

    def ask(self, do: str, *given: Any) -> Any:
        self._pipe.send((do, *given))
        return self._answer()

    def _answer(self) -> Any:
        try:
            failed, found = self._pipe.recv()
        except EOFError:
            failed, found = True, "its process ended; was there memory enough?"
        if failed:
            raise ConversionError(f"{self.way}: {found}")
        return found

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):
            self._pipe.send(("quit",))
        self._process.join(5)
        self._process.kill()
        self._process.join()


def _serve(pipe: Any, task: Task) -> None:
    """In the process: load, then answer until told to quit. What is refused is said, not raised."""
    from headswap.cli.machine import peak_mib
    from headswap.cli.output import note, quiet_libraries

    warnings.showwarning = lambda message, *_, **__: note(f"warning: {message}")
    try:
        quiet_libraries()
        opened = _Opened(task)
        pipe.send((False, (opened.load_s, opened.reference)))
        while (asked := pipe.recv())[0] != "quit":
            do, *given = asked
            pipe.send((False, peak_mib() if do == "memory" else getattr(opened, do)(*given)))
    except (EOFError, KeyboardInterrupt):  # the parent is gone
        return
    except (HeadswapError, OSError) as error:
        pipe.send((True, str(error)))
    except Exception as error:  # whatever it is, the parent has to hear of it
        pipe.send((True, f"{type(error).__name__}: {error}"))


class _Opened:
    """The loaded way."""

    def __init__(self, task: Task) -> None:
        import torch

        from headswap.convert.decide import Options
        from headswap.convert.job import prepare

        if task.threads is not None:
            torch.set_num_threads(task.threads)
        start = time.perf_counter()
        options = {key: value for key, value in task.load.items() if key != "template"}
        self._task, self._job = task, prepare(task.path, Options(**options))
        dtype = getattr(torch, task.dtype or "float32")
        self.reference = ""
        self._run: Run = self._ours(dtype) if task.way == OURS else self._theirs(dtype)
        self.load_s = time.perf_counter() - start
        self.run(_first_rows(self._job))

    def _ours(self, dtype: Any) -> Run:
        import torch

        from headswap.spyre import Executor

        used = torch.int8 if self._task.int8 else None
        self._executor = executor = Executor(self._job.load(dtype), dtype=used).warmup()

        def run(rows: Sequence[Row]) -> Any:
            segments = [types for _, types in rows if types is not None]
            return executor.logits([ids for ids, _ in rows], segments or None)

        return run

    def _theirs(self, dtype: Any) -> Run:
        import torch

        from headswap.convert.reference import reference_of

        size = BATCH if self._task.way == BATCHES else 1
        self.reference, reference, _ = reference_of(self._job, dtype, spare=0)

        def run(rows: Sequence[Row]) -> Any:
            order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
            found: list[Any] = [None] * len(rows)
            for start in range(0, len(order), size):
                index = order[start : start + size]
                logits = reference([rows[i] for i in index]).logits
                for i, row in zip(index, logits, strict=True):
                    found[i] = row
            return torch.stack(found)

        return run

    def encode(self, texts: Sequence[Any]) -> list[Row]:
        """The ids, and segments where the model has them, that a `Classifier` makes of texts."""
        from headswap.text import Classifier
        from headswap.text.running import takes_segments

        classifier = Classifier(
            self._executor, tokenizer=self._job.checkpoint.tokenizer(),
            template=self._task.load.get("template") or "auto",
        )  # fmt: skip
        used = takes_segments(self._executor.model)
        return [(row.ids, row.types if used else None) for row in classifier.encode(texts)]

    def run(self, rows: Sequence[Row]) -> tuple[float, list[list[float]]]:
        """Seconds, and the logits."""
        import torch

        start = time.perf_counter()
        with torch.inference_mode():
            found = self._run(rows)
        return time.perf_counter() - start, found.tolist()


def _first_rows(job: Any) -> list[Row]:
    """A short row of any ids, by which a process is known to be ready."""
    from headswap.convert.verify import sample_rows

    return sample_rows(job)[:1]
