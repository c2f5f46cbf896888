"""Publishes bundles at PLACE/NAME/VERSION in a folder or an object store.

A bundle is published completely or not at all, and an existing version is never overwritten.

    check(place, name, version)              before a run: checks that the place is writable and the version is free
    publish(bundle, place, name, version)    after the run: publishes the bundle

In a folder, a bundle is copied under a hidden name and then renamed. An object store cannot rename many files
together, so the manifest, which is written last, makes the bundle visible:

    NAME/.publishing/VERSION    first, unless it exists: a claim that says who publishes which bundle
    NAME/VERSION/*              then every file except the manifest
    NAME/VERSION/manifest.json  last, unless it exists; then the claim is removed

A reader that looks for manifest.json never sees an incomplete bundle. The files that a killed process leaves
are completed when the same bundle is published again. They are removed when another bundle of that name is
published after the process has ended (for a process on another machine, after six hours).

Without a given version, the version is the beginning of the manifest's SHA-256. The same bundle therefore has
the same place, and publishing it twice changes nothing. A zip is stored next to its manifest, which is not
encrypted even if the zip is. The zip thus remains the same bundle, even if it is encrypted again.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from qatkit.encryption.vault import protected, readable
from qatkit_verify.bundle.manifest import MANIFEST
from qatkit_verify.errors import ConfigError, first_line
from qatkit_verify.files import clear_parts, not_writable, unfinished
from qatkit_verify.installed import install_extra

_CLAIMS = ".publishing"
_LEASE = 6 * 3600  # seconds
_VERSION_DIGITS = 12
_NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
# A store that does not answer is reported within seconds, not after minutes of a library's retries.
_PATIENCE = {"connect_timeout": 5, "read_timeout": 60, "retries": {"max_attempts": 3}}
KEY = "export.publish"
T = TypeVar("T")


def check(place: str, name: str, version: str | None) -> None:
    """Checks that bundles can be published at a place, without leaving files there.

    Args:
        place: a folder, or a URL for fsspec (s3://bucket/prefix).
        name: the name of the bundle.
        version: the version of the bundle; None if it is known only after the bundle is written.

    Raises:
        ConfigError: the name or version is not a valid folder name, the place is not writable or not a valid URL, its
            library is not installed, or the version exists already.
    """
    _check_names(name, version)
    folder = _folder_of(place)
    if folder is not None:
        if reason := not_writable(folder) or not_writable(folder / name):
            raise ConfigError(KEY, place, f"a folder that can be written to ({reason})")
        if version is not None and os.path.lexists(folder / name / version):
            raise _taken(version, f"{folder / name}")
        return
    store, base = _store(place)
    trial = f"{base}/{name}/{_CLAIMS}/trial-{secrets.token_hex(4)}"

    def write() -> bool:
        store.pipe_file(trial, b"")
        store.rm_file(trial)
        return version is not None and bool(store.exists(f"{base}/{name}/{version}/{MANIFEST}"))

    if _asked(place, write):
        raise _taken(str(version), f"{place.rstrip('/')}/{name}")


def publish(bundle: Path, place: str, name: str, version: str | None = None) -> str:
    """Publishes a bundle (a folder or a zip, encrypted or not) and returns its path or URL.

    Raises:
        ConfigError: the name or version is not a valid folder name, the store cannot be used, another bundle of
            that version exists or is being published, or the key of an encrypted zip is wrong.
        OSError: files in the folder cannot be written.
        ValueError: the bundle has no manifest, or the file is not a zip.
    """
    _check_names(name, version)
    with tempfile.TemporaryDirectory(prefix="qatkit-") as folder:
        files = _files(bundle, Path(folder))
        manifest = files[MANIFEST].read_bytes()
        version = version or hashlib.sha256(manifest).hexdigest()[:_VERSION_DIGITS]
        there = _folder_of(place)
        if there is not None:
            return _into_folder(files, there / name, version, manifest)
        store, base = _store(place)
        upload = _Upload(store, f"{base}/{name}", version, manifest, place)
        _asked(place, lambda: upload.run(files))
        return f"{place.rstrip('/')}/{name}/{version}"


def _check_names(name: str, version: str | None) -> None:
    for key, value in (("name", name), ("export.version", version)):
        if value is not None and not _NAMES.fullmatch(value):
            signs = "up to 128 letters, digits, dots, dashes, underscores and plus signs"
            allowed = f"a folder name with export.publish: {signs}, starting with a letter or digit"
            raise ConfigError(key, value, allowed)


def _files(bundle: Path, folder: Path) -> dict[str, Path]:
    """Returns the files to publish by their paths in the version's folder; a zip's manifest is unpacked to `folder`."""
    if bundle.is_file():
        try:
            with readable(bundle) as plain, zipfile.ZipFile(plain) as archive:
                (folder / MANIFEST).write_bytes(archive.read(MANIFEST))
        except (KeyError, zipfile.BadZipFile) as error:
            raise ValueError(f"{bundle}: not a bundle ({first_line(error)})") from error
        return {bundle.name: bundle, MANIFEST: folder / MANIFEST}
    found = sorted(path for path in bundle.rglob("*") if path.is_file())
    files = {path.relative_to(bundle).as_posix(): path for path in found}
    if MANIFEST not in files:
        raise ValueError(f"{bundle}: not a bundle (it has no {MANIFEST})")
    return files


def _folder_of(place: str) -> Path | None:
    """Returns the folder of a place on this machine; None for a store."""
    scheme, found, rest = place.partition("://")
    if not found:
        return Path(place)
    return Path(rest) if scheme in ("file", "local") else None


def _taken(version: str, where: str) -> ConfigError:
    allowed = f"a version that does not exist in {where}; published versions are never replaced"
    return ConfigError("export.version", version, allowed)


def _into_folder(files: Mapping[str, Path], folder: Path, version: str, manifest: bytes) -> str:
    """Copies the files to a hidden folder, then renames it; an existing target must contain the same bundle."""
    target = folder / version
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clear_parts(folder)
        part = unfinished(target)
        try:
            for name, path in files.items():
                (part / name).parent.mkdir(parents=True, exist_ok=True)
                with path.open("rb") as source, (part / name).open("xb") as copy:
                    shutil.copyfileobj(source, copy)
                    copy.flush()
                    os.fsync(copy.fileno())  # otherwise a name could be on the disk before its content
            os.rename(part, target)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        if not _same(target / MANIFEST, manifest):
            raise _taken(version, str(folder)) from error
    return str(target)


def _same(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except OSError:
        return False


def _store(place: str) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL, and the path in it."""
    import fsspec  # imported late, so that mistakes are reported quickly

    host = place.partition("://")[2].partition("/")[0]
    if "@" in host:
        shown = place.replace(host, "***" + host[host.rindex("@") :])
        raise ConfigError(KEY, shown, "a URL without credentials, which belong in the environment (AWS_...)")
    settings: dict[str, Any] = {"config_kwargs": _PATIENCE} if place.startswith(("s3:", "s3a:")) else {}
    try:
        store, base = fsspec.core.url_to_fs(
            place, use_listings_cache=False, skip_instance_cache=True, **settings
        )
    except ImportError as error:
        installing = install_extra("publish")
        known = f"a folder, or a store whose library is installed (for s3: {installing})"
        allowed = f"{known}; {first_line(error)}"
        raise ConfigError(KEY, place, allowed) from error
    except ValueError as error:
        allowed = f"a folder, or a URL such as s3://bucket/prefix ({first_line(error)})"
        raise ConfigError(KEY, place, allowed) from error
    if not base.strip("/"):
        raise ConfigError(KEY, place, "a URL with a bucket, such as s3://bucket/prefix")
    return store, base.rstrip("/")


def _asked(place: str, question: Callable[[], T]) -> T:
    """Returns the answer of a store; an error of any library becomes a one-line ConfigError.

    Raises:
        ConfigError: the store does not answer, or it refuses the request.
    """
    try:
        return question()
    except ConfigError:
        raise
    except Exception as error:  # errors of botocore, aiohttp or the operating system
        reason = first_line(error) or type(error).__name__
        raise ConfigError(
            KEY, place, reason=f"the store cannot be reached or refuses the request ({reason[:200]})"
        ) from error


class _Upload:
    """The upload of one bundle into an object store."""

    def __init__(self, store: Any, base: str, version: str, manifest: bytes, place: str) -> None:
        self.store, self.base, self.version, self.manifest, self.place = store, base, version, manifest, place
        self.target, self.claim = f"{base}/{version}", f"{base}/{_CLAIMS}/{version}"
        self.digest = hashlib.sha256(manifest).hexdigest()

    def run(self, files: Mapping[str, Path]) -> None:
        """Claims the version, uploads the files, and writes the manifest last."""
        self._clear()
        if self._published():
            return
        mine = self._claimed()
        for name in sorted(set(self._there()) - set(files)):
            self.store.rm_file(f"{self.target}/{name}")
        for name, path in files.items():
            if name != MANIFEST:
                self.store.put_file(str(path), f"{self.target}/{name}")
                if self.store.size(f"{self.target}/{name}") != path.stat().st_size:
                    reason = (
                        f"the store holds only a part of {name} after the upload; publish the bundle again"
                    )
                    raise ConfigError(KEY, self.place, reason=reason)
        if self._read(self.claim) != mine:
            raise self._at_work()
        with suppress(FileExistsError):
            self.store.pipe_file(f"{self.target}/{MANIFEST}", self.manifest, mode="create")
        if not self._published():
            raise _taken(self.version, self._where())
        self._remove(self.claim)

    def _published(self) -> bool:
        """Returns whether exactly this bundle is published.

        Raises:
            ConfigError: another bundle has this version.
        """
        there = self._read(f"{self.target}/{MANIFEST}")
        if there is not None and there != self.manifest:
            raise _taken(self.version, self._where())
        return there is not None

    def _claimed(self) -> bytes:
        """Creates the claim, or takes over an existing one for the same bundle; returns its content."""
        told = {"manifest": self.digest, "host": platform.node(), "process": os.getpid(), "time": time.time()}
        mine = json.dumps(told).encode()
        try:
            self.store.pipe_file(self.claim, mine, mode="create")
        except Exception:  # stores report an existing file in different ways
            other = self._read(self.claim)
            if other is None:
                raise
            if _told(other).get("manifest") != self.digest:
                raise self._at_work() from None
            return other  # the same bundle, whichever publisher is first
        return mine

    def _clear(self) -> None:
        """Removes the files that killed publishers of other bundles have left."""
        for claim in self.store.find(f"{self.base}/{_CLAIMS}"):
            version, told = claim.rpartition("/")[2], _told(self._read(claim) or b"")
            if version.startswith("trial-") or told.get("manifest") == self.digest or not _gone(told):
                continue
            if not self.store.exists(f"{self.base}/{version}/{MANIFEST}"):
                for path in self.store.find(f"{self.base}/{version}"):
                    self._remove(path)
            self._remove(claim)

    def _there(self) -> list[str]:
        """Returns the files in the folder of the version."""
        return [path.split(f"{self.target}/", 1)[-1] for path in self.store.find(self.target)]

    def _read(self, path: str) -> bytes | None:
        try:
            return bytes(self.store.cat_file(path))
        except FileNotFoundError:
            return None

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self.store.rm_file(path)

    def _where(self) -> str:
        return f"{self.place.rstrip('/')}/{self.base.rpartition('/')[2]}"

    def _at_work(self) -> ConfigError:
        told = _told(self._read(self.claim) or b"")
        who = f"process {told.get('process')} on {told.get('host')}" if told else "another process"
        reason = (
            f"{who} is publishing this version in {self._where()}; wait for its end or choose another version"
        )
        return ConfigError("export.version", self.version, reason=reason)


def _told(claim: bytes) -> dict[str, Any]:
    try:
        told = json.loads(claim)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _gone(told: Mapping[str, Any]) -> bool:
    """Returns whether the publisher of a claim has ended.

    A process on another machine, or on Windows, counts as ended if the claim is older than six hours.

    A claim that cannot be read counts as ended.
    """
    process, since = told.get("process"), told.get("time")
    if not isinstance(process, int) or not isinstance(since, int | float):
        return True
    if told.get("host") != platform.node() or os.name != "posix":
        return time.time() - since > _LEASE
    try:
        os.kill(process, 0)
    except PermissionError:
        return False
    except (OSError, OverflowError):
        return True
    return False


def main(typed: Sequence[str] | None = None) -> int:
    """Runs `python -m qatkit.handover.publish BUNDLE PLACE --name NAME`, and returns the exit status.

    It publishes the bundle of a finished run that could not reach its store.
    """
    parser = argparse.ArgumentParser(
        "python -m qatkit.handover.publish", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("bundle", type=Path, help="a run's bundle: a folder, a zip, or an encrypted zip")
    parser.add_argument("place", help="a folder, or a URL such as s3://bucket/prefix")
    parser.add_argument("--name", required=True, help="name of the bundle at the place")
    parser.add_argument("--version", help="version of the bundle (default: start of the manifest's SHA-256)")
    parser.add_argument("--key", help="key file of an encrypted bundle; it is not published")
    given = parser.parse_args(typed)
    try:
        with protected(given.key):
            print(publish(given.bundle, given.place, given.name, given.version))
    except (ConfigError, OSError, ValueError) as error:
        print(f"error: {first_line(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
