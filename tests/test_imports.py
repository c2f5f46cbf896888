"""Which libraries each room loads, and that imports inside qatkit run one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "lightning", "onnx", "onnx_ir", "onnxscript", "onnxruntime"}
COMPOSERS = {"hydra", "omegaconf"}

# Rooms, and outer libraries that importing them must not load, however far down.
LOADED = [
    ("qatkit", HEAVY | COMPOSERS | {"numpy", "rich", "yaml"}),
    ("qatkit.config.fields qatkit.config.schema qatkit.config.limits", HEAVY | COMPOSERS | {"numpy", "yaml"}),
    (
        "qatkit_verify.dotted qatkit_verify.errors qatkit_verify.files qatkit_verify.untrusted qatkit.sealed "
        "qatkit.bundle",
        HEAVY | COMPOSERS | {"numpy", "yaml"},
    ),
    ("qatkit.config.command_line qatkit.config.export_command qatkit.run.find", HEAVY | {"numpy", "rich"}),
    ("qatkit.algorithms", HEAVY | COMPOSERS | {"numpy", "rich", "yaml"}),
    (
        "qatkit.run.quantize_file qatkit.run.backend",
        {"torch", "lightning", "onnx_ir", "onnxscript", "onnxruntime", "rich"},
    ),
    ("qatkit.export.float_graph qatkit.export.write_model", COMPOSERS | {"torch", "lightning", "rich"}),
    (
        "qatkit.spec qatkit.observers qatkit.fake_quantize qatkit.backends qatkit.graph.prepare qatkit.graph.convert "
        "qatkit.graph.simplify qatkit.calibration.cache qatkit.algorithms.blocks.walk qatkit.export.torch_to_onnx "
        "qatkit.export.ort_modes qatkit.export.read_float_file qatkit.data qatkit.models qatkit.module qatkit.parts "
        "qatkit.analysis.sensitivity qatkit.analysis.estimate qatkit.analysis.isolation qatkit.analysis.tensors",
        COMPOSERS,
    ),
    (
        "qatkit.verify qatkit.verify.accuracy qatkit.verify.audit qatkit.verify.divergence qatkit_verify.latency "
        "qatkit.verify.parity qatkit_verify.session qatkit.verify.checks.base qatkit.graph.operators",
        COMPOSERS | {"torch", "lightning", "rich"},
    ),
    (
        "qatkit_verify.placement.measure qatkit_verify.runtimes.timing",  # where models are deployed
        COMPOSERS | {"torch", "lightning", "rich", "onnx", "onnx_ir", "onnxscript", "yaml", "scipy"},
    ),
    ("qatkit.report", COMPOSERS | {"torch", "lightning"}),
    ("qatkit.compare.command", COMPOSERS | {"torch", "lightning", "onnx", "onnxruntime", "yaml"}),
    (
        "qatkit.spec qatkit.graph.operators qatkit.analysis.records qatkit.rescue.records qatkit.precision.records "
        "qatkit.search.space qatkit.search.objectives qatkit.search.median qatkit.search.records qatkit.config.sweep "
        "qatkit.config.sweep_file qatkit.figures",
        HEAVY | COMPOSERS | {"numpy", "rich", "yaml"},
    ),
]

LIGHT = "qatkit_verify"  # below all layers
# Modules of qatkit, lowest layer first: what a layer imports is in it or below. A name stands for what is in it.
LAYERS = (
    (
        "bundle",
        "figures",
        "encryption",
        "sealed",
        "progress",
        "spec",
    ),
    (
        "config.fields",
        "config.quotes",
        "config.schema",
        "config.limits",
        "config.typed",
        "config.sweep",
        "config.sweep_file",
        "rescue",
        "search.space",
        "search.objectives",
        "search.median",
        "search.records",
    ),
    (
        "numerics",
        "pairs",
        "observers",
        "fake_quantize",
        "weight_fake_quantize",
        "learned",
        "qat_layers",
        "recurrent_layers",
        "computed_weights",
        "backends",
        "weight_average",
        "sync_batch_norm",
    ),
    ("graph",),
    (
        "calibration",
        "algorithms",
        "analysis",
        "precision",
        "placement",
        "export",
        "verify",
        "data",
        "models",
        "classifier",
        "distillation",
        "fine_tuning",
    ),
    ("module", "parts"),
    ("report",),
    ("handover",),
    ("config.hydra_errors", "config.compose", "config.job_checks", "config.streams", "config.endings"),
    ("run", "search", "compare"),
    (
        "config.reference",
        "config.export_command",
        "config.arguments",
        "config.slurm",
        "config.slurm_launcher",
        "config.command_line",
    ),
    ("scripts",),
)
# Empty but for their docstrings, or lazy.
PACKAGES = {"qatkit", "qatkit.config", LIGHT}


@pytest.mark.parametrize(("modules", "unwanted"), LOADED, ids=[modules for modules, _ in LOADED])
def test_a_room_loads_no_library_that_it_does_not_need(modules: str, unwanted: set[str]) -> None:
    code = f"import sys, {', '.join(modules.split())}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not unwanted & {name.split(".")[0] for name in done.stdout.split()}


def test_the_public_names_are_there_when_asked_for() -> None:
    code = (
        "import sys, qatkit\n"
        "assert 'torch' not in sys.modules and set(qatkit.__all__) <= set(dir(qatkit))\n"
        "from qatkit import QATModule, Parts, export_onnx\n"
        "from qatkit import models\n"
        "print(QATModule.__module__, Parts.__module__, export_onnx.__module__, models.__name__)\n"
        "try: qatkit.nothing\n"
        "except AttributeError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines() == [
        "qatkit.module qatkit.parts qatkit.export.torch_to_onnx qatkit.models",
        "module 'qatkit' has no attribute 'nothing'",
    ]


def _modules() -> dict[str, Path]:
    roots = (ROOT, ROOT / "packages" / "verify")
    paths = [(path, root) for root in roots for path in sorted(root.glob("qatkit*/**/*.py"))]
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path, root in paths
    }


def _module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import; those under `if TYPE_CHECKING` don't."""
    for statement in body:
        if isinstance(statement, ast.If):
            typing_only = "TYPE_CHECKING" in ast.unparse(statement.test)
            yield from _module_level(statement.orelse if typing_only else statement.body + statement.orelse)
        elif isinstance(statement, ast.Try):
            yield from _module_level([*statement.body, *statement.orelse, *statement.finalbody])
        elif isinstance(statement, ast.With | ast.ClassDef):
            yield from _module_level(statement.body)
        else:
            yield statement


def _imported(path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of ours that a file names in its imports."""
    found = set()
    for statement in _module_level(ast.parse(path.read_text()).body):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            parts = {f"{statement.module}.{alias.name}" for alias in statement.names}
            found |= parts & modules.keys() or {statement.module}
    return {name for name in found if name.split(".")[0] in ("qatkit", LIGHT)}


def _layer(module: str) -> int:
    if module.split(".")[0] == LIGHT:
        return -1
    for number, names in enumerate(LAYERS):
        if any(f"{module}.".startswith(f"qatkit.{name}.") for name in names):
            return number
    raise AssertionError(f"{module} is in no layer of LAYERS")


def test_imports_run_one_way() -> None:
    modules = _modules()
    upwards = [
        f"{module} imports {other}"
        for module, path in modules.items()
        if module not in PACKAGES
        for other in _imported(path, modules) - PACKAGES
        if _layer(other) > _layer(module)
    ]
    assert not upwards
    assert not any(_imported(modules[package], modules) for package in PACKAGES)


def test_no_imports_go_round() -> None:
    modules = _modules()
    order = TopologicalSorter({name: _imported(path, modules) for name, path in modules.items()})
    assert set(order.static_order()) == set(modules)  # raises CycleError, with the cycle
