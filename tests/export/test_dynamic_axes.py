"""Tests of one file for many sizes: it agrees with the converted module at sizes unknown to the export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import resizable
import sized_constants
import torch
from torch import Tensor, nn

from qatkit.export.fixed_sizes import at_fixed_sizes
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.captured import Captured
from qatkit.graph.convert.simplify import float_baseline
from qatkit.graph.signature import Example, flatten
from qatkit.train.module import QATModule
from qatkit_verify.errors import ConfigError

Shapes = list[tuple[int, ...]]


def drawn(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def example_of(shapes: Shapes, seed: int = 0) -> Example:
    tensors = tuple(drawn(shape, seed + i) for i, shape in enumerate(shapes))
    return tensors[0] if len(tensors) == 1 else tensors


CASES: dict[str, tuple[Callable[[], nn.Module], Shapes, list[str], list[Shapes]]] = {
    "padded U-Net": (
        lambda: resizable.UNet(pads=True), [(2, 3, 64, 64)], ["batch,3,height,width"],
        [[(1, 3, 64, 64)], [(3, 3, 65, 97)], [(1, 3, 38, 51)]],
    ),
    "padded to a multiple": (
        resizable.ToMultiple, [(2, 3, 50, 70)], ["batch,3,height,width"],
        [[(1, 3, 49, 33)], [(3, 3, 64, 64)], [(1, 3, 17, 80)]],
    ),
    "detector": (
        resizable.Detector, [(2, 3, 64, 64)], ["batch,3,height,width"],
        [[(1, 3, 65, 97)], [(2, 3, 32, 40)], [(1, 3, 127, 64)]],
    ),
    "branches": (
        resizable.Branches, [(2, 3, 64, 64)], ["batch,3,height,width"],
        [[(1, 3, 96, 64)], [(3, 3, 64, 160)], [(1, 3, 32, 32)]],
    ),
    "grids": (
        resizable.Grids, [(2, 3, 64, 64)], ["batch,3,height,width"],
        [[(1, 3, 65, 97)], [(2, 3, 32, 40)], [(1, 3, 127, 64)]],
    ),
    "pools": (
        resizable.Pools, [(2, 3, 64, 64)], ["batch,3,height,width"],
        [[(1, 3, 65, 97)], [(2, 3, 32, 40)], [(1, 3, 127, 64)]],
    ),
    "coordinates": (
        resizable.Coordinates, [(2, 3, 64, 64)], ["batch,3,height,width"],
        [[(1, 3, 64, 64)], [(3, 3, 65, 97)], [(1, 3, 200, 40)]],
    ),
    "pair": (
        resizable.Pair, [(2, 3, 32, 32), (2, 3, 32, 32)], ["batch,3,one_2,one_3", "batch,3,one_2,one_3"],
        [[(n, 3, h, w), (n, 3, h, w)] for n, h, w in ((1, 32, 32), (3, 33, 50), (5, 80, 40))],
    ),
    "vocoder": (
        resizable.Vocoder, [(2, 20, 33)], ["batch,20,length"], [[(1, 20, 7)], [(3, 20, 34)], [(1, 20, 100)]],
    ),
    "conformer": (
        resizable.Conformer, [(2, 61, 20)], ["batch,length,20"], [[(1, 20, 20)], [(3, 62, 20)], [(1, 99, 20)]],
    ),
    "streams": (
        lambda: resizable.Streams(batch_first=False), [(6, 2, 20), (1, 2, 24)],
        ["length,batch,20", "1,batch,24"],
        [[(1, 1, 20), (1, 1, 24)], [(9, 5, 20), (1, 5, 24)], [(40, 2, 20), (1, 2, 24)]],
    ),
    "cache": (
        resizable.Cached, [(2, 3, 32), (2, 4, 9, 8), (2, 4, 9, 8)],
        ["batch,x_1,32", "batch,4,keys_2,8", "batch,4,keys_2,8"],
        [[(1, n, 32), (1, 4, past, 8), (1, 4, past, 8)] for n, past in ((3, 20), (7, 2), (2, 41))],
    ),
}  # fmt: skip

OPSETS = {"grids": 16}  # for GridSample
ATOL = {"grids": 1e-5}  # its coordinates are float


def dims(session: ort.InferenceSession) -> list[str]:
    return [",".join(map(str, value.shape)) for value in session.get_inputs()]


# One model per rule for sizes; the others repeat these rules in larger models.
QUICK = ("padded U-Net", "branches", "grids", "pair", "conformer", "cache")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_a_file_answers_as_its_module_at_every_size(name: str, tmp_path: Path) -> None:
    make, shapes, axes, others = CASES[name]
    torch.manual_seed(0)
    model, example = make().eval(), example_of(shapes)
    module = QATModule(Captured(model, example, "auto"), example)
    module.calibrate([example, example_of(shapes, seed=9)])
    converted = module.convert().graph.eval()
    export_onnx(converted, example, tmp_path / "int8.onnx", opset=OPSETS.get(name, 13))
    session = ort.InferenceSession(tmp_path / "int8.onnx")
    assert dims(session) == axes
    for given in others:
        inputs = flatten(example_of(given, seed=3))
        with torch.no_grad():
            found, exact = converted(*inputs), model(*inputs)
        expected = found if isinstance(found, tuple) else (found,)
        names = [value.name for value in session.get_inputs()]
        answers = session.run(None, {n: t.numpy() for n, t in zip(names, inputs, strict=True)})
        for ours, theirs in zip(expected, answers, strict=True):
            assert ours.shape == theirs.shape
            np.testing.assert_allclose(theirs, ours.numpy(), atol=ATOL.get(name, 1e-6), rtol=0)
        first = exact[0] if isinstance(exact, tuple) else exact
        error = (first - expected[0]).square().mean() / first.square().mean()
        assert error < 10**-2, f"{-10 * error.log10():.1f} dB at {given}"


def test_the_float_file_takes_the_same_sizes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, example = resizable.Causal().eval(), torch.arange(32).reshape(2, 16)
    export_onnx(Captured(model, example, "auto").graph(), example, tmp_path / "float.onnx")
    session = ort.InferenceSession(tmp_path / "float.onnx")
    assert dims(session) == ["batch,length"]
    for shape in ((1, 1), (3, 7), (1, 40)):
        ids = torch.randint(0, 50, shape)
        with torch.no_grad():
            expected = model(ids).numpy()
        (found,) = session.run(None, {"input": ids.numpy()})
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [resizable.Heads, resizable.Sequencer])
def test_float_files_of_images_take_other_sizes(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """In `Heads`, an inner size is 1 for the example, which torch's exporter would take for a constant."""
    torch.manual_seed(0)
    model, example = make().eval(), drawn((2, 3, 64, 64))
    graph = float_baseline(Captured(model, example, "auto").graph(), example)
    export_onnx(graph, example, tmp_path / "float.onnx")
    session = ort.InferenceSession(tmp_path / "float.onnx")
    assert dims(session) == ["batch,3,height,width"]
    for shape in ((2, 3, 64, 128), (2, 3, 200, 192), (3, 3, 129, 65)):
        image = drawn(shape)
        with torch.no_grad():
            found = model(image)
        expected = found if isinstance(found, tuple) else (found,)
        for ours, theirs in zip(expected, session.run(None, {"input": image.numpy()}), strict=True):
            np.testing.assert_allclose(theirs, ours.numpy(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("opset", "free"), [(13, False), (18, True)])
def test_axes_without_a_form_have_the_size_of_the_example(opset: int, free: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, example, path = resizable.Folded().eval(), drawn((2, 3, 32, 48)), tmp_path / "float.onnx"
    why = export_onnx(Captured(model, example, "auto").graph(), example, path, opset=opset)
    assert why == "" if free else "height (32), width (48), because" in why
    session = ort.InferenceSession(path)
    assert dims(session) == ["batch,3,height,width" if free else "batch,3,32,48"]
    image = drawn((3, 3, 40, 32) if free else (3, 3, 32, 48))
    with torch.no_grad():
        expected = model(image).numpy()
    np.testing.assert_allclose(session.run(None, {"input": image.numpy()})[0], expected, atol=1e-5)
    asked = Captured(model, example, {"input": {2: "rows"}}).graph()
    if free:
        assert export_onnx(asked, example, path, opset=opset) == ""
    else:
        with pytest.raises(ConfigError, match="needs opset 18"):
            export_onnx(asked, example, path, opset=opset)


@pytest.mark.parametrize(
    ("make", "shape"),
    [(sized_constants.Positions, (2, 3, 64, 48)), (sized_constants.PaddedToFrames, (2, 1, 96))],
)
def test_at_one_size_what_follows_from_it_is_a_constant(
    make: Callable[[], nn.Module], shape: tuple[int, ...], tmp_path: Path
) -> None:
    """No Ceil of a size and no Resize of a parameter may be left in the file; the batch stays dynamic."""
    torch.manual_seed(0)
    model, example, path = make().eval(), drawn(shape), tmp_path / "float.onnx"
    graph = Captured(model, example, "auto").graph()
    fixed = at_fixed_sizes(graph, (example,), (0,))
    export_onnx(fixed, example, path)
    assert {node.op_type for node in onnx.load(path).graph.node}.isdisjoint({"Resize", "Ceil"})
    if make is sized_constants.Positions:
        assert "these axes are fixed at the example's size: " in export_onnx(graph, example, path)
    session, given = ort.InferenceSession(path), drawn((3, *shape[1:]))
    with torch.no_grad():
        expected = model(given).numpy()
    np.testing.assert_allclose(session.run(None, {"input": given.numpy()})[0], expected, atol=1e-5)


def test_no_size_is_taken_for_the_number_that_it_was(tmp_path: Path) -> None:
    """PyTorch's exporter derives the pool's kernel from the example, so the file has to keep that size."""
    torch.manual_seed(0)
    model, example, path = resizable.HalfRows().eval(), drawn((2, 3, 32, 48)), tmp_path / "float.onnx"
    graph = Captured(model, example, "auto").graph()
    assert [axis.name for axis in graph.meta["free_axes"]] == ["height", "width"]
    assert "torch's exporter failed (an operator works only at the size of the example" in export_onnx(
        graph, example, path
    )
    session, image = ort.InferenceSession(path), drawn((3, 3, 32, 48))
    assert dims(session) == ["batch,3,32,48"]
    with torch.no_grad():
        expected = model(image).numpy()
    np.testing.assert_allclose(session.run(None, {"input": image.numpy()})[0], expected, atol=1e-5)
