"""A small GRU step as an ONNX file, and its outputs along a sequence, computed with NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]
INPUTS, HIDDEN = 6, 8


def gru_weights(seed: int = 3) -> dict[str, Array]:
    """Returns weights by name: for inputs (W) and state (U) of both gates and the candidate, and the head V."""
    draw = np.random.default_rng(seed)
    shapes = {f"W{gate}": (INPUTS, HIDDEN) for gate in "zrc"} | {
        f"U{gate}": (HIDDEN, HIDDEN) for gate in "zrc"
    }
    return {name: draw.normal(0, 0.6, shape).astype(np.float32) for name, shape in shapes.items()} | {
        "V": draw.normal(0, 1.5, (HIDDEN, 1)).astype(np.float32)
    }


def save_gru(
    path: Path,
    weights: Mapping[str, Array],
    state: tuple[Any, ...] = ("n", HIDDEN),
    kind: int = TensorProto.FLOAT,
) -> Path:
    """Writes a file with inputs x [n, 6] and h [n, 8], a probability y [n, 1] and the next state hN [n, 8].

    Args:
        state: the declared shape of hN.
        kind: the declared type of hN.
    """
    node = helper.make_node
    nodes = []
    for gate, hidden in (("z", "h"), ("r", "h"), ("c", "rh")):
        if gate == "c":
            nodes.append(node("Mul", ["r", "h"], ["rh"], "/Mul_r"))
        nodes += [
            node("MatMul", ["x", f"W{gate}"], [f"wx{gate}"], f"/{gate}/x/MatMul"),
            node("MatMul", [hidden, f"U{gate}"], [f"uh{gate}"], f"/{gate}/h/MatMul"),
            node("Add", [f"wx{gate}", f"uh{gate}"], [f"s{gate}"], f"/{gate}/Add"),
            node("Tanh" if gate == "c" else "Sigmoid", [f"s{gate}"], [gate], f"/{gate}/act"),
        ]
    nodes += [
        node("Sub", ["one", "z"], ["left"], "/Sub"),
        node("Mul", ["left", "c"], ["new"], "/Mul_new"),
        node("Mul", ["z", "h"], ["old"], "/Mul_old"),
        node("Add", ["new", "old"], ["hN"], "/Add_h"),
        node("MatMul", ["hN", "V"], ["logit"], "/head/MatMul"),
        node("Sigmoid", ["logit"], ["y"], "/head/Sigmoid"),
    ]
    value = helper.make_tensor_value_info
    constants = {**weights, "one": np.ones((), np.float32)}
    graph = helper.make_graph(
        nodes,
        "gru",
        [value("x", TensorProto.FLOAT, ["n", INPUTS]), value("h", TensorProto.FLOAT, ["n", HIDDEN])],
        [value("y", TensorProto.FLOAT, ["n", 1]), value("hN", kind, state)],
        [numpy_helper.from_array(np.asarray(one), name) for name, one in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    return path


def gru_run(weights: Mapping[str, Array], x: Array, h: Array | None = None) -> tuple[Array, Array]:
    """Returns y [T, 1] and the states [T + 1, 8], of which `h` is the first, for a sequence x [T, 6]."""
    w = {name: one.astype(np.float64) for name, one in weights.items()}
    state = np.zeros(HIDDEN) if h is None else h.reshape(-1).astype(np.float64)
    outputs, states = [], [state]
    for row in x.astype(np.float64):
        z, r = (_sigmoid(row @ w[f"W{gate}"] + state @ w[f"U{gate}"]) for gate in "zr")
        c = np.tanh(row @ w["Wc"] + (r * state) @ w["Uc"])
        state = (1 - z) * c + z * state
        states.append(state)
        outputs.append(_sigmoid(state @ w["V"]))
    return np.array(outputs), np.array(states)


def sequence(steps: int, seed: int) -> Array:
    """Returns inputs that change slowly, like the frames of a recording."""
    draw = np.random.default_rng(seed)
    return np.cumsum(draw.normal(0, 0.4, (steps, INPUTS)), 0).clip(-3, 3).astype(np.float32)


def _sigmoid(value: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-value)))
