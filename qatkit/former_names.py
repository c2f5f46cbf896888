"""Former names of modules and tasks, so that existing imports and configurations keep working."""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Former name -> current name of a module, or of a package with all of its modules.
FORMER_NAMES = {
    "qatkit.backends": "qatkit.quant.backends",
    "qatkit.bundle": "qatkit.records.run_files",
    "qatkit.classifier": "qatkit.train.learner",
    "qatkit.distillation": "qatkit.train.distillation",
    "qatkit.fake_quantize": "qatkit.quant.fake_quantize",
    "qatkit.figures": "qatkit.records.figures",
    "qatkit.fine_tuning": "qatkit.train.fine_tuning",
    "qatkit.learned": "qatkit.quant.learned",
    "qatkit.module": "qatkit.train.module",
    "qatkit.numerics": "qatkit.quant.numerics",
    "qatkit.observers": "qatkit.quant.observers",
    "qatkit.parts": "qatkit.train.parts",
    "qatkit.qat_layers": "qatkit.quant.qat_layers",
    "qatkit.run.pipeline": "qatkit.jobs.pipeline",
    "qatkit.scripts": "qatkit.cli.scripts",
    "qatkit.spec": "qatkit.quant.spec",
    "qatkit.tasks.text_embedding": "qatkit.tasks.text_pairs",
    "qatkit.train.classifier": "qatkit.train.learner",
    "qatkit.verify.results": "qatkit.records.results",
    "qatkit.weight_fake_quantize": "qatkit.quant.weight_fake_quantize",
}
# Former value of `task` -> current value.
FORMER_TASKS = {
    "text_embedding": "text_pairs",
    "qatkit.tasks.text_embedding.TextEmbedding": "qatkit.tasks.text_pairs.TextPairs",
}


def present_task(task: str) -> str:
    """Returns the current name for a former value of `task`; any other text is returned unchanged."""
    return FORMER_TASKS.get(task, task)


def present_name(dotted: str) -> str:
    """Returns the current path for a dotted path with a former name; any other text is returned unchanged."""
    name = dotted
    while name:
        if name in FORMER_NAMES:
            return FORMER_NAMES[name] + dotted[len(name) :]
        name = name.rpartition(".")[0]
    return dotted


class _Finder(MetaPathFinder, Loader):
    """Imports the current module under its former name, so that both names refer to the same module object."""

    def __init__(self) -> None:
        self._own_specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        return None if present_name(fullname) == fullname else ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(present_name(spec.name))
        self._own_specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restores the module's own spec, which the import system has just replaced."""
        assert module.__spec__ is not None
        module.__spec__ = self._own_specs.pop(module.__spec__.name)


def install() -> None:
    """Makes former names importable."""
    sys.meta_path.insert(0, _Finder())
