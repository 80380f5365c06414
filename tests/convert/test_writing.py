# SPDX-License-Identifier: Apache-2.0
"""Writing that is cut short, or meets another: the target is complete, or as it was."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import headswap
from headswap.convert.beside import written_beside

LM: dict[str, Any] = {"label_tokens": [7, 41]}
WRITE = "headswap.convert.write."


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize("where", ["write_stream", "_copy_tokenizer", "written_logits"])
@pytest.mark.parametrize("error", [
    OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), MemoryError(),
])  # fmt: skip
def test_an_interrupted_run_leaves_nothing(
    saved: Any, tmp_path: Path, monkeypatch: Any, where: str, error: BaseException
) -> None:
    def fail(*arguments: Any) -> None:
        if where == "write_stream":
            (arguments[1] / "model.safetensors").write_bytes(b"half")
        raise error

    folder = saved("llama")
    monkeypatch.setattr(WRITE + where, fail)
    expected = headswap.CheckpointError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        headswap.convert_checkpoint(folder, tmp_path / "new" / "out", **LM)
    assert names(tmp_path / "new") == []


@pytest.mark.parametrize("over_a_model", [False, True])
def test_a_disk_that_is_full_is_named(
    saved: Any, tmp_path: Path, monkeypatch: Any, over_a_model: bool
) -> None:
    """A limit on the size of files stands for the disk."""
    resource = pytest.importorskip("resource")
    folder = saved("llama")
    if over_a_model:
        monkeypatch.setattr(WRITE + "obstacle", lambda *_: "the test says so")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(headswap.CheckpointError, match=r"out can't be written: .*File too"):
            headswap.convert_checkpoint(folder, tmp_path / "new" / "out", **LM)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert names(tmp_path / "new") == []


KILLED = """
import os, signal, sys
import headswap
import headswap.convert.write as write
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
setattr(write, sys.argv[3], die)
headswap.convert_checkpoint(sys.argv[1], sys.argv[2], label_tokens=[7, 41])
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs signals")
@pytest.mark.parametrize("where", ["write_stream", "written_logits"])
def test_what_a_killed_run_left_is_removed_by_the_next(
    saved: Any, tmp_path: Path, where: str
) -> None:
    folder, target = saved("llama"), tmp_path / "new" / "out"
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(target), where],
                          capture_output=True)  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    assert not target.exists()
    assert len(names(target.parent)) == 1
    headswap.convert_checkpoint(folder, target, **LM)
    assert names(target.parent) == ["out"]


def test_the_folder_of_a_running_conversion_is_not_taken_for_a_leftover(tmp_path: Path) -> None:
    with written_beside(tmp_path / "out") as first:
        (first / "file").write_text("1")
        with suppress(KeyError), written_beside(tmp_path / "out") as second:
            assert second != first
            raise KeyError
        assert (first / "file").exists()
    assert names(tmp_path) == ["out"]


def test_the_slower_of_two_runs_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    def race() -> None:
        with written_beside(tmp_path / "out") as slow:
            (slow / "file").write_text("slow")
            with written_beside(tmp_path / "out") as fast:
                (fast / "file").write_text("fast")

    with pytest.raises(headswap.CheckpointError, match="exists already"):
        race()
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "fast"


def test_of_many_runs_at_once_one_wins(tmp_path: Path) -> None:
    won: list[int] = []

    def write(number: int) -> None:
        try:
            with written_beside(tmp_path / "out") as folder:
                (folder / "file").write_text(str(number))
            won.append(number)
        except headswap.CheckpointError:
            pass

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "file").read_text() == str(won[0])


def test_an_empty_folder_is_filled(saved: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    headswap.convert_checkpoint(saved("llama"), tmp_path / "out", **LM)
    assert "config.json" in names(tmp_path / "out")


def test_written_files_have_the_rights_that_the_users_mask_gives(
    saved: Any, tmp_path: Path
) -> None:
    folder = saved("llama")
    before = os.umask(0o027)
    try:
        headswap.convert_checkpoint(folder, tmp_path / "out", **LM)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750
    files = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").iterdir()}
    assert files == {0o640}


@pytest.mark.parametrize("out", [None, 3, "", "a\0b"])
def test_a_target_that_is_no_path_is_refused(saved: Any, out: Any) -> None:
    with pytest.raises(headswap.CheckpointError, match="is no path to write to"):
        headswap.convert_checkpoint(saved("llama"), out, **LM)


def test_a_place_that_cannot_hold_a_folder_is_named(saved: Any, tmp_path: Path) -> None:
    folder = saved("llama")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(headswap.CheckpointError, match="exists already"):
        headswap.convert_checkpoint(folder, tmp_path / "link", **LM)
    with pytest.raises(headswap.CheckpointError, match="can't be written"):
        headswap.convert_checkpoint(folder, folder / "config.json" / "out", **LM)
    shutil.rmtree(folder)
