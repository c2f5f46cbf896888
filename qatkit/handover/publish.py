"""Where bundles go: PLACE/NAME/VERSION in a folder or an object store, whole or not there, never over another.

    check(place, name, version)              before a run: can it be written to, is the version free
    publish(bundle, place, name, version)    after it

A folder is copied beside its place and renamed. An object store has no renaming of many files at once, so

    NAME/.publishing/VERSION    is made first, where it is not there yet: who publishes which bundle
    NAME/VERSION/*              then every file but
    NAME/VERSION/manifest.json  the last one, where it is not there yet; then the first one goes

and whoever looks for manifest.json never sees half a bundle. What a kill leaves is taken up by whoever publishes the
same bundle again, and removed by whoever publishes another one of that name, once its process is gone (for a process of
another machine: after six hours). Without a version of its own a bundle's is the beginning of its manifest's SHA-256:
the same bundle has the same place, and to publish it twice changes nothing. A zip lies beside its manifest, which is in
the clear for an encrypted one too: so it stays the same bundle, however often it is encrypted again.
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

_CLAIMS = ".publishing"
_LEASE = 6 * 3600  # seconds
_VERSION_DIGITS = 12
_NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
# A store that does not answer is said to be so in seconds, not after a library's minutes of patience.
_PATIENCE = {"connect_timeout": 5, "read_timeout": 60, "retries": {"max_attempts": 3}}
KEY = "export.publish"
T = TypeVar("T")


def check(place: str, name: str, version: str | None) -> None:
    """Whether bundles can go there; nothing stays of the trial.

    Args:
        place: a folder, or a URL of fsspec's (s3://bucket/prefix).
        name: of the bundle.
        version: of the bundle; None: known once it is written.

    Raises:
        ConfigError: it can't be written to, its library is not installed, or the version is there already.
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
    """Puts a bundle, a folder or a zip of one, encrypted or not, into its place; returns where that is.

    Raises:
        ConfigError: as `check`; another bundle of that version is there, or being published; or the key is another.
        ValueError: it has no manifest.
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
            allowed = "letters, digits, dots, dashes, underscores and plus signs, with export.publish: a folder's name"
            raise ConfigError(key, value, allowed)


def _files(bundle: Path, folder: Path) -> dict[str, Path]:
    """What is published, by its name below the version; `folder` is for what has to be unpacked."""
    if bundle.is_file():
        try:
            with readable(bundle) as plain, zipfile.ZipFile(plain) as archive:
                (folder / MANIFEST).write_bytes(archive.read(MANIFEST))
        except (KeyError, zipfile.BadZipFile) as error:
            raise ValueError(f"{bundle}: no bundle ({first_line(error)})") from error
        return {bundle.name: bundle, MANIFEST: folder / MANIFEST}
    found = sorted(path for path in bundle.rglob("*") if path.is_file())
    files = {path.relative_to(bundle).as_posix(): path for path in found}
    if MANIFEST not in files:
        raise ValueError(f"{bundle}: no bundle (it has no {MANIFEST})")
    return files


def _folder_of(place: str) -> Path | None:
    """The folder that is meant, where it is one of this machine's."""
    scheme, found, rest = place.partition("://")
    if not found:
        return Path(place)
    return Path(rest) if scheme in ("file", "local") else None


def _taken(version: str, where: str) -> ConfigError:
    allowed = f"a version that is not in {where} yet: what is published stays as it is"
    return ConfigError("export.version", version, allowed)


def _into_folder(files: Mapping[str, Path], folder: Path, version: str, manifest: bytes) -> str:
    """Copied under a hidden name, then renamed: which fails where something is."""
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
                    os.fsync(copy.fileno())  # else a name could reach the disk before its bytes
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
    """Fsspec's file system for a URL, and the path in it."""
    import fsspec  # no part of what mistakes cost

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
        allowed = f"a folder, or a store whose library is installed (s3: uv sync --extra publish): {first_line(error)}"
        raise ConfigError(KEY, place, allowed) from error
    except ValueError as error:
        allowed = f"a folder, or a URL such as s3://bucket/prefix ({first_line(error)})"
        raise ConfigError(KEY, place, allowed) from error
    if not base.strip("/"):
        raise ConfigError(KEY, place, "a URL with a bucket, such as s3://bucket/prefix")
    return store, base.rstrip("/")


def _asked(place: str, question: Callable[[], T]) -> T:
    """What a store answers; its refusals, in whatever library, are one line.

    Raises:
        ConfigError: it does not answer, or refuses.
    """
    try:
        return question()
    except ConfigError:
        raise
    except Exception as error:  # of botocore, aiohttp, the operating system
        reason = first_line(error) or type(error).__name__
        raise ConfigError(
            KEY, place, f"a store that can be reached and takes files ({reason[:200]})"
        ) from error


class _Upload:
    """One bundle on its way into an object store."""

    def __init__(self, store: Any, base: str, version: str, manifest: bytes, place: str) -> None:
        self.store, self.base, self.version, self.manifest, self.place = store, base, version, manifest, place
        self.target, self.claim = f"{base}/{version}", f"{base}/{_CLAIMS}/{version}"
        self.digest = hashlib.sha256(manifest).hexdigest()

    def run(self, files: Mapping[str, Path]) -> None:
        """Claims the version, uploads, and says last that it is there."""
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
                    raise OSError(f"{name} did not arrive whole")
        if self._read(self.claim) != mine:
            raise self._at_work()
        with suppress(FileExistsError):
            self.store.pipe_file(f"{self.target}/{MANIFEST}", self.manifest, mode="create")
        if not self._published():
            raise _taken(self.version, self._where())
        self._remove(self.claim)

    def _published(self) -> bool:
        """Whether this very bundle is there.

        Raises:
            ConfigError: another one is.
        """
        there = self._read(f"{self.target}/{MANIFEST}")
        if there is not None and there != self.manifest:
            raise _taken(self.version, self._where())
        return there is not None

    def _claimed(self) -> bytes:
        """Makes the claim, or takes up one of the same bundle; returns what it says."""
        told = {"manifest": self.digest, "host": platform.node(), "process": os.getpid(), "time": time.time()}
        mine = json.dumps(told).encode()
        try:
            self.store.pipe_file(self.claim, mine, mode="create")
        except Exception:  # how a store says that it is there depends on the store
            other = self._read(self.claim)
            if other is None:
                raise
            if _told(other).get("manifest") != self.digest:
                raise self._at_work() from None
            return other  # the same bundle, whoever is first
        return mine

    def _clear(self) -> None:
        """Removes what publishers that are gone have left of other bundles."""
        for claim in self.store.find(f"{self.base}/{_CLAIMS}"):
            version, told = claim.rpartition("/")[2], _told(self._read(claim) or b"")
            if version.startswith("trial-") or told.get("manifest") == self.digest or not _gone(told):
                continue
            if not self.store.exists(f"{self.base}/{version}/{MANIFEST}"):
                for path in self.store.find(f"{self.base}/{version}"):
                    self._remove(path)
            self._remove(claim)

    def _there(self) -> list[str]:
        """What lies below the version already."""
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
        who = f"process {told.get('process')} on {told.get('host')}"
        allowed = f"a version that nobody else is publishing in {self._where()} ({who} is)"
        return ConfigError("export.version", self.version, allowed)


def _told(claim: bytes) -> dict[str, Any]:
    try:
        told = json.loads(claim)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _gone(told: Mapping[str, Any]) -> bool:
    """Whether the publisher that a claim tells of has ended; of another machine, whether it must have."""
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
    """`python -m qatkit.handover.publish BUNDLE PLACE --name NAME`: after a run whose store was not there."""
    parser = argparse.ArgumentParser(
        "python -m qatkit.handover.publish", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("bundle", type=Path, help="a run's bundle: a folder, a zip, or an encrypted zip")
    parser.add_argument("place", help="a folder, or a URL such as s3://bucket/prefix")
    parser.add_argument("--name", required=True)
    parser.add_argument("--version")
    parser.add_argument("--key", help="of an encrypted bundle: its key file, which stays here")
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
