"""Tests of the operator table: public names exist, private ones are optional, and users can extend it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
import torch
from chain import noise, run_ort, run_torch, settle
from torch import Tensor, fx, nn

from qatkit.calibration import calibrate
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph import operators
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.fuse import fuse
from qatkit.graph.nodes import op_class
from qatkit.graph.operators import Operator, look_up, register
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.stub import stub
from qatkit.quant.backends import FBGEMM, QNNPACK, TENSORRT
from qatkit.verify.audit import audit


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After the test, removes the operators that it has registered."""
    monkeypatch.setattr(operators, "_TABLE", dict(operators._TABLE))
    yield
    monkeypatch.undo()
    for cached in operators._LOOKUPS:
        cached.cache_clear()


MEMBERS = [
    (r.name, m) for r in operators.operators() for m in (*r.modules, *r.functions) if isinstance(m, str)
]


@pytest.mark.parametrize(("name", "member"), MEMBERS)
def test_every_name_is_found_where_the_table_says(name: str, member: str) -> None:
    found = look_up(member)
    assert callable(found)
    assert operators.module_classes().get(found, operators.function_classes().get(found)) == name


@pytest.mark.parametrize("name", ["add", "", ".add", "..torch.add", "torch.", "torch.no_such", "no_such.add"])
def test_a_name_that_cannot_be_imported_is_none(name: str) -> None:
    assert look_up(name) is None


def test_methods_are_tensors_and_turns_are_members() -> None:
    for record in operators.operators():
        assert all(hasattr(Tensor, method) for method in record.methods), record.name
        named = {*record.methods, *(str(f).rpartition(".")[2] for f in record.functions)}
        assert set(record.turns) <= named, record.name
        assert not record.integer or look_up(record.integer) is not None


def test_rules_of_backends_are_about_classes_of_the_table() -> None:
    known = {record.name for record in operators.operators()}
    for backend in (FBGEMM, QNNPACK, TENSORRT):
        assert set(backend.rules) <= known


@pytest.mark.slow
def test_a_renamed_private_torchvision_name_breaks_nothing_else() -> None:
    code = (
        "from torchvision.models.video import mvit\n"
        "from torchvision.models import swin_transformer\n"
        "from torch.fx._symbolic_trace import _wrapped_fns_to_patch as wrapped\n"
        "gone = {'_squeeze', '_add_rel_pos', '_add_shortcut', '_patch_merging_pad'}\n"
        "for place, name in [key for key in wrapped if key[1] in gone]: del wrapped[place, name]\n"
        "for module in (mvit, swin_transformer):\n"
        "    for name in gone & vars(module).keys(): delattr(module, name)\n"
        "import torch, torchvision\n"
        "from qatkit.train.module import QATModule\n"
        "model = torchvision.models.resnet18(num_classes=4)\n"
        "module = QATModule(model, torch.randn(2, 3, 32, 32))\n"
        "print(len(module.skipped))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


class BlurPool(nn.Module):
    """A module that the table does not know: the larger of two neighbouring columns."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.maximum(x[..., ::2], x[..., 1::2])


class Net(nn.Module):
    """A convolution, a pool of PyTorch, one of the user, a convolution and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.pool = nn.Conv2d(3, 16, 3, padding=1), nn.MaxPool2d(2)
        self.own, self.conv2 = Halve(), nn.Conv2d(16, 16, 3, padding=1)
        self.fc = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.conv2(self.own(self.pool(self.conv1(x)))).mean((2, 3)))
        return y


class Halve(nn.Module):
    """A user's module that selects every second row and column."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.max_pool2d(x, 1, 2)


def _leaves(graph: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in graph.graph.nodes if n.op == "call_module"]


@pytest.mark.usefixtures("table")
def test_a_type_of_ones_own_joins_a_class_and_runs_in_8_bits(tmp_path: Path) -> None:
    register("max_pool", modules=(Halve,))
    x = noise(8, 3, 16, 16)
    graph = stub(fuse(settle(Net(), 3, 16, 16), x[:2]).graph, x[:2]).graph
    assert "own" in _leaves(graph)
    prepared = prepare_qat(graph, FBGEMM, x[:2]).graph.eval()
    calibrate(prepared, [x])
    path = tmp_path / "model.onnx"
    export_onnx(convert(prepared).graph, x[:2], path)
    found = audit(path)
    pools = [node for node in found.nodes if node.op in ("MaxPool", "NhwcMaxPool")]
    assert [node.precision for node in pools] == ["int8", "int8"] and found.ok
    assert abs(run_ort(path, x) - run_torch(prepared, x)).max() < 1e-4


@pytest.mark.usefixtures("table")
def test_a_class_of_ones_own_has_its_record() -> None:
    record = register("cube", modules=(BlurPool,), values="new", align="table", onnx=("Max",))
    assert record == Operator("cube", modules=(BlurPool,), align="table", onnx=("Max",))
    graph = fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 1)))
    with graph.graph.inserting_before(next(n for n in graph.graph.nodes if n.op == "output")) as _:
        graph.add_submodule("own", BlurPool())
        node = graph.graph.call_module("own", (next(iter(graph.graph.nodes)),))
    assert op_class(node) == "cube"


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("name", "facts", "said"),
    [
        ("max_pool", {"colour": "red"}, "colour='red' of operator max_pool: expected one of"),
        (
            "max_pool",
            {"values": "new"},
            "values='new' of operator max_pool: expected 'kept', the value in the table",
        ),
        (
            "own",
            {"values": "some"},
            r"values='some' of operator own: expected one of new, kept, moved",
        ),
        ("own", {"align": "half"}, "align='half' of operator own"),
        (
            "max_pool",
            {"modules": ("torch.nn.BlurPol",)},
            "'torch.nn.BlurPol' of operator max_pool: expected a type or function",
        ),
        (
            "max_pool",
            {"functions": "my.clip"},
            "functions='my.clip' of operator max_pool: expected a tuple",
        ),
    ],
)
def test_a_mistake_is_refused_with_what_is_allowed(name: str, facts: dict[str, Any], said: str) -> None:
    before = operators.operators()
    with pytest.raises(ValueError, match=said):
        register(name, **facts)
    assert operators.operators() == before


def test_the_onnx_half_needs_no_pytorch() -> None:
    code = "import sys, qatkit.graph.operators as o; o.onnx_operators(o.operators()); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_kernels_are_operators_that_onnx_runtime_knows() -> None:
    """ONNX Runtime's list of schemas includes its contrib operators."""
    schemas = {s.name for s in ort.capi.onnxruntime_pybind11_state.get_all_operator_schema()}
    for record in operators.operators():
        names = {*record.onnx, *record.also, *record.kernels, *record.fused}
        assert names <= schemas, (record.name, names - schemas)
