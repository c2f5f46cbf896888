"""Tests of which libraries each module loads, and that imports point to no higher layer, with listed exceptions."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "lightning", "onnx", "onnx_ir", "onnxscript", "onnxruntime"}
COMPOSERS = {"hydra", "omegaconf"}

# Packages of extras, and the modules of qatkit that import one at module level.
EXTRAS = {
    "tokenizers",
    "transformers",
    "optuna",
    "timm",
    "soundfile",
    "mlflow",
    "s3fs",
    "cryptography",
    "openvino",
}
NEED_EXTRAS = ("qatkit.handover.generate", "qatkit.search.")
# Modules, and third-party libraries that importing them must not load, directly or indirectly.
LOADED = [
    ("qatkit", HEAVY | COMPOSERS | {"numpy", "rich", "yaml"}),
    ("qatkit.config.fields qatkit.config.schema qatkit.config.rules", HEAVY | COMPOSERS | {"numpy", "yaml"}),
    (
        "qatkit_verify.dotted qatkit_verify.errors qatkit_verify.files qatkit_verify.untrusted "
        "qatkit.encryption.sealed qatkit.records.run_files",
        HEAVY | COMPOSERS | {"numpy", "yaml"},
    ),
    ("qatkit.cli.command_line qatkit.cli.export_command qatkit.run.find", HEAVY | {"numpy", "rich"}),
    ("qatkit.algorithms", HEAVY | COMPOSERS | {"numpy", "rich", "yaml"}),
    (
        "qatkit.jobs.quantize_file qatkit.importing.float_file qatkit.run.backend",
        {"torch", "lightning", "onnx_ir", "onnxscript", "onnxruntime", "rich"},
    ),
    ("qatkit.export.float_graph qatkit.export.write_model", COMPOSERS | {"torch", "lightning", "rich"}),
    (
        "qatkit.quant.spec qatkit.quant.observers qatkit.quant.fake_quantize qatkit.quant.backends "
        "qatkit.graph.prepare qatkit.graph.convert.to_integers qatkit.graph.convert.simplify qatkit.calibration.cache "
        "qatkit.algorithms.blocks.walk qatkit.export.torch_to_onnx qatkit.export.ort_modes "
        "qatkit.importing.build qatkit.data qatkit.models qatkit.train.module qatkit.train.parts "
        "qatkit.analysis.sensitivity qatkit.analysis.estimate qatkit.analysis.isolation qatkit.analysis.tensors",
        COMPOSERS,
    ),
    (
        "qatkit.verify qatkit.verify.accuracy qatkit.verify.audit qatkit.verify.divergence qatkit_verify.latency "
        "qatkit.verify.parity qatkit_verify.session qatkit.verify.checks.base qatkit.graph.operators",
        COMPOSERS | {"torch", "lightning", "rich"},
    ),
    (
        "qatkit_verify.placement.measure qatkit_verify.runtimes.timing",  # run on the target machine
        COMPOSERS | {"torch", "lightning", "rich", "onnx", "onnx_ir", "onnxscript", "yaml", "scipy"},
    ),
    ("qatkit.report", COMPOSERS | {"torch", "lightning"}),
    ("qatkit.compare.command", COMPOSERS | {"torch", "lightning", "onnx", "onnxruntime", "yaml"}),
    (
        "qatkit.quant.spec qatkit.graph.operators qatkit.records.results qatkit.records.study "
        "qatkit.records.objectives qatkit.records.figures qatkit.config.search_space qatkit.config.sweep "
        "qatkit.config.sweep_file qatkit.search.median qatkit.jobs.rungs",
        HEAVY | COMPOSERS | {"numpy", "rich", "yaml"},
    ),
]

LIGHT = "qatkit_verify"  # below all layers
# Packages of qatkit, lowest layer first. A module imports from its own layer and from those below it.
LAYERS = (
    ("progress", "former_names", "encryption", "warning"),
    ("quant",),
    ("records", "config"),
    ("tasks",),
    ("graph",),
    ("data", "verify", "calibration", "algorithms", "export"),
    ("importing",),
    ("models", "train", "report"),
    ("analysis", "handover"),
    ("run",),
    ("choose",),
    ("jobs",),
    ("search", "compare"),
    ("cli",),
    ("one_call",),
)
# Accepted imports that point upwards, each with its reason.
UPWARDS = {
    ("quant", "config"): "an observer checks its settings by the limits of the fields that declare them",
}
# Packages that import no module of qatkit, or only when a name is used.
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
        "qatkit.train.module qatkit.train.parts qatkit.export.torch_to_onnx qatkit.models",
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
    """Yields the statements that run on import, which excludes those under `if TYPE_CHECKING`."""
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


def _imported(statements: Iterable[ast.AST], modules: dict[str, Path]) -> set[str]:
    """Returns the modules of qatkit that the imports in these statements name."""
    found = set()
    for statement in statements:
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            parts = {f"{statement.module}.{alias.name}" for alias in statement.names}
            found |= parts & modules.keys() or {statement.module}
    return {name for name in found if name.split(".")[0] in ("qatkit", LIGHT)}


def _package(module: str) -> str:
    return LIGHT if module.split(".")[0] == LIGHT else module.split(".")[1]


def _layer(package: str) -> int:
    found = [number for number, names in enumerate(LAYERS) if package in names]
    assert found or package == LIGHT, f"{package} is in no layer of LAYERS"
    return found[0] if found else -1


def test_imports_run_one_way() -> None:
    """Deferred imports and those for type checkers count, too."""
    modules = _modules()
    upwards = {
        (_package(module), _package(other)): f"{module} imports {other}"
        for module, path in modules.items()
        if module not in PACKAGES
        for other in _imported(ast.walk(ast.parse(path.read_text())), modules) - PACKAGES
        if _layer(_package(other)) > _layer(_package(module))
    }
    assert upwards.keys() == UPWARDS.keys(), upwards
    assert len(UPWARDS) <= 5


def test_what_every_run_imports_needs_no_extra() -> None:
    modules = _modules()
    needing = []
    for module, path in modules.items():
        level = list(_module_level(ast.parse(path.read_text()).body))
        outer = {name.split(".")[0] for one in level for name in _names_in(one)}
        ours = {name for name in _imported(level, modules) if name.startswith(NEED_EXTRAS)}
        if not module.startswith(NEED_EXTRAS) and (outer & EXTRAS or ours):
            needing.append((module, outer & EXTRAS, ours))
    assert not needing


def _names_in(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    return [statement.module or ""] if isinstance(statement, ast.ImportFrom) else []


def test_no_imports_go_round() -> None:
    modules = _modules()
    imports = {
        name: _imported(_module_level(ast.parse(path.read_text()).body), modules)
        for name, path in modules.items()
    }
    # A cycle raises CycleError, which names it.
    assert set(TopologicalSorter(imports).static_order()) == set(modules)


@pytest.mark.parametrize("first", ["qatkit", "qatkit_verify.errors"])
def test_onnx_runtime_reports_nothing_to_its_maker(first: str, tmp_path: Path) -> None:
    """ONNX Runtime's telemetry writes a device identifier to the home folder, unless qatkit is imported first."""
    opened = (
        "import onnxruntime as ort; from onnx import TensorProto, helper; "
        "value = [helper.make_tensor_value_info(one, TensorProto.FLOAT, [1]) for one in 'xy']; "
        "graph = helper.make_graph([helper.make_node('Relu', ['x'], ['y'])], 'g', value[:1], value[1:]); "
        "model = helper.make_model(graph, opset_imports=[helper.make_opsetid('', 13)], ir_version=7); "
        "ort.InferenceSession(model.SerializeToString())"
    )
    for name, code in (("plain", opened), ("ours", f"import {first}; {opened}")):
        (tmp_path / name).mkdir()
        environment = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"}
        subprocess.run(
            [sys.executable, "-c", code], check=True, env=environment | {"HOME": f"{tmp_path / name}"}
        )
    if not list((tmp_path / "plain").rglob("deviceid")):
        pytest.skip("this ONNX Runtime has no telemetry here")
    assert list((tmp_path / "ours").iterdir()) == []
