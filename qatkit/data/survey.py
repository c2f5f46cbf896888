"""The survey of image files before any long work; it finds unreadable files and files in both splits.

    paths ── stat ── seen before, unchanged? ─yes────────────────────────────────────┐
                └─ no: header, size, mode, end of the file ── suspect? ── decoded ───┴─> reason, or an image
    digests of both ends equal in train and test ── whole contents equal? ──> the same image in both

For most files, only the header and both ends are read. A truncated file still has an intact header, but JPEG,
PNG and GIF mark their end, and WebP and BMP declare their size. A file that ends otherwise is decoded at once,
because some cameras append data after the end and only a decoder can tell. In large folders, results for
readable files are cached by path, size and modification time.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import PIL
from PIL import Image

from qatkit.data.image_files import ImageFiles, printable
from qatkit.progress import shown
from qatkit_verify.errors import ConfigError
from qatkit_verify.files import cache_folder, write_text
from qatkit_verify.pictures import check_kind, check_mode, check_size, open_regular_file, reason

_END = 4096  # bytes at either end that distinguish files and contain the end mark of a format
_MANY = 2000  # files; with fewer, neither a progress bar nor a cache is worth it
_THREADS = 8  # to overlap reads from disk; a header takes the processor only 30 µs
_A_PART = 256  # files per task of a thread
_SHOWN = 5
_RULES = f"1 {PIL.__version__}"  # version of the rules and of Pillow on which cached results depend

T = TypeVar("T")


class Look(NamedTuple):
    """The result of checking a file.

    Attributes:
        reason: the reason why the file is not a readable image; "" if it is one.
        ends: a digest of the size, the first and the last bytes; "" if the file is not readable.
    """

    reason: str
    ends: str = ""


@dataclass(frozen=True)
class Survey:
    """The usable images of each split, and notes on the others.

    Attributes:
        train: indices of the readable training images.
        test: indices of the readable test images.
        ends: digests of training files (`Look.ends`), by index; empty if the training images are not files.
        notes: lines for the report.
    """

    train: list[int]
    test: list[int]
    ends: dict[int, str]
    notes: tuple[str, ...] = ()


def survey(train: object, test: object, bad: str, *, progress: bool = False) -> Survey:
    """Checks the files of two splits; all items of a split that is not an `ImageFiles` count as usable.

    Args:
        train, test: the datasets of the splits.
        bad: "refuse" or "skip", for files that are not readable images.
        progress: whether a progress bar is shown.

    Raises:
        ConfigError: a file is not a readable image and `bad` is "refuse", or no readable image is left in a
            split or in a class of a split that must be complete (`ImageFiles`).
    """
    parts = {name: one for name, one in (("train", train), ("test", test)) if isinstance(one, ImageFiles)}
    looks = look_at([path for part in parts.values() for path, _ in part.samples], progress=progress)
    unread, root = {path: one.reason for path, one in looks.items() if one.reason}, _root(list(looks))
    told = f"{len(unread)} of {len(looks)} files can't be read as images: {_listed(unread, root)}"
    if unread and bad == "refuse":
        advice = "; set data.bad=skip to leave them out" if len(unread) < len(looks) else ""
        raise ConfigError("data.root", root, reason=f"{told}{advice}")
    usable = {"train": list(range(len(train))), "test": list(range(len(test)))}  # type: ignore[arg-type]
    for name, part in parts.items():
        usable[name] = [i for i, (path, _) in enumerate(part.samples) if not looks[path].reason]
        _check_left(name, part, usable[name])
    notes = [f"data.bad=skip: {told}"] if unread else []
    if len(parts) == 2:
        same = _in_both(*({path: looks[path] for path, _ in part.samples} for part in parts.values()))
        told = f"test images that are identical to training images: {len(same)} of {len(usable['test'])}"
        twins = {path: printable(os.path.relpath(other, root)) for path, other in same.items()}
        notes += [f"{told}, {_listed(twins, root)}"] if same else []
    samples = parts["train"].samples if "train" in parts else []
    ends = {index: looks[path].ends for index, (path, _) in enumerate(samples)}
    return Survey(**usable, ends=ends, notes=tuple(notes))


def _listed(found: Mapping[str, str], root: str) -> str:
    """Returns the first paths with their values in `found` as text, and the number of other paths."""
    some = [f"{printable(os.path.relpath(path, root))} ({why})" for path, why in list(found.items())[:_SHOWN]]
    return ", ".join(some) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


def _check_left(name: str, part: ImageFiles, usable: Sequence[int]) -> None:
    gone = len(set(part.targets)) - len({part.targets[i] for i in usable})
    if not usable or (part.complete and gone):
        allowed = f"images that can be read; {name} has none" + (
            f" in {gone} of its classes" if usable else ""
        )
        raise ConfigError("data.root", _root([path for path, _ in part.samples]), allowed)


def look_at(paths: Sequence[str], *, progress: bool = False) -> dict[str, Look]:
    """Returns the result for each file, by path, from the cache if the file has not changed."""
    found, todo = dict[str, Look](), list[str]()
    kept, states = _Cache(paths), dict[str, tuple[int, int]]()
    for path in dict.fromkeys(paths):
        try:
            status = os.stat(path)
            check_kind(status.st_mode)
        except (OSError, ValueError) as error:
            found[path] = Look(_of_link(path, error))
            continue
        states[path] = status.st_size, status.st_mtime_ns
        ends = kept.ends(path, states[path])
        if ends is None:
            todo.append(path)
        else:
            found[path] = Look("", ends)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about large pictures, for which we have our own bound
        bar = progress and len(todo) >= _MANY
        found |= _each(_look, todo, "checking images", progress=bar)
    if len(todo) >= _MANY:
        kept.write({path: (*states[path], found[path].ends) for path in states if not found[path].reason})
    return {path: found[path] for path in paths}


def _of_link(path: str, error: Exception) -> str:
    """Returns the reason why a path does not lead to a readable file."""
    if isinstance(error, FileNotFoundError) and os.path.islink(path):
        return "a link to a missing file"
    return "a link to itself" if isinstance(error, OSError) and error.errno == errno.ELOOP else reason(error)


def _each(task: Callable[[str], T], paths: Sequence[str], title: str, *, progress: bool) -> dict[str, T]:
    """Returns the result of `task` for each path, on several threads."""
    found, pool = dict[str, T](), ThreadPoolExecutor(_THREADS)
    parts = [paths[i : i + _A_PART] for i in range(0, len(paths), _A_PART)]
    try:
        futures = [(pool.submit(lambda part: [task(one) for one in part], part), part) for part in parts]
        for future, part in shown(futures, title, progress, "files"):
            found.update(zip(part, future.result(), strict=True))
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C the remaining results are not needed
    return found


def _look(path: str) -> Look:
    """Checks the header and both ends of a file; decodes it if it does not end as its format requires."""
    try:
        with open_regular_file(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size == 0:
                return Look("empty")
            first = last = stream.read(_END)
            if size > _END:
                stream.seek(max(_END, size - _END))
                last = stream.read(_END)
            with Image.open(stream if size > _END else io.BytesIO(first)) as image:
                check_size(*image.size)
                check_mode(image.mode)
                if not _ends_well(image.format or "", first, last, size):
                    image.load()
    except Exception as error:  # damaged bytes may raise anything in Pillow's readers
        return Look(reason(error))
    return Look("", hashlib.blake2b(b"%d " % size + first + last, digest_size=16).hexdigest())


def _ends_well(kind: str, first: bytes, last: bytes, size: int) -> bool:
    """Returns whether a file ends as its format requires; False for formats that do not show it (TIFF, PPM)."""
    if kind in ("JPEG", "MPO"):
        return last.rstrip(b"\0\r\n").endswith(b"\xff\xd9")
    if kind == "PNG":
        return b"IEND\xaeB`\x82" in last
    if kind == "GIF":
        return last.rstrip(b"\0").endswith(b";")
    if kind == "WEBP":
        return int.from_bytes(first[4:8], "little") + 8 <= size
    return kind == "BMP" and int.from_bytes(first[2:6], "little") <= size


def _in_both(train: Mapping[str, Look], test: Mapping[str, Look]) -> dict[str, str]:
    """Returns, for each test file with the same bytes as a training file, that training file.

    Accuracy on such files means little.
    """
    seen = dict[str, list[str]]()
    for path, look in train.items():
        if not look.reason:
            seen.setdefault(look.ends, []).append(path)
    alike = {path: seen[look.ends] for path, look in test.items() if not look.reason and look.ends in seen}
    concerned = dict.fromkeys(path for own, others in alike.items() for path in (own, *others))
    contents = _each(_content, list(concerned), "comparing files", progress=False)
    same = (
        (path, [one for one in others if contents[one] == contents[path]]) for path, others in alike.items()
    )
    return {path: others[0] for path, others in same if others}


def _content(path: str) -> bytes:
    """Returns a digest of the contents of a file, or its path if it can no longer be read."""
    try:
        with open_regular_file(path) as stream:
            return hashlib.file_digest(stream, "sha256").digest()
    except (OSError, ValueError):
        return os.fsencode(path)


def _root(paths: Sequence[str]) -> str:
    """Returns the common folder of all paths."""
    folders = {os.path.dirname(path) for path in paths}
    return os.path.commonpath([os.path.abspath(folder) for folder in folders]) if folders else ""


class _Cache:
    """The cached results for a folder's readable files: {path: [size, modification time, digest of the ends]}.

    The first line of the file is the digest of the rest. A cache file that is damaged, missing or was written
    under other rules counts as empty.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.root, self.files = _root(paths), dict[str, tuple[int, int, str]]()
        if len(paths) >= _MANY:
            with suppress(OSError, RuntimeError, ValueError):
                digest, _, content = self._path().read_text("utf-8").partition("\n")
                self.files = json.loads(content) if digest == _digest(content) else {}

    def _path(self) -> Path:
        name = hashlib.sha256(self.root.encode(errors="surrogateescape")).hexdigest()[:16]
        return cache_folder() / f"images-{name}.json"

    def ends(self, path: str, state: tuple[int, int]) -> str | None:
        """Returns the cached digest of a file's ends if `state` (size, modification time) is unchanged; else None."""
        size, changed, ends = self.files.get(path, (None, None, ""))
        return ends if (size, changed) == state else None

    def write(self, files: Mapping[str, tuple[int, int, str]]) -> None:
        """Writes `files`; if this fails, they are checked again in the next run."""
        content = json.dumps(files, separators=(",", ":"))
        with suppress(OSError, RuntimeError):
            path = self._path()
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, f"{_digest(content)}\n{content}")


def _digest(content: str) -> str:
    return hashlib.sha256(f"{_RULES}\n{content}".encode()).hexdigest()
