"""Tests of the report page's example panels: pictures and shapes of any task, in the sample's coordinates."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from qatkit.records.examples import Example, Examples, Panel, Shape, box, coloured, photograph
from qatkit.records.results import Results
from qatkit.report import render_page
from qatkit.tasks.drawing import palette
from qatkit_verify.classification import classified

RESULTS = Results("demo", "m", "out", classes=("cat", "dog", "<hen>"))


def decoded(panel: Panel) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(panel.pixels.partition(",")[2])))


def test_boxes_and_their_labels_lie_over_a_picture() -> None:
    picture = np.full((40, 60, 3), 127, np.uint8)
    panel = photograph("float", picture, [box(5, 6, 25, 30, "#ff0000", "<cat> 0.9"), Shape(((1, 2), (3, 4)), "#00ff00",
                                                                                          closed=False)])  # fmt: skip
    found = replace(RESULTS, examples=Examples([Example(0.25, [panel])], 8, "of the boxes differ"))
    page = render_page(found)
    assert 'viewBox="0 0 60 40"' in page and 'width="60" height="40"/>' in page
    assert 'd="M5.0 6.0 L25.0 6.0 L25.0 30.0 L5.0 30.0Z" stroke="#ff0000"' in page
    assert 'd="M1.0 2.0 L3.0 4.0" stroke="#00ff00"' in page
    assert "&lt;cat&gt; 0.9</text>" in page and "25.00 % of the boxes differ" in page
    assert "<script" not in page and not re.search(r'(src|href)="(?!data:)', page)
    assert found.as_dict()["examples"]["rows"][0]["panels"][0]["shapes"][0]["label"] == "<cat> 0.9"
    assert render_page(RESULTS).count("<figure>") == 0


def test_maps_are_shrunk_without_new_colours() -> None:
    numbers = np.random.default_rng(0).integers(0, 3, (700, 900))
    panel = coloured("truth", numbers, ["#102030", "#405060", "#708090"])
    small = decoded(panel)
    assert (panel.width, panel.height) == (900, 700) and max(small.size) <= 320
    step = 900 // small.size[0]
    assert (np.asarray(small) == numbers[::step, ::step]).all()
    assert small.convert("RGB").getpixel((0, 0)) == ((0x10, 0x20, 0x30), (0x40, 0x50, 0x60), (0x70, 0x80, 0x90))[
        numbers[0, 0]
    ]  # fmt: skip


def test_colours_of_many_classes_differ() -> None:
    found = palette(150)
    assert len(set(found)) == 150 and all(re.fullmatch("#[0-9a-f]{6}", one) for one in found)


def test_the_class_that_loses_most_comes_first() -> None:
    exact = classified(90, None, 30, (10, 10, 10), (9, 8, 10))
    found = classified(80, None, 30, (10, 10, 10), (9, 5, 9))
    page = render_page(replace(RESULTS, accuracy={"float": exact, "int8": found}))
    rows = re.findall(r"<td>([^<]+)</td><td>([\d.]+)</td><td>([\d.]+)</td><td>([-+\d.]+)</td>", page)
    assert rows == [
        ("dog", "80.00", "50.00", "-30.00"),
        ("&lt;hen&gt;", "100.00", "90.00", "-10.00"),
        ("cat", "90.00", "90.00", "+0.00"),
    ]


@pytest.mark.parametrize("classes", [1, 2])
def test_two_classes_need_no_table(classes: int) -> None:
    scores = classified(90, None, 30, (10,) * classes, (9,) * classes)
    assert "<h2>Classes" not in render_page(replace(RESULTS, accuracy={"float": scores, "int8": scores}))
