# SPDX-License-Identifier: Apache-2.0
"""Names of architectures, and what serves them. Imports the standard library only."""

from headswap.registry.catalog import ALIASES, HEADS, RETIRED
from headswap.registry.entry import TASKS, AdapterEntry, Task
from headswap.registry.errors import (
    AdapterImportError,
    ArchitectureError,
    CheckpointError,
    ConversionError,
    DuplicateArchitectureError,
    HeadswapError,
    InputError,
    LabelError,
    MissingHeadError,
    PluginWarning,
    RegistrationError,
    RemoteCodeError,
    RemovedArchitectureError,
    RenamedArchitectureError,
    TaskError,
    UnknownArchitectureError,
    UnsupportedHeadError,
    WeightError,
)
from headswap.registry.registry import AdapterRegistry
from headswap.registry.resolution import Resolution
from headswap.registry.rules import SuffixRule, WeightRule
from headswap.registry.state import State
from headswap.registry.tables import load_tables

__all__ = [
    "TASKS",
    "AdapterEntry",
    "AdapterImportError",
    "AdapterRegistry",
    "ArchitectureError",
    "CheckpointError",
    "ConversionError",
    "DuplicateArchitectureError",
    "HeadswapError",
    "InputError",
    "LabelError",
    "MissingHeadError",
    "PluginWarning",
    "RegistrationError",
    "RemoteCodeError",
    "RemovedArchitectureError",
    "RenamedArchitectureError",
    "Resolution",
    "SuffixRule",
    "Task",
    "TaskError",
    "UnknownArchitectureError",
    "UnsupportedHeadError",
    "WeightError",
    "WeightRule",
    "global_registry",
]

global_registry = AdapterRegistry(
    entry_point_group="headswap.adapters",
    tables=load_tables,
    state=State(aliases=ALIASES, retired=RETIRED, heads=HEADS),
)
"""The one registry that `headswap`'s functions use; `copy()` it for one of your own."""
