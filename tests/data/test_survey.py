"""Tests of the survey of image folders before a run: bad files, duplicates, skipped names, and its cache."""

from __future__ import annotations

import io
import os
import signal
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import ImageFolder

from qatkit.config.schema import DataConfig
from qatkit.data import DataModule, image_folder, one_picture_each, pictures
from qatkit.data.survey import look_at
from qatkit_verify.errors import ConfigError
from qatkit_verify.pictures import MOST_PIXELS, read_picture


@pytest.fixture(autouse=True)
def own_cache_and_no_waiting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Sets a cache per test and fails after 60 seconds, since a read from a pipe would never end."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("waited for a file that is none"))
    signal.alarm(60)
    yield
    signal.alarm(0)


def picture(seed: int = 0, size: int = 24) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8))


def encoded(kind: str, seed: int = 0, size: int = 24) -> bytes:
    stream = io.BytesIO()
    picture(seed, size).save(stream, kind)
    return stream.getvalue()


def png_of(width: int, height: int, mode: int = 0) -> bytes:
    """Returns a well-formed PNG with this size in its header but only 1,000 bytes of zeros as its data."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, mode, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(1000)))
        + chunk(b"IEND", b"")
    )


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        place = os.getcwd()
        os.chdir(path.parent)  # a socket's path is limited to 108 bytes
        one.bind(path.name)
        os.chdir(place)


def _float(path: Path) -> None:
    Image.fromarray(np.zeros((4, 4), np.float32)).save(path, "tiff")


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "empty"),
    "text": (lambda path: path.write_text("<html>404</html>"), "Pillow does not know its format"),
    "only a header": (lambda path: path.write_bytes(encoded("png")[:20]), ""),
    "cut off jpeg": (lambda path: path.write_bytes(encoded("jpeg", size=200)[:-2000]), "truncated"),
    "cut off png": (lambda path: path.write_bytes(encoded("png", size=200)[:-2000]), "truncated"),
    "cut off webp": (lambda path: path.write_bytes(encoded("webp", size=200)[:-2000]), ""),
    "cut off gif": (lambda path: path.write_bytes(encoded("gif", size=200)[:-2000]), "truncated"),
    "cut off bmp": (lambda path: path.write_bytes(encoded("bmp", size=200)[:-2000]), "truncated"),
    "cut off tiff": (lambda path: path.write_bytes(encoded("tiff", size=200)[:-2000]), ""),
    "cut off ppm": (lambda path: path.write_bytes(encoded("ppm", size=200)[:-2000]), "truncated"),
    "bomb": (lambda path: path.write_bytes(png_of(MOST_PIXELS // 100, 101)), "pixels, more than 89,478,485"),
    "large bomb": (lambda path: path.write_bytes(png_of(2**30, 2**30)), "pixels"),
    "thread": (lambda path: path.write_bytes(png_of(1, 50_000)), "1 x 50000 pixels; one side is more than"),
    "float pixels": (_float, "float pixels of unknown range"),
    "pipe": (os.mkfifo, "a named pipe"),
    "socket": (_socket, "a socket"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a device"),
    "link to itself": (lambda path: path.symlink_to(path.name), "a link to itself"),
    "link to nothing": (lambda path: path.symlink_to("gone.jpg"), "a link to a missing file"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_image_is_known_without_reading_it_whole(kind: str, tmp_path: Path) -> None:
    make, why = BAD[kind]
    path = tmp_path / "one.jpg"
    make(path)

    assert why in look_at([str(path)])[str(path)].reason != ""
    with pytest.raises(ConfigError, match=r"data\.root=.*one\.jpg: the file is not a readable image \("):
        read_picture(str(path), "data.root")


@pytest.mark.parametrize("kind", ["jpeg", "png", "gif", "webp", "bmp", "tiff", "ppm"])
def test_whole_files_are_images_whatever_stands_behind_their_end(kind: str, tmp_path: Path) -> None:
    """Checks that bytes after the end of an image, as cameras append to a JPEG, do not make the file bad."""
    for name, behind in (("plain", b""), ("zeros", bytes(100)), ("movie", b"ftypmp42" * 2000)):
        (tmp_path / name).write_bytes(encoded(kind) + behind)
    paths = [str(tmp_path / name) for name in ("plain", "zeros", "movie")]
    assert [look.reason for look in look_at(paths).values()] == [""] * 3
    expected = np.asarray(Image.open(io.BytesIO(encoded(kind))).convert("RGB"))
    for path in paths:
        np.testing.assert_array_equal(np.asarray(read_picture(path, "data.root")), expected)


def folder(root: Path, images: int = 3) -> Path:
    """Writes two splits of two classes, in which no two images are alike."""
    for number, name in enumerate(("train/cat", "train/dog", "val/cat", "val/dog")):
        (root / name).mkdir(parents=True)
        for index in range(images):
            (root / name / f"{index}.png").write_bytes(encoded("png", seed=100 * number + index))
    return root


def data_of(root: Path, source: Callable[..., object] = image_folder, bad: str = "refuse") -> DataModule:
    config = DataConfig(
        root=str(root), image_size=8, mean=[0.0] * 3, std=[1.0] * 3, workers=0, batch_size=1, bad=bad
    )
    return DataModule(config, source, 0)  # type: ignore[arg-type]


def test_bad_files_are_refused_by_name_or_skipped_with_a_note(tmp_path: Path) -> None:
    root = folder(tmp_path / "root")
    (root / "train/cat/0.png").write_bytes(b"")
    os.mkfifo(root / "train/dog/pipe.jpg")
    (root / "val/dog/2.png").write_text("no image")

    with pytest.raises(ConfigError) as raised:
        data_of(root)
    listed = (
        "3 of 13 files can't be read as images: train/cat/0.png (empty), train/dog/pipe.jpg (a named pipe), "
        "val/dog/2.png (Pillow does not know its format)"
    )
    assert str(raised.value) == f"data.root={root}: {listed}; set data.bad=skip to leave them out"

    data = data_of(root, bad="skip")
    assert data.notes == (f"data.bad=skip: {listed}",)
    labels = [int(one) for _, batch in data.test_batches() for one in batch]
    assert labels == [0, 0, 0, 1, 1]
    assert sorted(data.calibration_indices(5)) == [1, 2, 3, 4, 5]
    names = [Path(data.splits.train.samples[i][0]).name for i in (1, 2, 3, 4, 5)]  # type: ignore[attr-defined]
    assert names == ["1.png", "2.png", "0.png", "1.png", "2.png"]


def test_a_class_without_a_readable_image_is_refused(tmp_path: Path) -> None:
    root = folder(tmp_path / "root", images=1)
    (root / "val/dog/0.png").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"images that can be read; test has none in 1 of its classes"):
        data_of(root, bad="skip")


def test_skipping_bad_files_moves_no_picture_and_no_label(tmp_path: Path) -> None:
    for index in range(8):
        (tmp_path / f"{index}.jpg").write_bytes(encoded("jpeg", index) if index != 2 else b"")
    for source in (pictures, one_picture_each):
        data = data_of(tmp_path, source, "skip")
        test = [Path(data.splits.test.samples[i][0]).name for i in data._test]  # type: ignore[attr-defined]
        train = [Path(data.splits.train.samples[i][0]).name for i in data._train]  # type: ignore[attr-defined]
        assert (train, test) == (["0.jpg", "4.jpg", "6.jpg"], ["1.jpg", "3.jpg", "5.jpg", "7.jpg"])
    assert [int(one) for _, batch in data.test_batches() for one in batch] == [1, 3, 5, 7]


def test_classes_and_files_match_torchvision_less_system_files(tmp_path: Path) -> None:
    root = folder(tmp_path / "root")
    for name in ("train/cat/A.JPG", "train/cat/b/c.JPEG", "train/cat/b.d/e.png", "val/dog/f.Png"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(encoded("png", seed=hash(name) % 1000))
    (root / "train/dog/more").symlink_to(root / "train/cat/b")
    plain = [ImageFolder(str(root / name)) for name in ("train", "val")]
    (root / "train/cat/loop").symlink_to(root / "train/cat")  # torchvision would list its files 40 times
    for name in ("train/cat/._A.JPG", "train/.DS_Store", "val/dog/Thumbs.db", "train/dog/README.txt"):
        (root / name).write_bytes(b"no image")
    for name in ("train/__MACOSX", "val/.ipynb_checkpoints"):
        (root / name).mkdir()
        (root / name / "x.jpg").write_bytes(b"no image")

    splits = image_folder(str(root), False, 0)

    assert splits.classes == tuple(plain[0].classes)
    assert [part.samples for part in (splits.train, splits.test)] == [part.samples for part in plain]  # type: ignore[attr-defined]
    assert list(splits.train.targets) == plain[0].targets
    (note,) = splits.notes
    assert note == "files and folders left out by name: 4 (._A.JPG, README.txt, Thumbs.db, loop)"


def test_images_of_both_splits_are_told(tmp_path: Path) -> None:
    root = folder(tmp_path / "root")
    whole = encoded("bmp", size=100)
    other = whole[:20_000] + bytes([whole[20_000] ^ 1]) + whole[20_001:]  # of the same size, start and end
    (root / "train/cat/large.bmp").write_bytes(whole)
    (root / "val/cat/large.bmp").write_bytes(other)
    assert data_of(root).notes == ()
    (root / "val/dog/large.bmp").write_bytes(whole)
    (root / "val/dog/2.png").write_bytes((root / "train/cat/1.png").read_bytes())
    (note,) = data_of(root).notes
    assert note == (
        "test images that are identical to training images: 2 of 8, "
        "val/dog/2.png (train/cat/1.png), val/dog/large.bmp (train/cat/large.bmp)"
    )


@pytest.fixture
def many(tmp_path: Path) -> list[str]:
    """Returns the paths of 2,000 images, enough for the survey to cache its results."""
    (tmp_path / "many").mkdir()
    content, paths = encoded("png", size=2), []
    for index in range(2000):
        paths.append(tmp_path / "many" / f"{index:04}.png")
        paths[-1].write_bytes(content + b"%d" % index)
    return [str(path) for path in paths]


def test_what_was_seen_is_not_read_again_until_it_changes(
    many: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = look_at(many)
    (kept,) = (tmp_path / "cache" / "qatkit").iterdir()
    read = list[object]()
    whole = Image.open

    def counted(stream: io.BytesIO) -> Image.Image:
        read.append(stream)
        return whole(stream)

    monkeypatch.setattr(Image, "open", counted)
    assert look_at(many) == first and read == []

    state = os.stat(many[7])
    Path(many[7]).write_bytes(bytes(state.st_size))
    os.utime(many[7], ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert [path for path, look in look_at(many).items() if look.reason] == [many[7]]
    assert len(read) == 1

    content = kept.read_bytes()
    for damaged in (b"", b"no cache", content[:-100], content[:100] + b"9" + content[101:]):
        kept.write_bytes(damaged)
        read.clear()
        assert len([path for path, look in look_at(many).items() if look.reason]) == 1
        assert len(read) == 2000 and kept.read_bytes() != damaged
    assert look_at(many[:1999])[many[0]] == first[many[0]]
