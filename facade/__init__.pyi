# SPDX-License-Identifier: Apache-2.0
from headswap.convert import (
    ConversionPlan,
    ConversionReport,
    SequenceClassificationModel,
    as_embedding_model,
    as_reward_model,
    as_seq_cls_model,
    as_token_cls_model,
    convert_checkpoint,
    load,
    plan,
    resolve,
)
from headswap.heads import (
    HeadFamily,
    HeadSpec,
)
from headswap.registry import (
    AdapterEntry,
    AdapterImportError,
    AdapterRegistry,
    ArchitectureError,
    CheckpointError,
    ConversionError,
    DuplicateArchitectureError,
    HeadswapError,
    InputError,
    LabelError,
    MissingHeadError,
    RegistrationError,
    RemoteCodeError,
    RemovedArchitectureError,
    RenamedArchitectureError,
    Resolution,
    TaskError,
    UnknownArchitectureError,
    UnsupportedHeadError,
    WeightError,
    global_registry,
)
from headswap.text import fit_head

__all__ = [
    "AdapterEntry",
    "AdapterImportError",
    "AdapterRegistry",
    "ArchitectureError",
    "CheckpointError",
    "ConversionError",
    "ConversionPlan",
    "ConversionReport",
    "DuplicateArchitectureError",
    "HeadFamily",
    "HeadSpec",
    "HeadswapError",
    "InputError",
    "LabelError",
    "MissingHeadError",
    "RegistrationError",
    "RemoteCodeError",
    "RemovedArchitectureError",
    "RenamedArchitectureError",
    "Resolution",
    "SequenceClassificationModel",
    "TaskError",
    "UnknownArchitectureError",
    "UnsupportedHeadError",
    "WeightError",
    "as_embedding_model",
    "as_reward_model",
    "as_seq_cls_model",
    "as_token_cls_model",
    "convert_checkpoint",
    "fit_head",
    "load",
    "plan",
    "register",
    "register_alias",
    "register_head_family",
    "register_suffix_rule",
    "register_weight_rule",
    "resolve",
]

__version__: str

register = global_registry.register
register_alias = global_registry.register_alias
register_head_family = global_registry.register_head_family
register_suffix_rule = global_registry.register_suffix_rule
register_weight_rule = global_registry.register_weight_rule
