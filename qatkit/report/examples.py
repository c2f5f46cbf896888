"""The section of the page that draws test samples, and the table of classes."""

from __future__ import annotations

from html import escape

from qatkit.records.examples import Example, Examples, Panel, Shape
from qatkit.records.results import Results
from qatkit.report.html import section, table

_LINE, _TEXT = 150, 20  # ratio of the height of a panel to the width of a line, and to the height of letters
_OPEN, _MOST = 30, 100  # number of classes above which the table is collapsed, and of those that it lists
_FEWEST = 3  # smallest number of classes for a table: with two, the total is enough


def examples_section(results: Results) -> str:
    """Returns the section; "" if no sample was drawn."""
    found = results.examples
    if found is None or not found.rows:
        return ""
    chosen = f"{len(found.rows)} of {found.looked_at:,} test {results.task.samples}"
    said = f"{chosen}: those on which {results.label} differs most from float."
    keys = "".join(
        f'<span class="legend"><span class="key" style="background:{colour}"></span>{escape(name)}</span> '
        for name, colour in found.legend
    )
    rows = "".join(_row(found, one) for one in found.rows)
    legend = f'<p class="small">{keys}</p>' if keys else ""
    return section("Examples", f'<p class="soft">{escape(said)}</p>', legend, rows)


def _row(found: Examples, example: Example) -> str:
    heading = f"<h3>{100 * example.differs:.2f} % {escape(found.measure)}</h3>"
    return f'{heading}<div class="examples">{"".join(map(_panel, example.panels))}</div>'


def _panel(panel: Panel) -> str:
    size = f'width="{panel.width}" height="{panel.height}"'
    picture = f'<image href="{panel.pixels}" {size}/>' if panel.pixels else ""
    shapes = "".join(_shape(one, panel.height) for one in panel.shapes)
    drawing = f'<svg viewBox="0 0 {panel.width} {panel.height}" role="img">{picture}{shapes}</svg>'
    return f"<figure><figcaption>{escape(panel.title)}</figcaption>{drawing}</figure>"


def _shape(shape: Shape, height: int) -> str:
    """Returns the SVG of a shape's line, with the label, if any, to the lower right of its first point."""
    places = [f"{x:.1f} {y:.1f}" for x, y in shape.points]
    colour = escape(shape.colour)
    width = f'style="vector-effect:none" stroke-width="{max(1.0, height / _LINE):.1f}"'
    path = f'<path d="M{" L".join(places)}{"Z" if shape.closed else ""}" stroke="{colour}" {width}/>'
    if not shape.label:
        return path
    size = height / _TEXT
    x, y = shape.points[0]
    text = f'<text x="{x + size / 4:.1f}" y="{y + size:.1f}" font-size="{size:.1f}" fill="{colour}">'
    return f"{path}{text}{escape(shape.label)}</text>"


def classes_section(results: Results) -> str:
    """Returns a table of each class's main metric in float and INT8, the largest loss first.

    It is "" without such figures, or with fewer than three classes.
    """
    exact, found = results.accuracy.get("float"), results.accuracy.get("int8")
    if exact is None or found is None or len(found.class_images) < _FEWEST:
        return ""
    rows: list[tuple[float, list[str]]] = []
    for label, (images, right) in enumerate(zip(found.class_images, found.class_right, strict=True)):
        before = exact.class_images[label] if label < len(exact.class_images) else 0
        if not images or not before:
            continue
        name = results.classes[label] if label < len(results.classes) else str(label)
        shares = 100 * exact.class_right[label] / before, 100 * right / images
        change = shares[1] - shares[0]
        rows.append((change, [escape(name), *(f"{one:.2f}" for one in shares), f"{change:+.2f}"]))
    if not rows:
        return ""
    metric = results.task.main.name.removeprefix("m")  # mIoU is the mean of the classes' IoU
    drawn = table(
        ("class", f"{metric}, float", f"{metric}, {results.label}", "change"),
        [("", cells) for _, cells in sorted(rows, key=lambda row: row[0])[:_MOST]],
        "dense",
    )
    if len(rows) > _OPEN:
        shown = f"{min(_MOST, len(rows))} of {len(rows)} classes, the largest loss first"
        drawn = f"<details><summary>{shown}</summary>{drawn}</details>"
    return section("Classes", drawn)
