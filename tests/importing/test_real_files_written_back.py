"""Tests of real files that are quantized and written back.

Their outputs are those of the module and, for two files at three sizes, of an export; products run in int8.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor
from written import difference, for_sizes, outputs, same, write

from qatkit import export_onnx
from qatkit.verify.audit import audit

_ZIP = Path(__file__).parents[3] / "shared" / "data" / "onnx_models.zip"
_SIZES = {"rapidocr_cls": (48, 192), "rapidocr_det": (64, 96)}
# Number of int8 product kernels and of quantized values in each file.
_EXPECTED = {
    "dtln_1": (1, 2),
    "dtln_2": (7, 19),
    "magika": (3, 6),
    "rapidocr_cls": (54, 127),
    "rapidocr_det": (85, 169),
    "speech_embedding": (20, 41),
    "ultraface_rfb320": (52, 73),
    "yolox_nano": (113, 256),
}
_PRODUCTS = ("QLinearConv", "QGemm", "QLinearMatMul", "MatMulIntegerToFloat")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _ZIP.is_file(), reason="no shared/data/onnx_models.zip beside the checkout"),
]


def _source(name: str, folder: Path) -> Path:
    with zipfile.ZipFile(_ZIP) as archive:
        archive.extract(f"onnx_models/{name}.onnx", folder)
    return folder / "onnx_models" / f"{name}.onnx"


def _feeds(source: Path, sizes: tuple[int, int] | None = None, count: int = 1) -> Mapping[str, Tensor]:
    """Returns a random value per input: normal floats, or integers from 0 to 255.

    sizes: the height and width; None for those of the file.
    count: the size of each dynamic axis that `sizes` does not give.
    """
    graph = onnx.load(str(source)).graph
    constants = {one.name for one in graph.initializer}
    feeds = {}
    for value in graph.input:
        kind = value.type.tensor_type
        shape = [dim.dim_value if dim.dim_value > 0 else count for dim in kind.shape.dim]
        shape[2:] = sizes or shape[2:]
        whole = kind.elem_type != onnx.TensorProto.FLOAT
        if value.name not in constants:
            feeds[value.name] = torch.randint(0, 256, shape).int() if whole else torch.randn(shape)
    return feeds


@pytest.mark.parametrize("name", _EXPECTED)
def test_real_file_gives_what_its_module_gives(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    source = _source(name, tmp_path)
    feeds = _feeds(source, _SIZES.get(name))
    written = write(source, feeds)
    same(written, feeds, steps=0.5)
    found, kernels = difference(source, written.path), written.optimized()
    assert (sum(kernels[one] for one in _PRODUCTS), found.pairs) == _EXPECTED[name]
    assert not {"Conv", "FusedConv", "FusedGemm", "Gemm"} & set(kernels)
    assert written.path.stat().st_size < 0.6 * source.stat().st_size


@pytest.mark.parametrize("name", _SIZES)
def test_real_file_equals_an_export_at_three_sizes(name: str, tmp_path: Path) -> None:
    """The reference is an export of the module, since PyTorch's float operators round differently."""
    torch.manual_seed(2)
    source = _source(name, tmp_path)
    written = write(source, _feeds(source, _SIZES[name]))
    for sizes in ((64, 64), (96, 160), (128, 64)):
        feeds = _feeds(source, sizes, 2)
        export_onnx(for_sizes(written, feeds), feeds, tmp_path / "exported.onnx")
        for optimized in (False, True):
            ours, exported = (
                outputs(path, feeds, optimized=optimized)
                for path in (written.path, tmp_path / "exported.onnx")
            )
            np.testing.assert_allclose(ours[0], exported[0], rtol=0, atol=1e-6)


def test_recurrent_layer_in_a_branch(tmp_path: Path) -> None:
    source = _source("silero_vad_16k", tmp_path)
    feeds = {"input": torch.randn(1, 576) / 10, "state": torch.randn(2, 1, 128) / 10}
    written = write(source, feeds, fixed={"sr": 16000})
    same(written, feeds)
    assert written.optimized()["QLinearConv"] == 6
    graph = onnx.load(str(written.path)).graph
    whole = [tuple(one.dims) for one in graph.initializer if one.data_type == onnx.TensorProto.INT8]
    assert (1, 512, 128) in whole


def test_audit_finds_no_problem(tmp_path: Path) -> None:
    source = _source("ultraface_rfb320", tmp_path)
    found = audit(write(source, _feeds(source)).path)
    assert not found.problems
    assert found.int8_macs == found.macs
