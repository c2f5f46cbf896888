"""Tests of quantized real files: which nodes change, and whether their SQNR holds at other image sizes.

Q/DQ pairs, 8-bit weights and 32-bit biases do not count as changes.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import version_converter
from onnx_models import sqnr
from PIL import Image
from test_real_files_written_back import _SIZES, _ZIP, _feeds, _source
from torch import Tensor
from unchanged import Changes, changes
from written import Written, outputs

from qatkit import QATModule
from qatkit.importing import import_onnx
from qatkit.importing.write_back import write_back

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _ZIP.is_file(), reason="no shared/data/onnx_models.zip beside the checkout"),
]
_PAGES = _ZIP.with_name("pages.zip")
_FILES = ("dtln_2", "magika", "rapidocr_cls", "speech_embedding", "ultraface_rfb320", "yolox_nano")


def _written(source: Path, feeds: Mapping[str, Tensor]) -> Written:
    """Calibrates a source and writes it back, with biases that are rounded but not corrected."""
    model = import_onnx(source)
    module = QATModule(model, feeds)
    module.mixed_scales = module.mean_shifts = "report"
    more = [{name: torch.randn_like(v) if v.is_floating_point() else v for name, v in feeds.items()}]
    module.calibrate([feeds, *more])
    written = Written(source.with_name("int8.onnx"), model, module.convert().graph, module)
    write_back(model, written.converted, written.path)
    return written


@pytest.mark.parametrize("name", _FILES)
def test_a_real_file_changes_only_where_it_says(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    source = _with_names(_source(name, tmp_path))
    written = _written(source, _feeds(source, _SIZES.get(name)))
    before, after = onnx.load(str(source)), onnx.load(str(written.path))
    constants = {one.name for one in before.graph.initializer}
    assert [_open(one) for one in before.graph.input if one.name not in constants] == list(after.graph.input)
    assert [one.name for one in before.graph.output] == [one.name for one in after.graph.output]
    assert list(before.metadata_props) == list(after.metadata_props)
    versions = [{one.domain: one.version for one in model.opset_import} for model in (before, after)]
    assert versions[1].pop("") == max(13, versions[0].pop(""))
    assert versions[1].keys() - versions[0].keys() <= {"com.microsoft"}
    raised = tmp_path / "raised.onnx"
    if _opset(before) < 13:
        before.CopyFrom(version_converter.convert_version(_without_inputs(before), 13))
    onnx.save(before, str(raised))
    assert _plain(changes(raised, written.path)) == _EXPECTED[name]


def _open(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    """Replaces each size below 1 of an input with a dynamic axis, as the standard requires."""
    for size in value.type.tensor_type.shape.dim:
        if size.HasField("dim_value") and size.dim_value < 1:
            size.Clear()
    return value


def _with_names(source: Path) -> Path:
    """Names the nodes of a file that have no name."""
    model = onnx.load(str(source))
    for number, node in enumerate(model.graph.node):
        node.name = node.name or f"{node.op_type}_{number}"
    onnx.save(model, str(source))
    return source


def _opset(model: onnx.ModelProto) -> int:
    return int(next(one.version for one in model.opset_import if not one.domain))


def _without_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a copy whose initializers are not inputs, as the version converter requires."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    constants = {one.name for one in copy.graph.initializer}
    inputs = [one for one in copy.graph.input if one.name not in constants]
    del copy.graph.input[:]
    copy.graph.input.extend(inputs)
    copy.ir_version = max(copy.ir_version, 4)
    return copy


def _plain(found: Changes) -> dict[str, Any]:
    """Returns the counts and names that are not empty."""
    return {key: dict(v) if isinstance(v, dict) else v for key, v in vars(found).items() if v}


# A Sum keeps ONNX Runtime from fusing an int8 product into a float one. A HardSwish made of parts becomes an
# Add and two Muls in 8 bits, and a SiLU made of parts becomes one operator.
_EXPECTED: dict[str, dict[str, Any]] = {
    "dtln_2": {"new": {"Sum": 5}},
    "magika": {"new": {"Sum": 1}},
    "rapidocr_cls": {
        "gone": {"BatchNormalization": 35, "Add": 18, "Clip": 18, "Mul": 18, "Div": 18},
        "new": {"Add": 18, "Mul": 18, "Sum": 1},
        "folded": 35,
    },
    "speech_embedding": {},
    "ultraface_rfb320": {"gone": {"BatchNormalization": 35}, "folded": 35},
    "yolox_nano": {"gone": {"Sigmoid": 104, "Mul": 104}, "new": {"QuickGelu": 104}},
}


_OTHERS = {
    "rapidocr_cls": ((48, 96), (48, 256), (48, 320)),
    "rapidocr_det": ((96, 64), (96, 160), (128, 320)),
}


def _pages(height: int, width: int) -> Tensor:
    """Returns up to 8 photographs and scans of text, [n, 3, height, width] in -1..1."""
    with zipfile.ZipFile(_PAGES) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith((".jpg", ".png")))[:8]
        pictures = [Image.open(archive.open(name)).convert("RGB").resize((width, height)) for name in names]
    pixels = np.stack([np.asarray(one, np.float32) for one in pictures]) / 127.5 - 1
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))


@pytest.mark.skipif(not _PAGES.is_file(), reason="no shared/data/pages.zip beside the checkout")
@pytest.mark.parametrize("name", _SIZES)
def test_a_real_file_is_as_near_to_float_at_other_sizes(name: str, tmp_path: Path) -> None:
    source = _source(name, tmp_path)
    written = _written(source, {"x": _pages(*_SIZES[name])})
    found = {}
    for sizes in (_SIZES[name], *_OTHERS[name]):
        feeds = {"x": _pages(*sizes)}
        exact, got = (outputs(path, feeds, optimized=True)[0] for path in (source, written.path))
        found[sizes] = sqnr(exact, got)
    assert min(found.values()) > found[_SIZES[name]] - 3, found
