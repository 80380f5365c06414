# SPDX-License-Identifier: Apache-2.0
"""Causal language models and encoders as classifiers, rerankers, reward models and embedders.

Names are loaded when they are first asked for (PEP 562), so `import headswap` costs milliseconds
and loads neither torch nor transformers. `__init__.pyi` holds the same names for type checkers.
"""

from importlib import import_module

_MODULES: dict[str, str] = {
    "AdapterEntry": "headswap.registry",
    "AdapterImportError": "headswap.registry",
    "AdapterRegistry": "headswap.registry",
    "ArchitectureError": "headswap.registry",
    "CheckpointError": "headswap.registry",
    "ConversionError": "headswap.registry",
    "ConversionPlan": "headswap.convert",
    "ConversionReport": "headswap.convert",
    "DuplicateArchitectureError": "headswap.registry",
    "HeadFamily": "headswap.heads",
    "HeadSpec": "headswap.heads",
    "HeadswapError": "headswap.registry",
    "InputError": "headswap.registry",
    "LabelError": "headswap.registry",
    "MissingHeadError": "headswap.registry",
    "RegistrationError": "headswap.registry",
    "RemoteCodeError": "headswap.registry",
    "RemovedArchitectureError": "headswap.registry",
    "RenamedArchitectureError": "headswap.registry",
    "Resolution": "headswap.registry",
    "SequenceClassificationModel": "headswap.convert",
    "TaskError": "headswap.registry",
    "UnknownArchitectureError": "headswap.registry",
    "UnsupportedHeadError": "headswap.registry",
    "WeightError": "headswap.registry",
    "as_embedding_model": "headswap.convert",
    "as_reward_model": "headswap.convert",
    "as_seq_cls_model": "headswap.convert",
    "as_token_cls_model": "headswap.convert",
    "convert_checkpoint": "headswap.convert",
    "fit_head": "headswap.text",
    "load": "headswap.convert",
    "plan": "headswap.convert",
    "resolve": "headswap.convert",
}

# Methods of the one global registry: people who want their own make an AdapterRegistry.
_REGISTRATION = (
    "register",
    "register_alias",
    "register_head_family",
    "register_suffix_rule",
    "register_weight_rule",
)

__all__ = sorted({*_MODULES, *_REGISTRATION})


def __getattr__(name: str) -> object:
    if name == "__version__":
        value: object = import_module("importlib.metadata").version("headswap")
    elif name in _MODULES:
        value = getattr(import_module(_MODULES[name]), name)
    elif name in _REGISTRATION:
        value = getattr(import_module("headswap.registry").global_registry, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
