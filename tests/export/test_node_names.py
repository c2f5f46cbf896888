"""Names of nodes: functions get the path of their site, nodes get MODULE/OPERATOR, once each."""

from __future__ import annotations

import onnx_ir as ir
import torch
from chain import Residual, noise, prepared, settle
from torch import fx

from qatkit.export.node_names import name_functions, name_nodes
from qatkit.graph.nodes import site


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
    """A chain of Relus with these recorded scopes."""
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


def test_nodes_take_the_innermost_module_and_are_numbered_when_equal() -> None:
    scopes = [
        "['', 'layer1', 'layer1.0', 'relu']",
        "['', 'layer1', 'layer1.0', 'relu_1']",
        "['', 'relu_2']",
        "",
    ]
    model = _model(*scopes)
    name_nodes(model)
    assert [n.name for n in model.graph] == ["layer1.0/Relu", "layer1.0/Relu_1", "Relu", "Relu_1"]
    assert [n.outputs[0].name for n in model.graph] == [
        "layer1.0/Relu_output", "layer1.0/Relu_1_output", "Relu_output", "output"
    ]  # fmt: skip
    assert model.graph.inputs[0].name == "input"


def test_numbered_names_never_collide_with_a_module_path() -> None:
    model = _model("['', 'a', 'r']", "['', 'a', 'r']", "['', 'b', 'r']", "['', 'a', 'r']")
    name_nodes(model)
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
    name_nodes(model)
    assert [v.name for v in split.outputs] == [f"Split_output_{i}" for i in range(3)]
