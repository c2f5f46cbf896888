"""Everything that is measured on the exported file, in ONNX Runtime.

A machine that only runs files needs neither torch nor rich for any of it: they are imported where a module is
handed in, or a progress bar is asked for. The names below are imported when they are first used, so that a
report can be read where there is no ONNX Runtime either.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qatkit.verify.accuracy import accuracy, module_accuracy
    from qatkit.verify.audit import audit
    from qatkit.verify.divergence import first_divergence, optimizer_divergence
    from qatkit.verify.parity import file_parity, parity
    from qatkit.verify.thresholds import thresholds
    from qatkit_verify.latency import latency
    from qatkit_verify.session import open_session

__all__ = [
    "accuracy",
    "audit",
    "file_parity",
    "first_divergence",
    "latency",
    "module_accuracy",
    "open_session",
    "optimizer_divergence",
    "parity",
    "thresholds",
]

# Where each name is: what needs no more than numpy and onnxruntime, in the light package.
_HOMES = {
    "accuracy": "qatkit.verify.accuracy",
    "audit": "qatkit.verify.audit",
    "file_parity": "qatkit.verify.parity",
    "first_divergence": "qatkit.verify.divergence",
    "latency": "qatkit_verify.latency",
    "module_accuracy": "qatkit.verify.accuracy",
    "open_session": "qatkit_verify.session",
    "optimizer_divergence": "qatkit.verify.divergence",
    "parity": "qatkit.verify.parity",
    "thresholds": "qatkit.verify.thresholds",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


class _Room(ModuleType):
    """This package: `verify.audit` is the function, though importing its module binds that to the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        bound = isinstance(value, ModuleType) and name in __all__
        super().__setattr__(name, getattr(value, name) if bound else value)


sys.modules[__name__].__class__ = _Room
