"""A few test samples for drawings in the report: panels of pixels and shapes, as plain data.

A panel can be drawn without the task and the model: a task's `qatkit.tasks.drawing.Drawing` makes it, and
`qatkit.report.examples` draws it on the page. report.json contains everything except the pixels, which only the
page contains.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LONGEST = 320  # size of an embedded picture in pixels
_QUALITY = 85  # JPEG quality


@dataclass(frozen=True)
class Shape:
    """A line over a panel.

    Attributes:
        points: the (x, y) of each point, in pixels from the panel's upper left corner.
        colour: the colour, "#rrggbb".
        label: the text next to the first point.
        closed: whether a line leads from the last point to the first.
    """

    points: Sequence[tuple[float, float]]
    colour: str
    label: str = ""
    closed: bool = True


@dataclass(frozen=True)
class Panel:
    """A drawing of a picture with shapes over it.

    Attributes:
        title: the text above it.
        width, height: the size of the drawing in pixels.
        pixels: a data URI of a picture that fills it; "" for none.
        shapes: the shapes that are drawn over the picture.
    """

    title: str
    width: int
    height: int
    pixels: str = ""
    shapes: Sequence[Shape] = ()


@dataclass(frozen=True)
class Example:
    """A sample to draw.

    Attributes:
        differs: the share of the sample in which the files differ; `Examples.measure` says of what.
        panels: the panels from left to right.
    """

    differs: float
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Examples:
    """The samples of a report.

    Attributes:
        rows: the samples, the largest difference first.
        looked_at: the number of test samples from which these were chosen.
        measure: the words after the share `Example.differs`, such as "of the pixels get another class".
        legend: the (name, "#rrggbb") of each colour.
    """

    rows: Sequence[Example]
    looked_at: int
    measure: str
    legend: Sequence[tuple[str, str]] = ()

    def as_dict(self) -> dict[str, Any]:
        """Returns plain containers, without pixels."""
        bare = [replace(row, panels=[replace(one, pixels="") for one in row.panels]) for row in self.rows]
        return asdict(replace(self, rows=bare))


def box(left: float, top: float, right: float, bottom: float, colour: str, label: str = "") -> Shape:
    """Returns a rectangle with the given edges in pixels."""
    return Shape(((left, top), (right, top), (right, bottom), (left, bottom)), colour, label)


def photograph(title: str, picture: NDArray[Any], shapes: Sequence[Shape] = ()) -> Panel:
    """Returns a panel of a picture, uint8 [H, W, 3]; it is compressed (JPEG), and shrunk if it is large."""
    from PIL import Image

    image = Image.fromarray(picture)
    image.thumbnail((_LONGEST, _LONGEST))
    return Panel(
        title, picture.shape[1], picture.shape[0], _uri(image, "jpeg", quality=_QUALITY), tuple(shapes)
    )


def coloured(
    title: str, numbers: NDArray[Any], palette: Sequence[str], shapes: Sequence[Shape] = ()
) -> Panel:
    """Returns a panel of numbers below 256, [H, W], each drawn in its colour "#rrggbb".

    The picture is compressed without loss (PNG), and shrunk if it is large.
    """
    import numpy as np
    from PIL import Image

    step = -(-max(numbers.shape) // _LONGEST)
    image = Image.fromarray(np.ascontiguousarray(numbers[::step, ::step], np.uint8), "P")
    image.putpalette(b"".join(bytes.fromhex(colour[1:]) for colour in palette))
    return Panel(title, numbers.shape[1], numbers.shape[0], _uri(image, "png", optimize=True), tuple(shapes))


def _uri(image: Any, kind: str, **settings: Any) -> str:
    stream = io.BytesIO()
    image.save(stream, kind, **settings)
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode('ascii')}"
