"""Pictures with boxes of objects, in the layouts of Pascal VOC and COCO.

    voc_boxes     ROOT/JPEGImages/NAME.jpg  ROOT/Annotations/NAME.xml  ROOT/ImageSets/Main/{trainval,test}.txt
    coco_boxes    ROOT/annotations/instances_{train,val}*.json  ROOT/{train,val}*/NAME.jpg
                  ROOT/{train,test}/_annotations.coco.json among the pictures

In VOC's layout, `trainval` (or `train`) trains and `test` verifies; without `test`, `train` trains and `val`
verifies. In COCO's layout, `train` trains, and `test`, `val` or `valid` verifies. All annotations are read
before any long work. An annotation whose picture is missing or has another size ends the run. So does a box
that has no area or exceeds its picture by more than one pixel, unless data.bad=skip leaves such boxes out.
VOC's difficult objects and COCO's crowds are ignored: detections of them count neither as right nor as wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from PIL import Image

from qatkit.config.data_folders import FOLDERS, data_folder
from qatkit.config.schema.model import COCO_BOXES, VOC_BOXES
from qatkit.data.image_files import ImageFiles
from qatkit.data.sources import Splits
from qatkit.progress import shown
from qatkit.tasks.average_precision import CROWD, IGNORED
from qatkit_verify.errors import ConfigError, first_line
from qatkit_verify.pictures import open_regular_file

if TYPE_CHECKING:
    from qatkit.data.request import Request

_THREADS, _PART, _MANY = 8, 64, 2000
_SHOWN, _EDGE = (
    3,
    1.0,
)  # examples in a message; pixels by which a box may exceed its picture, since VOC counts from 1
_VOC_PARTS = ((("trainval", "train"), ("test", "val")), (("train",), ("val",)))
_TRAIN, _TEST = ("train",), ("test", "val", "valid")
_OWN_FILE = "_annotations.coco.json"


@dataclass(frozen=True)
class _Box:
    name: str
    corners: tuple[float, float, float, float]
    ignored: int


@dataclass(frozen=True)
class _Picture:
    path: Path
    size: tuple[int, int]  # width, height
    boxes: list[_Box] = field(default_factory=list)


def voc_boxes(root: str | None, download: bool, seed: int, request: Request | None = None) -> Splits:
    """Returns the splits of a folder in Pascal VOC's layout, with classes in alphabetical order.

    Raises:
        ConfigError: the folder does not exist, or lacks annotations or a list of pictures; an annotation
            cannot be read, lacks its picture or differs from it in size; a box is wrong with data.bad=refuse;
            or a class of the test split occurs in no training picture.
    """
    top = _voc_folder(data_folder(VOC_BOXES, root))
    for trains, tests in _VOC_PARTS:
        train, test = _voc_list(top, trains), _voc_list(top, tests)
        if train and test and not set(test) <= set(train):  # trainval contains val
            break
    if not train or not test:
        part = "test or val" if train else "train"
        raise ConfigError("data.root", root, f"{FOLDERS[VOC_BOXES]}; ImageSets/Main has no list for {part}")
    parts = [[_voc_picture(top, name) for name in names] for names in (train, test)]
    names = sorted({box.name for part in parts for picture in part for box in picture.boxes})
    return _splits(str(top), parts[0], parts[1], names, _skips(request))


def coco_boxes(root: str | None, download: bool, seed: int, request: Request | None = None) -> Splits:
    """Returns the splits of a folder in COCO's layout, with classes in the order of their ids.

    Raises:
        ConfigError: as for `voc_boxes`, or the categories of the splits differ.
    """
    top = data_folder(COCO_BOXES, root)
    found = [_coco_file(top, part) for part in (_TRAIN, _TEST)]
    for file, part in zip(found, ("train", "test or val"), strict=True):
        if file is None:
            raise ConfigError("data.root", root, f"{FOLDERS[COCO_BOXES]}; it has no annotations for {part}")
    (train, names), (test, others) = (_coco_pictures(top, file) for file in found if file is not None)
    if names != others:
        lone = _first(sorted(set(names) ^ set(others)))
        told = f"only one split has {lone}" if lone else "their order differs"
        raise ConfigError("data.root", str(top), f"the same categories in both splits; {told}")
    return _splits(str(top), train, test, names, _skips(request))


def _skips(request: Request | None) -> bool:
    return request is not None and request.settings.bad == "skip"


def _splits(
    top: str, train: Sequence[_Picture], test: Sequence[_Picture], names: Sequence[str], skip: bool
) -> Splits:
    """Returns the splits of the given pictures, and checks them and their boxes.

    Raises:
        ConfigError: a picture is missing or differs in size from its annotation, boxes are wrong and `skip` is
            false, or a class of the test split occurs in no training picture.
    """
    every = [*train, *test]
    missing = [picture.path.name for picture in every if not picture.path.is_file()]
    if missing:
        allowed = f"a picture for each annotation; {len(missing)} missing: {_first(missing)}"
        raise ConfigError("data.root", top, allowed)
    _check_sizes(top, every)
    wrong = [f"{picture.path.name} ({problem})" for picture in every for problem in _problems(picture)]
    told = _first(wrong)
    if wrong and not skip:
        allowed = f"boxes with an area inside their pictures; {len(wrong)} wrong: {told}"
        some = len(wrong) < sum(len(picture.boxes) for picture in every)
        advice = "; set data.bad=skip to leave them out" if some else ""
        raise ConfigError("data.root", top, allowed + advice)
    trained = {box.name for picture in train for box in picture.boxes}
    if unknown := sorted({box.name for picture in test for box in picture.boxes} - trained):
        allowed = f"objects of each class in the training pictures; there are none of {_first(unknown)}"
        raise ConfigError("data.root", top, allowed)
    notes = (f"data.bad=skip: boxes left out: {len(wrong)}, {told}",) if wrong else ()
    labels = {name: label for label, name in enumerate(names)}
    return Splits(_files(train, labels), _files(test, labels), tuple(names), notes=notes)


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _check_sizes(top: str, pictures: Sequence[_Picture]) -> None:
    """Compares the sizes in the headers of all pictures with the annotations.

    The survey of all files reports unreadable pictures later.

    Raises:
        ConfigError: the size of a picture differs from the size in its annotation.
    """

    def look(picture: _Picture) -> str:
        with suppress(OSError, ValueError, SyntaxError), open_regular_file(str(picture.path)) as stream:
            with Image.open(stream) as image:
                width, height = image.size
            if (width, height) != picture.size:
                own = "{} x {}".format(*picture.size)
                return f"{picture.path.name} has {width} x {height} pixels, but its annotation says {own}"
        return ""

    with ThreadPoolExecutor(_THREADS) as pool:
        parts = [pictures[start : start + _PART] for start in range(0, len(pictures), _PART)]
        bar = len(pictures) >= _MANY
        for part, _ in shown([(part, part) for part in parts], "checking pictures", bar, "files"):
            for told in pool.map(look, part):
                if told:
                    raise ConfigError(
                        "data.root", top, f"annotations with the sizes of their pictures; {told}"
                    )


def _files(pictures: Iterable[_Picture], labels: Mapping[str, int]) -> ImageFiles:
    samples: list[Any] = [
        (
            str(picture.path),
            tuple(
                (labels[box.name], *_clipped(box, picture), box.ignored)
                for box in picture.boxes
                if not _problem(box, picture)
            ),
        )
        for picture in pictures
    ]
    return ImageFiles(samples)


def _clipped(box: _Box, picture: _Picture) -> tuple[float, ...]:
    width, height = picture.size
    return tuple(
        min(max(value, 0.0), float(end))
        for value, end in zip(box.corners, (width, height, width, height), strict=True)
    )


def _problems(picture: _Picture) -> list[str]:
    return [told for box in picture.boxes if (told := _problem(box, picture))]


def _problem(box: _Box, picture: _Picture) -> str:
    """Returns a description of what is wrong with a box; "" if nothing is."""
    x1, y1, x2, y2 = box.corners
    width, height = picture.size
    corners = f"{x1:g}, {y1:g}, {x2:g}, {y2:g}"
    if min(x1, y1) < -_EDGE or x2 > width + _EDGE or y2 > height + _EDGE:
        return f"box {corners} exceeds {width} x {height} pixels"
    low_x, low_y, high_x, high_y = _clipped(box, picture)
    return "" if low_x < high_x and low_y < high_y else f"box {corners} has no area"


def _voc_folder(top: Path) -> Path:
    """Returns `top`, or the only folder below it with annotations (VOCdevkit/VOC2012).

    Raises:
        ConfigError: no folder or several folders have annotations.
    """
    several = 0
    for depth in ("Annotations", "*/Annotations", "*/*/Annotations"):
        found = sorted(path.parent for path in top.glob(depth) if path.is_dir())
        if len(found) == 1:
            return found[0]
        several = several or len(found)
    told = f"{several} folders Annotations exist" if several else "there is no folder Annotations"
    raise ConfigError("data.root", str(top), f"{FOLDERS[VOC_BOXES]}; {told}")


def _voc_list(top: Path, parts: Sequence[str]) -> list[str]:
    """Returns the picture names in the list of the first of `parts` that has one; [] if none has."""
    for part in parts:
        path = top / "ImageSets" / "Main" / f"{part}.txt"
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            return [line.split()[0] for line in lines if line.split()]
    return []


def _voc_picture(top: Path, name: str) -> _Picture:
    """Returns the picture of an annotation.

    Raises:
        ConfigError: the annotation cannot be read.
    """
    path = top / "Annotations" / f"{name}.xml"
    try:
        page = ElementTree.parse(path).getroot()  # noqa: S314  expat bounds the expansion of entities
        size = (int(_text(page, "size/width")), int(_text(page, "size/height")))
        boxes = [_voc_box(one) for one in page.findall("object")]
    except (OSError, ElementTree.ParseError, ValueError) as error:
        reason = f"Annotations/{path.name} can't be read ({first_line(error)})"
        raise ConfigError("data.root", str(top), reason=reason) from error
    picture = next((one for one in (top / "JPEGImages").glob(f"{name}.*")), None)
    return _Picture(picture or top / "JPEGImages" / f"{name}.jpg", size, boxes)


def _voc_box(page: ElementTree.Element) -> _Box:
    """Returns the box of an object with corners that count from 0.

    VOC counts pixels from 1 and includes the last one, so 1 is subtracted from xmin and ymin only.
    """
    x1, y1, x2, y2 = (float(_text(page, f"bndbox/{key}")) for key in ("xmin", "ymin", "xmax", "ymax"))
    difficult = (page.findtext("difficult") or "0").strip() == "1"
    return _Box(_text(page, "name").strip(), (x1 - 1, y1 - 1, x2, y2), IGNORED if difficult else 0)


def _text(page: ElementTree.Element, path: str) -> str:
    found = page.findtext(path)
    if found is None:
        raise ValueError(f"{path} is missing")
    return found


def _coco_file(top: Path, parts: Sequence[str]) -> Path | None:
    """Returns the annotation file of the first of `parts` that has one; None if none has."""
    for part in parts:
        own = top / part / _OWN_FILE
        found = [own] if own.is_file() else sorted(top.glob(f"annotations/instances_{part}*.json"))
        if found:
            return found[0]
    return None


def _coco_pictures(top: Path, path: Path) -> tuple[list[_Picture], list[str]]:
    """Returns the pictures of an annotation file, and the names of its categories.

    Categories without objects that only group others (supercategories) are left out.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        page = json.loads(path.read_text(encoding="utf-8"))
        names = {one["id"]: str(one["name"]) for one in sorted(page["categories"], key=lambda one: one["id"])}
        used = {one["category_id"] for one in page["annotations"]}
        folder = path.parent if path.name == _OWN_FILE else _coco_folder(top, path)
        pictures = {
            one["id"]: _Picture(folder / one["file_name"], (int(one["width"]), int(one["height"])))
            for one in page["images"]
        }
        for one in page["annotations"]:
            x, y, width, height = map(float, one["bbox"])
            box = _Box(
                names[one["category_id"]], (x, y, x + width, y + height), CROWD * one.get("iscrowd", 0)
            )
            pictures[one["image_id"]].boxes.append(box)
    except (OSError, ValueError, KeyError, TypeError) as error:
        told = f"{type(error).__name__}: {first_line(error)}"
        reason = f"{path.relative_to(top)} can't be read ({told})"
        raise ConfigError("data.root", str(top), reason=reason) from error
    roots = {one.get("supercategory") for one in page["categories"]}
    kept = [name for key, name in names.items() if key in used or name not in roots]
    return list(pictures.values()), kept


def _coco_folder(top: Path, path: Path) -> Path:
    """Returns the folder of the pictures: val2017/ or images/val2017/ for instances_val2017.json."""
    part = path.stem.removeprefix("instances_")
    return next((one for one in (top / part, top / "images" / part) if one.is_dir()), top / part)
