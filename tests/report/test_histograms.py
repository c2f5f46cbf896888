"""Tests of the histogram picture of each tensor: where ranges and steps are drawn, and what is refused."""

from __future__ import annotations

from pathlib import Path

import float_files
import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from PIL import Image
from tiny_run import report_of

from qatkit.config.rules import validate
from qatkit.config.schema import AnalysisConfig, Config
from qatkit.jobs import quantize_file
from qatkit.records.analysis import Comparison, Difference, Histogram, TensorRow
from qatkit.report.histograms import draw_histograms, steps
from qatkit_verify.errors import ConfigError

RED, BLUE, GREY = (179, 38, 30), (31, 111, 235), (143, 160, 181)
OWN = Difference(1e-4, 30.0, 0.999, 0.1, 0.0)


def row(histogram: Histogram, site: str = "a/b:c", kind: str = "activation") -> TensorRow:
    return TensorRow(site, kind, OWN, None, None, 0.01, 0.9, 0.0, histogram)


def columns(path: Path, colour: tuple[int, int, int]) -> list[int]:
    """Returns the pixel columns in which a colour fills most of the plot's height."""
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))[60:299]
    return np.nonzero((pixels == colour).all(-1).mean(0) > 0.9)[0].tolist()


def test_range_and_values_lie_where_they_should(tmp_path: Path) -> None:
    """Draws four bins from -1 to 1 over a range from -2 to 2 (860 pixels): they start at a quarter of it."""
    histogram = Histogram(-1.0, 1.0, [9, 0, 0, 0], [0, 0, 0, 9], -2.0, 2.0, 4 / 255)
    found = draw_histograms(tmp_path, Comparison(1, [row(histogram)]))
    (name,) = [one.picture for one in found.rows]
    assert name == "pictures/histograms/0000_activation_a_b_c.png"
    red, grey = (columns(tmp_path / name, colour) for colour in (RED, GREY))
    assert abs(red[0] - 20) <= 1 and abs(red[-1] - 880) <= 1
    assert abs(grey[0] - (20 + 860 / 4)) <= 1 and abs(grey[-1] - (20 + 860 * 3 / 8)) <= 1
    blue = columns(tmp_path / name, BLUE)
    assert blue and all(abs(x - (20 + 860 * 5 / 8)) <= 2 for x in blue)


def test_steps_are_the_values_of_the_type() -> None:
    scale, zero = 0.1, 3
    ends = (-zero * scale, (255 - zero) * scale)
    found = steps(Histogram(-0.3, 20.0, [1], [1], *ends, scale))
    np.testing.assert_allclose(found, (np.arange(256) - zero) * scale, atol=1e-12)
    assert len(steps(Histogram(-0.3, 20.0, [1], [1], *ends, scale), 4)) == 64
    assert steps(Histogram(0.0, 1.0, [1], [1], 0.0, 1.0)) == []


def test_a_constant_tensor_is_drawn(tmp_path: Path) -> None:
    histogram = Histogram(-0.5, 0.5, [5], [5], 0.0, 0.0, 1e-12)
    found = draw_histograms(tmp_path, Comparison(1, [row(histogram), row(histogram, kind="weight")]))
    assert len({one.picture for one in found.rows}) == 2


def test_each_tensor_of_a_given_file_is_drawn(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = float_files.settings(float_files.by_hand(tmp_path / "file.onnx"), "static", folder)
    config.verify.max_drop = None
    config.analysis = AnalysisConfig(tensors=4, pictures=1, histograms=True)
    assert quantize_file.quantize(config) == 0
    rows = report_of(folder)["analysis"]["comparison"]["rows"]
    assert len(rows) > 4 and sum(one["histogram"] is not None for one in rows) == 1
    page = (folder / "report.html").read_text()
    assert page.count('<svg class="histogram-svg"') == 1
    for one in rows:
        with Image.open(folder / one["picture"]) as picture:
            assert (picture.format, picture.size) == ("PNG", (900, 360))
        assert f'<a href="{one["picture"]}">' in page
    assert f"histograms ({len(rows)} tensors): pictures/histograms" in page
    graph = onnx.load(folder / "model.static.onnx").graph
    constants = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    pairs = [node for node in graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    (drawn,) = [one["histogram"] for one in rows if one["histogram"] is not None]
    assert any(np.isclose(drawn["step"], constants[node.input[1]].max()) for node in pairs)


def test_histograms_without_tensors_are_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        validate(Config(analysis=AnalysisConfig(histograms=True)))
    told = "expected false with analysis.tensors=0, which compares no tensor"
    assert str(refused.value) == f"analysis.histograms=true: {told}"
