"""Tests of published bundles: complete or absent, and never overwritten, even if the publisher is killed."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from command_line import ROOT

from qatkit.encryption.cipher import decrypt, encrypt, new_key, read_key
from qatkit.encryption.memory import _file_system
from qatkit.encryption.vault import protected
from qatkit.handover.publish import check, main, publish
from qatkit_verify.errors import ConfigError

PLACES = ["folder", "memory"]


def a_bundle(folder: Path, content: str = "one") -> Path:
    """Returns a minimal bundle: a folder with a few files and a manifest."""
    (folder / "demo").mkdir(parents=True)
    (folder / "model.onnx").write_text(content * 1000)
    (folder / "demo" / "page.js").write_text("1")
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "of": content}))
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def published(place: str, below: str) -> dict[str, bytes]:
    """Returns the contents of all files below a path of a store, by relative path."""
    store, base = fsspec.core.url_to_fs(place, use_listings_cache=False, skip_instance_cache=True)
    base = f"{base.rstrip('/')}/{below}"
    return {path.split(f"{base}/", 1)[1]: store.cat_file(path) for path in store.find(base)}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "published")
        return
    yield "memory://published"
    fsspec.filesystem("memory").store.clear()


def test_a_bundle_arrives_as_it_is(place: str, tmp_path: Path) -> None:
    bundle = a_bundle(tmp_path / "bundle")
    check(place, "net", "1.0")
    assert publish(bundle, place, "net", "1.0") == f"{place}/net/1.0"
    assert published(place, "net/1.0") == files_of(bundle)
    assert set(published(place, "net")) == {
        f"1.0/{name}" for name in files_of(bundle)
    }  # no temporary files are left


def test_an_unversioned_bundle_is_published_once_by_its_digest(place: str, tmp_path: Path) -> None:
    bundle = a_bundle(tmp_path / "bundle")
    digest = hashlib.sha256((bundle / "manifest.json").read_bytes()).hexdigest()
    assert publish(bundle, place, "net") == publish(bundle, place, "net") == f"{place}/net/{digest[:12]}"
    publish(a_bundle(tmp_path / "other", "two"), place, "net")
    assert len({path.split("/")[0] for path in published(place, "net")}) == 2


def zipped(bundle: Path, target: Path) -> Path:
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in files_of(bundle).items():
            archive.writestr(name, content)
    return target


def test_a_zip_lies_beside_its_manifest(place: str, tmp_path: Path) -> None:
    bundle = a_bundle(tmp_path / "bundle")
    publish(zipped(bundle, tmp_path / "bundle.zip"), place, "net", "1")
    there = published(place, "net/1")
    assert there == {
        "bundle.zip": (tmp_path / "bundle.zip").read_bytes(),
        "manifest.json": (bundle / "manifest.json").read_bytes(),
    }


@pytest.mark.skipif(_file_system(Path("/dev/shm")) != "tmpfs", reason="/dev/shm is no tmpfs")
class TestEncrypted:
    """Tests of encrypted bundles, which need the package `cryptography`."""

    @pytest.fixture(autouse=True)
    def keys(self, tmp_path: Path) -> None:
        pytest.importorskip("cryptography", reason="the extra sign is not installed")
        for name in ("key", "other"):
            new_key(tmp_path / name)

    def sealed(self, folder: Path, name: str, content: str = "one") -> Path:
        """Writes a bundle, its zip and its encrypted zip, and returns the path of the last."""
        bundle = a_bundle(folder / name, content)
        plain, target = zipped(bundle, folder / f"{name}.zip"), folder / f"{name}.zip.encrypted"
        encrypt(plain, target, read_key(str(folder / "key")))
        return target

    def typed(self, place: str, bundle: Path, key: str = "key") -> int:
        return main([str(bundle), place, "--name", "net", "--key", str(bundle.with_name(key))])

    def test_it_is_stored_with_its_manifest_and_opens_with_its_key(self, place: str, tmp_path: Path) -> None:
        file = self.sealed(tmp_path, "bundle")
        manifest = (tmp_path / "bundle" / "manifest.json").read_bytes()
        assert self.typed(place, file) == 0
        version = hashlib.sha256(manifest).hexdigest()[:12]
        there = published(place, f"net/{version}")
        assert there == {file.name: file.read_bytes(), "manifest.json": manifest}
        (tmp_path / "there").write_bytes(there[file.name])
        decrypt(tmp_path / "there", tmp_path / "plain.zip", read_key(str(tmp_path / "key")))
        assert (tmp_path / "plain.zip").read_bytes() == (tmp_path / "bundle.zip").read_bytes()

    def test_reencrypted_it_is_published_once_and_never_overwritten(self, place: str, tmp_path: Path) -> None:
        file = self.sealed(tmp_path, "bundle")
        with protected(str(tmp_path / "key")):
            publish(file, place, "net", "1")
            before = published(place, "net")
            encrypt(tmp_path / "bundle.zip", file, read_key(str(tmp_path / "key")))
            assert file.read_bytes() != before[f"1/{file.name}"]
            publish(file, place, "net", "1")
            with pytest.raises(
                ConfigError, match=r"export\.version=1: expected a version that does not exist in"
            ):
                publish(self.sealed(tmp_path, "other_bundle", "two"), place, "net", "1")
        assert published(place, "net") == before

    def test_without_its_key_it_goes_nowhere(
        self, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = self.sealed(tmp_path, "bundle")
        assert self.typed(place, file, "other") == 2
        assert main([str(file), place, "--name", "net"]) == 2
        told = capsys.readouterr().err.splitlines()
        assert len(told) == 2 and all("the key that" in line for line in told)
        assert not published(place, "net")


def test_nothing_goes_over_another_version(place: str, tmp_path: Path) -> None:
    publish(a_bundle(tmp_path / "one"), place, "net", "1")
    before = published(place, "net")
    with pytest.raises(ConfigError, match=r"export\.version=1: expected a version that does not exist in"):
        check(place, "net", "1")
    with pytest.raises(ConfigError, match=r"export\.version=1: expected a version that does not exist in"):
        publish(a_bundle(tmp_path / "two", "two"), place, "net", "1")
    assert published(place, "net") == before
    publish(tmp_path / "one", place, "net", "1")  # the identical bundle is there already
    assert published(place, "net") == before


@pytest.mark.parametrize(
    ("place", "name", "version", "told"),
    [
        ("s3://me:secret@bucket/x", "net", None, "without credentials"),
        ("nothing://bucket/x", "net", None, "Protocol not known"),
        ("s3://", "net", None, r"with a bucket|library is installed"),
        (
            "memory://published",
            "net",
            "../up",
            r"export\.version=\.\./up: expected a folder name with export",
        ),
        ("memory://published", "a/b", None, "name=a/b: expected a folder name with export"),
        (
            "memory://published",
            "net",
            "",
            r"export\.version=: expected a folder name with export",
        ),
        ("/proc/nothing", "net", None, "a folder that can be written to"),
        ("/dev/null/x", "net", None, "a folder that can be written to"),
    ],
)
def test_a_place_that_takes_nothing_is_one_line(
    place: str, name: str, version: str | None, told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        check(place, name, version)
    assert "secret" not in str(raised.value) and "\n" not in str(raised.value)


def test_what_is_no_bundle_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.zip").write_bytes(b"no zip")
    for bundle in ("empty", "a.zip", "nowhere"):
        assert main([str(tmp_path / bundle), str(tmp_path / "place"), "--name", "net"]) == 2
        assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "place").exists()


# Kills the publisher at the start of its Nth step with SIGKILL, which cannot be caught.
_KILLED = """
import os, signal, sys
from pathlib import Path
import qatkit.handover.publish as publish
steps, last = 0, int(sys.argv[1])
def counted(call):
    def step(*a, **k):
        global steps
        steps += 1
        if steps > last:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*a, **k)
    return step
if "://" in sys.argv[3]:
    import s3fs
    for name in ("put_file", "pipe_file", "rm_file"):
        setattr(s3fs.S3FileSystem, name, counted(getattr(s3fs.S3FileSystem, name)))
else:
    publish.shutil.copyfileobj = counted(publish.shutil.copyfileobj)
    publish.os.rename = counted(publish.os.rename)
publish.publish(Path(sys.argv[2]), sys.argv[3], "net", sys.argv[4] or None)
"""


def killed_at(step: int, bundle: Path, place: str, version: str) -> bool:
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(step), str(bundle), place, version], check=False, cwd=ROOT
    )
    assert done.returncode in (0, -signal.SIGKILL)
    return done.returncode != 0


def test_a_kill_leaves_nothing_that_looks_finished_in_a_folder(tmp_path: Path) -> None:
    one, two = a_bundle(tmp_path / "one"), a_bundle(tmp_path / "two", "two")
    place, step = tmp_path / "published", 0
    while killed_at(step, one, str(place), "1"):
        assert not (place / "net" / "1").exists() and not [
            path for path in (place / "net").glob("[!.]*") if path.is_dir()
        ]
        step += 1
    assert step == 4  # three files and the rename
    assert files_of(place / "net" / "1") == files_of(one)
    assert killed_at(2, two, str(place), "2")
    publish(two, str(place), "net", "3")
    assert {path.name for path in (place / "net").iterdir()} == {"1", "3"}  # no leftovers of version 2


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """Yields the URL of a bucket on a local Moto server."""
    for needed in ("moto", "s3fs", "boto3", "flask"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"no {needed}: pip install 'moto[server]' s3fs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], stderr=subprocess.DEVNULL
    )
    told = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1"}  # fmt: skip
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        end = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < end and server.poll() is None
            time.sleep(0.1)
        import boto3

        boto3.client("s3").create_bucket(Bucket="bundles")
        yield "s3://bundles/team"
    finally:
        server.terminate()
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})


@pytest.mark.slow
def test_a_kill_leaves_nothing_that_looks_finished_in_a_store(s3: str, tmp_path: Path) -> None:
    one, two = a_bundle(tmp_path / "one"), a_bundle(tmp_path / "two", "two")
    step = 0
    while killed_at(step, one, s3, "1"):
        finished = "1/manifest.json" in published(s3, "net")
        assert finished == (step == 4)  # killed before the claim is removed, which is the last step
        if finished:
            break
        step += 1
    assert published(s3, "net/1") == files_of(one)
    publish(one, s3, "net", "1")
    # Publishing the same version again, or another one, cleans up after a killed publisher.
    assert killed_at(2, one, s3, "2")
    assert "manifest.json" not in published(s3, "net/2")
    publish(two, s3, "net", "2")
    assert published(s3, "net/2") == files_of(two)
    assert killed_at(3, one, s3, "3")
    publish(two, s3, "net", "4")
    assert not published(s3, "net/3") and not [path for path in published(s3, "net") if path.startswith(".")]


@pytest.mark.slow
def test_one_at_work_is_not_disturbed(s3: str, tmp_path: Path) -> None:
    store, base = fsspec.core.url_to_fs(s3, skip_instance_cache=True)
    claim = {"manifest": "of another", "host": platform.node(), "process": os.getpid(), "time": time.time()}
    store.pipe_file(f"{base}/busy/.publishing/1", json.dumps(claim).encode())
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
        publish(a_bundle(tmp_path / "one"), s3, "busy", "1")
    assert "1/manifest.json" not in published(s3, "busy")
    elsewhere = claim | {"host": "elsewhere", "time": time.time() - 7 * 3600}
    store.pipe_file(f"{base}/busy/.publishing/1", json.dumps(elsewhere).encode())
    publish(tmp_path / "one", s3, "busy", "1")
    assert published(s3, "busy/1") == files_of(tmp_path / "one")


@pytest.mark.slow
def test_an_absent_or_refusing_store_is_reported_within_seconds(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="bucket does not exist"):
        check("s3://nobody/x", "net", None)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    start = time.monotonic()
    with pytest.raises(ConfigError, match="Could not connect"):
        check(s3, "net", None)
    assert time.monotonic() - start < 60
