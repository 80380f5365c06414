# SPDX-License-Identifier: Apache-2.0
"""The package list in pyproject.toml, the tree and the built wheel say the same.

Set HEADSWAP_WHEEL to a wheel's path to check that one; otherwise one is built in a temporary copy
(a build inside the checkout would leave a `build/` whose stale files go into the next wheel).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
SETUPTOOLS: dict[str, Any] = PROJECT["tool"]["setuptools"]
FOLDERS: dict[str, str] = SETUPTOOLS["package-dir"]


def in_tree() -> dict[str, Path]:
    """Each package below the mapped folders, by its import name."""
    found = {}
    for name, folder in sorted(FOLDERS.items(), key=lambda item: len(item[1])):
        for init in sorted((ROOT / folder).rglob("__init__.py")):
            below = init.parent.relative_to(ROOT / folder).parts
            found[".".join((name, *below))] = init.parent
    return found


def shipped() -> set[str]:
    """Paths in the wheel that the tree and package-data ask for."""
    files = set()
    data = SETUPTOOLS["package-data"]
    for name, folder in in_tree().items():
        paths = list(folder.glob("*.py"))
        for pattern in data.get(name, ()):
            paths += folder.glob(pattern)
        files |= {f"{name.replace('.', '/')}/{path.relative_to(folder)}" for path in paths}
    return files


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("HEADSWAP_WHEEL")
    if given:
        return Path(given)
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    for folder in {folder.split("/")[0] for folder in FOLDERS.values()}:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(out), str(copy)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return path


def test_the_package_list_is_sorted_and_every_folder_is_mapped() -> None:
    packages = SETUPTOOLS["packages"]
    assert packages == sorted(packages)
    assert set(FOLDERS) <= set(packages)


def test_every_package_in_the_tree_is_listed() -> None:
    assert sorted(in_tree()) == SETUPTOOLS["packages"]


def test_every_folder_with_python_files_is_a_package() -> None:
    folders = {path.parent for f in FOLDERS.values() for path in (ROOT / f).rglob("*.py")}
    assert folders == set(in_tree().values())


def test_the_data_patterns_find_files() -> None:
    for name, patterns in SETUPTOOLS["package-data"].items():
        for pattern in patterns:
            assert list(in_tree()[name].glob(pattern)), f"{name}: nothing matches {pattern}"


def test_the_wheel_holds_the_tree_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == shipped()


def test_the_wheel_says_its_licence_and_brings_the_text(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
        licences = [n for n in archive.namelist() if n.endswith("/licenses/LICENSE")]
    assert "License-Expression: Apache-2.0" in text
    assert len(licences) == 1


def test_the_marker_of_types_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert {"headswap/py.typed", "headswap/__init__.pyi"} <= set(archive.namelist())
