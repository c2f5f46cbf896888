"""Small pictures with boxes of two kinds of objects, in the layouts of Pascal VOC and COCO."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

NAMES, COLOURS = ("brick", "leaf"), ((230, 60, 40), (40, 210, 80))
HEIGHT, WIDTH = 48, 64
Scene = list[tuple[int, int, int, int, int]]  # class, x1, y1, x2, y2


def scene(draw: np.random.Generator) -> Scene:
    """Returns one object of each class, side by side."""
    found: Scene = []
    for label, left in enumerate(draw.permutation([0, WIDTH // 2])):
        width, height = draw.integers(12, 24, 2)
        x, y = left + draw.integers(0, WIDTH // 2 - width), draw.integers(0, HEIGHT - height)
        found.append((label, int(x), int(y), int(x + width), int(y + height)))
    return found


def picture(boxes: Scene) -> Image.Image:
    """Returns the picture of a scene: each object is a rectangle in the colour of its class."""
    pixels = np.full((HEIGHT, WIDTH, 3), 30, np.uint8)
    for label, x1, y1, x2, y2 in boxes:
        pixels[y1:y2, x1:x2] = COLOURS[label]
    return Image.fromarray(pixels)


def scenes(train: int, test: int) -> dict[str, list[tuple[str, Scene]]]:
    """Returns the names and scenes of each split."""
    draw = np.random.default_rng(0)
    return {
        part: [(f"{part}{number:03}", scene(draw)) for number in range(count)]
        for part, count in (("train", train), ("test", test))
    }


def annotation(name: str, boxes: Scene) -> str:
    """Returns a picture's annotation as Pascal VOC XML, whose pixel coordinates start at 1."""
    objects = "".join(
        f"<object><name>{NAMES[label]}</name><difficult>0</difficult><bndbox><xmin>{x1 + 1}</xmin><ymin>{y1 + 1}</ymin>"
        f"<xmax>{x2}</xmax><ymax>{y2}</ymax></bndbox></object>"
        for label, x1, y1, x2, y2 in boxes
    )
    size = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height><depth>3</depth></size>"
    return f"<annotation><filename>{name}.png</filename>{size}{objects}</annotation>"


def voc_folder(root: Path, train: int = 24, test: int = 8) -> Path:
    """Writes the pictures of `scenes` in Pascal VOC's layout and returns their folder."""
    for part in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (root / part).mkdir(parents=True)
    for part, found in scenes(train, test).items():
        (root / "ImageSets" / "Main" / f"{part}.txt").write_text("".join(f"{name}\n" for name, _ in found))
        for name, boxes in found:
            picture(boxes).save(root / "JPEGImages" / f"{name}.png")
            (root / "Annotations" / f"{name}.xml").write_text(annotation(name, boxes))
    return root


def coco_folder(root: Path, train: int = 24, test: int = 8) -> Path:
    """Writes the same pictures in COCO's layout and returns their folder."""
    (root / "annotations").mkdir(parents=True)
    for part, found in scenes(train, test).items():
        folder = "val" if part == "test" else part
        (root / folder).mkdir()
        boxes = []
        for image, (name, objects) in enumerate(found):
            picture(objects).save(root / folder / f"{name}.png")
            boxes += [
                {"id": 10 * image + label, "image_id": image, "category_id": 7 + label, "iscrowd": 0,
                 "bbox": [x1, y1, x2 - x1, y2 - y1]}
                for label, x1, y1, x2, y2 in objects
            ]  # fmt: skip
        images = [
            {"id": image, "file_name": f"{name}.png", "width": WIDTH, "height": HEIGHT}
            for image, (name, _) in enumerate(found)
        ]
        categories = [{"id": 7 + label, "name": name} for label, name in enumerate(NAMES)]
        record = {"images": images, "annotations": boxes, "categories": categories}
        (root / "annotations" / f"instances_{folder}.json").write_text(json.dumps(record))
    return root
