# SPDX-License-Identifier: Apache-2.0
"""A worker's process, seen from the driver: asked, stopped while others run, measured, ended."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent


class PeerError(Exception):
    """The peer could not do it; the message says why."""


class Process:
    """`python -m race.worker NAME` under the Python of some environment. It starts a session of its
    own, by which its engine's processes are found, stopped and measured with it."""

    def __init__(self, python: str, name: str, threads: int, log: Path) -> None:
        self.name, self.log = name, log
        self.started = time.perf_counter()
        counts = {f"{library}_NUM_THREADS": str(threads) for library in ("OMP", "MKL", "RAYON")}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [python, "-m", "race.worker", name],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                start_new_session=True,
                env={**os.environ, **counts, "PYTHONPATH": str(BENCHMARKS), "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip

    def ask(self, do: str, timeout: float = 1800, **message: Any) -> dict[str, Any]:
        """What the worker answers; `PeerError` where it fails, dies or takes too long."""
        given, out = self._process.stdin, self._process.stdout
        if given is None or out is None:
            raise PeerError("no pipe")
        try:
            given.write(json.dumps({"do": do, **message}).encode() + b"\n")
            given.flush()
        except BrokenPipeError as error:
            raise PeerError(self._last_words()) from error
        if not select.select([out], [], [], timeout)[0]:
            raise PeerError(f"no answer to {do!r} within {timeout:g} s")
        line = out.readline()
        if not line:
            raise PeerError(self._last_words())
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise PeerError(found["error"])
        return found

    def _last_words(self) -> str:
        lines = self.log.read_text("utf-8", errors="replace").strip().splitlines()
        return f"ended: {lines[-1][-300:] if lines else 'without a word'}"

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for pid in self._pids():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def _pids(self) -> list[int]:
        """The processes of the worker's session, itself among them."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text("utf-8", errors="replace").rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if int(fields[3]) == self._process.pid and fields[0] != "Z":
                found.append(int(stat.parent.name))
        return found

    def peak_mib(self) -> float:
        """Sum of the largest resident sizes (VmHWM) of the worker and its engine's processes."""
        total = 0
        for pid in self._pids():
            try:
                lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
            except OSError:
                continue
            total += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        return total / 1024

    def cpu_seconds(self) -> float:
        """Processor time that the session's processes have used so far."""
        ticks = 0
        for pid in self._pids():
            try:
                stat = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
            except OSError:
                continue
            ticks += sum(map(int, stat.rpartition(")")[2].split()[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End what was started here, and nothing else."""
        self.go_on()
        try:
            if self._process.poll() is None and self._process.stdin is not None:
                self._process.stdin.write(b'{"do": "quit"}\n')
                self._process.stdin.close()
                self._process.wait(5)
        except (OSError, subprocess.TimeoutExpired):
            pass
        self._signal(signal.SIGKILL)
        self._process.wait()
