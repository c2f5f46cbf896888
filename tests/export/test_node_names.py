"""Tests of node names: calls of functions become modules, and nodes get unique names MODULE/OPERATOR."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from chain import Residual, noise, prepared, settle, ship, shipped
from torch import fx, nn

from qatkit.export.add_integer_ends import to_integer_io
from qatkit.export.node_names import name_functions, name_nodes
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.simplify import float_baseline
from qatkit.graph.nodes import site
from qatkit.verify.audit import audit
from qatkit.verify.graph_view import read_model


def _graph() -> fx.GraphModule:
    torch.manual_seed(0)
    return prepared(settle(Residual(), 3, 12, 12), noise(2, 3, 12, 12)).eval()


def test_functions_become_modules_at_their_site() -> None:
    graph = _graph()
    images, sites = (
        noise(2, 3, 12, 12, seed=1),
        [site(n) for n in graph.graph.nodes if n.op == "call_function"],
    )
    assert "flatten" in sites
    named = name_functions(graph)
    assert not [n for n in named.graph.nodes if n.op in ("call_function", "call_method")]
    targets = [str(n.target) for n in named.graph.nodes if n.op == "call_module"]
    assert len(set(targets)) >= len(sites)
    assert all(any(t.rstrip("_") == s for t in targets) for s in sites)
    torch.testing.assert_close(named(images), graph(images), rtol=0, atol=0)


def test_the_graph_itself_keeps_its_functions() -> None:
    graph = _graph()
    before = [(n.op, str(n.target)) for n in graph.graph.nodes]
    name_functions(graph)
    assert [(n.op, str(n.target)) for n in graph.graph.nodes] == before


def test_a_site_that_is_taken_gets_another_path() -> None:
    graph = _graph()
    for node in graph.graph.nodes:
        if node.op == "call_function":
            node.meta["site"] = "fc"  # a module of that name exists
    named = name_functions(graph)
    images = noise(2, 3, 12, 12, seed=1)
    assert isinstance(named.get_submodule("fc"), torch.nn.Linear)
    assert "fc_" in dict(named.named_modules())
    torch.testing.assert_close(named(images), graph(images), rtol=0, atol=0)


def test_a_site_may_be_called_as_a_method_of_modules() -> None:
    graph = _graph()
    node = next(n for n in graph.graph.nodes if n.op == "call_function")
    node.meta["site"] = "fc.float"
    named = name_functions(graph)
    assert "fc.float_" in dict(named.named_modules())


def _model(*scopes: str) -> ir.Model:
    """Returns a chain of Relus with `scopes` as their module scopes in the metadata."""
    value = x = ir.Value(name="input")
    nodes = []
    for scope in scopes:
        node = ir.node("Relu", [value])
        if scope:
            node.metadata_props["pkg.torch.onnx.name_scopes"] = scope
        nodes.append(node)
        value = node.outputs[0]
    value.name = "output"
    return ir.Model(ir.Graph([x], [value], nodes=nodes, opset_imports={"": 13}), ir_version=8)


def test_nodes_take_innermost_module_names_numbered_when_equal() -> None:
    scopes = [
        "['', 'layer1', 'layer1.0', 'relu']",
        "['', 'layer1', 'layer1.0', 'relu_1']",
        "['', 'relu_2']",
        "",
    ]
    model = _model(*scopes)
    name_nodes(model, ())
    assert [n.name for n in model.graph] == ["layer1.0/Relu", "layer1.0/Relu_1", "Relu", "Relu_1"]
    assert [n.outputs[0].name for n in model.graph] == [
        "layer1.0/Relu_output", "layer1.0/Relu_1_output", "Relu_output", "output"
    ]  # fmt: skip
    assert model.graph.inputs[0].name == "input"


def test_numbered_names_never_collide_with_a_module_path() -> None:
    model = _model("['', 'a', 'r']", "['', 'a', 'r']", "['', 'b', 'r']", "['', 'a', 'r']")
    name_nodes(model, ())
    names = [n.name for n in model.graph]
    assert names == ["a/Relu", "a/Relu_1", "b/Relu", "a/Relu_2"]


def test_split_outputs_are_numbered() -> None:
    x = ir.Value(name="input")
    split = ir.node("Split", [x], num_outputs=3)
    merged = ir.node("Sum", list(split.outputs))
    merged.outputs[0].name = "output"
    model = ir.Model(
        ir.Graph([x], merged.outputs, nodes=[split, merged], opset_imports={"": 13}), ir_version=8
    )
    name_nodes(model, ())
    assert [v.name for v in split.outputs] == [f"Split_output_{i}" for i in range(3)]


def places(path: Path) -> dict[str, str]:
    """Returns the part of each name that is the path of a module or of a function call, by the whole name.

    The names are those of the file's nodes, tensors and constants.
    """
    graph = read_model(path).graph
    found = {str(node.name): str(node.name).rpartition("/")[0] for node in graph}
    ends = {value.name for value in (*graph.inputs, *graph.outputs)}
    for node in graph:
        for value in node.outputs:
            if value.name not in ends:
                assert str(value.name).startswith(f"{node.name}_output")
                found[str(value.name)] = str(value.name).rpartition("/")[0]
    for name in graph.initializers:
        found[name] = name.rpartition("/")[0] if "/" in name else name.rpartition(".")[0]
    return found


def known_places(model: nn.Module, graph: fx.GraphModule) -> set[str]:
    """Returns the paths of the model's modules and of its function calls."""
    modules = {path for path, _ in model.named_modules()}
    functions = {site(node) for node in graph.graph.nodes}
    outside = {path for path in functions if "." in path and path.partition(".")[0] not in modules}
    assert not outside
    return modules | functions


@pytest.mark.parametrize(
    "name", ["residual", "block", "hard_gate", "gated", "concat", "twice", "vit", "resnet18"]
)
@pytest.mark.parametrize("file", ["int8", "float", "uint8 ends"])
def test_every_name_of_a_file_leads_to_a_place_in_the_model(name: str, file: str, tmp_path: Path) -> None:
    network, path = shipped(name), tmp_path / "model.onnx"
    graph = network.converted
    if file == "float":
        graph = float_baseline(network.model, network.images[:2])
        export_onnx(graph, network.images[:2], path)
    elif file == "int8" or name in ("block", "vit"):
        path = network.path
    else:
        channels = network.images.shape[1]
        to_integer_io(network.path, path, [0.5] * channels, [0.25] * channels, (-1.0, 1.0))
    known, modules = known_places(network.model, graph), {path for path, _ in network.model.named_modules()}
    for what, place in places(path).items():
        base = place.removesuffix(".barrier").removesuffix("_quant")
        own = base in ("input", "output", "input_normalize") or what in dict(graph.named_parameters())
        within = base.rpartition(".")[0] in modules - {
            ""
        }  # the gate of a module that is two operators in the file
        assert base in known - {""} or within or own, (what, place)
    names = {str(node.name) for node in read_model(path).graph}
    sources = {node.source for node in audit(path, input_shape=(1, *network.images.shape[1:])).matrix_nodes}
    assert sources <= names and len(sources) > 1


def test_constants_are_named_after_what_reads_them(tmp_path: Path) -> None:
    names = set(read_model(shipped("residual").path).graph.initializers)
    assert {"stem.weight", "input_quant.scale", "flatten/Reshape.shape"} <= {
        n.removesuffix("_q") for n in names
    }
    names = set(read_model(shipped("block").path).graph.initializers)
    assert {"norm1/Pow.two", "norm1/Add.epsilon"} <= names


def test_a_barrier_and_the_size_of_the_batch_have_a_place(tmp_path: Path) -> None:
    class Turned(nn.Module):
        """A GELU after a Transpose, which ONNX Runtime would move behind the GELU."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.act, self.fc = nn.Conv2d(3, 8, 1), nn.GELU(), nn.Linear(8, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.act(self.conv(x).permute(0, 2, 3, 1))
            return torch.flatten(self.fc(x), 1).reshape(x.shape[0], -1, 5)

    case = ship(settle(Turned(), 3, 6, 6), noise(4, 3, 6, 6), "turned")
    names = [str(node.name) for node in read_model(case.path).graph]
    assert "permute.barrier/Sum" in names and all("/" in name for name in names)
