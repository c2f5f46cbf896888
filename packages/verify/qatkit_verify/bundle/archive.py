"""Writes a bundle to a zip, and reads one from a folder or a zip. The same files give the same zip.

Entries of a zip are uncompressed, have a fixed date and are sorted by name. A zip from others may name files
outside its folder, contain links, or unpack to a thousand times its size. So no zip is trusted: each is
checked before anything is unpacked.
"""

from __future__ import annotations

import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qatkit_verify.bundle.manifest import MANIFEST, check_name
from qatkit_verify.errors import ConfigError
from qatkit_verify.files import whole

_DATE = (1980, 1, 1, 0, 0, 0)
_MODE = 0o644
_FILES, _BYTES, _RATIO = (
    4096,
    16 * 2**30,
    200,
)  # limits of an archive: files, unpacked bytes, ratio of unpacked to packed bytes
_BLOCK = 1 << 20


def write_zip(folder: Path, path: Path) -> None:
    """Writes every file of `folder` to a zip. The zip is written completely or not at all."""
    with whole(path) as new, zipfile.ZipFile(new, "w", zipfile.ZIP_STORED) as archive:
        for file in sorted(one for one in folder.rglob("*") if one.is_file()):
            told = zipfile.ZipInfo(file.relative_to(folder).as_posix(), _DATE)
            told.create_system, told.external_attr = 3, (stat.S_IFREG | _MODE) << 16
            with (
                file.open("rb") as source,
                archive.open(told, "w", force_zip64=file.stat().st_size > 2**31) as sink,
            ):
                shutil.copyfileobj(source, sink, _BLOCK)


@contextmanager
def unpacked_bundle(path: str | Path) -> Iterator[Path]:
    """Yields the folder of a bundle: the given one, or a temporary one into which the zip is unpacked.

    Raises:
        ConfigError: `path` is neither a bundle's folder nor a zip, or the zip is damaged, unsafe to unpack,
            or not a bundle.
    """
    given = Path(path)
    if given.is_dir():
        if not (given / MANIFEST).is_file():
            raise ConfigError("bundle", path, f"a bundle that contains {MANIFEST}")
        yield given
        return
    if not given.is_file():
        raise ConfigError("bundle", path, "an existing folder or zip file")
    with tempfile.TemporaryDirectory(prefix="qatkit-bundle-") as folder:
        _unpack(given, Path(folder))
        yield Path(folder)


def _unpack(path: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            _check(path, entries)
            for told in entries:
                target = folder / told.filename
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(told) as source, target.open("xb") as sink:
                    shutil.copyfileobj(source, sink, _BLOCK)
    except (
        zipfile.BadZipFile,
        EOFError,
        NotImplementedError,
        RuntimeError,
        ValueError,
        FileExistsError,
        zlib.error,
    ) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("bundle", path, reason=f"the file is damaged or is not a zip ({error})") from error


def _check(path: Path, entries: list[zipfile.ZipInfo]) -> None:
    """Raises ConfigError for a zip that is not a bundle or is unsafe to unpack."""
    names = [told.filename for told in entries]
    if len(names) > _FILES or sum(told.file_size for told in entries) > _BYTES:
        raise ConfigError(
            "bundle", path, f"a zip of at most {_FILES:,} files and {_BYTES >> 30} GiB unpacked"
        )
    if len({name.lower() for name in names}) != len(names):
        raise ConfigError("bundle", path, "a zip that contains each file once")
    for told in entries:
        kind = stat.S_IFMT(told.external_attr >> 16)
        try:
            check_name(told.filename)
        except ValueError as error:
            raise ConfigError("bundle", path, f"a zip whose files stay in its folder ({error})") from error
        if kind not in (0, stat.S_IFREG):
            raise ConfigError(
                "bundle", path, f"a zip of regular files; {told.filename} is a link or a device"
            )
        if told.file_size > _RATIO * max(told.compress_size, 1):
            raise ConfigError(
                "bundle",
                path,
                f"a zip with files of plausible sizes; {told.filename} unpacks to {told.file_size:,} bytes",
            )
    if MANIFEST not in names:
        raise ConfigError("bundle", path, f"a bundle that contains {MANIFEST}")
