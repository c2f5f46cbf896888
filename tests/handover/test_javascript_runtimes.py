"""Tests of a bundle in Node and in a real browser: golden vectors, demo page, programs of report and card."""

from __future__ import annotations

import base64
import functools
import io
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from command_line import ROOT
from numpy.typing import NDArray
from page_browser import chromium, javascript_packages, open_page, wait_for_answer
from PIL import Image, ImageOps
from products import EXACT, answers, bundle_of, int4_in_blocks
from tiny_run import calibrate_only

import qatkit_verify
from qatkit.jobs import pipeline
from qatkit_verify.bundle.manifest import entry, read_manifest, write_manifest
from qatkit_verify.pictures import open_picture
from qatkit_verify.preprocess import Preprocess

pytestmark = pytest.mark.slow
VERIFY = Path(qatkit_verify.__file__).parent / "javascript" / "verify.mjs"


@pytest.fixture(scope="module")
def npm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with javascript_packages(tmp_path_factory.mktemp("npm")) as folder:
        yield folder


@pytest.fixture(scope="module")
def bundle(npm: Path) -> Path:
    """Returns the bundle, with a demo page, of a run on digits of 8 x 8 pixels, resized to 16 x 16."""
    config = calibrate_only(npm / "run")
    config.name, config.data.image_size = "Digits <8 x 8>", 16
    config.export.bundle = config.export.demo = True
    config.export.demo_runtime = str(npm / "node_modules" / "onnxruntime-web")
    assert pipeline.train(config) == 0
    return npm / "run" / "bundle"


@pytest.fixture
def golden(bundle: Path) -> list[tuple[NDArray[np.uint8], NDArray[np.float32]]]:
    """Returns the golden pictures with ONNX Runtime's outputs from when the bundle was made."""
    stored = np.load(bundle / "golden.npz")
    answers = stored[next(name for name in stored.files if name.startswith("on:"))]
    return [(stored[f"pixels_{i}"], scores) for i, scores in enumerate(answers)]


def _save(pixels: NDArray[np.uint8], path: Path) -> None:
    Image.fromarray(pixels.squeeze()).save(path, format="png")


def _listed_anew(folder: Path, name: str) -> None:
    """Updates the manifest's entry of a changed file, so that the file matches the manifest."""
    manifest = read_manifest(folder)
    kept = tuple(one for one in manifest.files if one.name != name)
    write_manifest(folder, replace(manifest, files=(*kept, entry(folder, name))))


def _node(*typed: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["node", *typed], cwd=cwd, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(
    "script", [VERIFY, Path("run/bundle/javascript/verify.mjs")], ids=["wheel", "bundle"]
)
def test_node_gives_the_golden_answers(npm: Path, bundle: Path, script: Path) -> None:
    done = _node(str(script), str(bundle), "--json", cwd=npm)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [run["optimizations"] for run in report["runs"]] == ["off", "on"]
    for run in report["runs"]:
        assert run["same"] == run["images"] == 8 and run["levels"] == 0
        assert run[run["optimizations"]] < 1e-3  # in steps: the same arithmetic on the same machine


def test_node_takes_the_session_options_of_the_manifest(npm: Path, tmp_path: Path) -> None:
    """Without the options, MatMulNBits quantizes the activations, which changes outputs by over 0.1 step."""
    file = int4_in_blocks(tmp_path / "model.onnx")
    for name, told in (("older", None), ("told", EXACT)):
        (tmp_path / name).mkdir()
        shutil.copy(file, tmp_path / name)
        bundle_of(tmp_path / name, golden=answers(file, EXACT), told=told)
    older, told = (
        json.loads(_node(str(VERIFY), str(tmp_path / name), "--json", cwd=npm).stdout)["runs"][1]
        for name in ("older", "told")
    )
    assert told["on"] < 1e-3
    assert older["on"] > 0.1


def test_node_reads_a_zip_and_refuses_files_unlike_the_manifest(
    npm: Path, bundle: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    packed = shutil.make_archive(str(tmp_path / "bundle"), "zip", copy)
    assert _node(str(VERIFY), packed, cwd=npm).returncode == 0
    data = bytearray((copy / "model.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    (copy / "model.onnx").write_bytes(data)
    (copy / "labels.txt").unlink()
    (copy / "more.txt").touch()
    done = _node(str(VERIFY), str(copy), cwd=npm)
    assert done.returncode == 1
    refused = [line for line in done.stdout.splitlines() if line.startswith("REFUSED")]
    assert refused == [
        "REFUSED labels.txt: missing", "REFUSED model.onnx: changed", "REFUSED more.txt: not in the manifest",
    ]  # fmt: skip


def test_node_tells_answers_that_are_too_far(npm: Path, bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    arrays = dict(np.load(copy / "golden.npz"))
    step = next(float(array) for name, array in arrays.items() if name.startswith("step:"))
    far = {
        name: array + np.float32(2.5 * step)
        for name, array in arrays.items()
        if name.startswith(("on:", "off:"))
    }
    np.savez(copy / "golden.npz", **arrays | far)
    _listed_anew(copy, "golden.npz")
    done = _node(str(VERIFY), str(copy), "--json", cwd=npm)
    assert done.returncode == 1
    for run in json.loads(done.stdout)["runs"]:
        assert not run["passed"] and run["on"] == pytest.approx(2.5, abs=0.01)


def test_the_programs_of_page_and_card_give_the_golden_answers(npm: Path, bundle: Path, golden: Any) -> None:
    card, page = (bundle / "card.md").read_text(), unescape((bundle / "report.html").read_text())
    here = npm / "copy"
    shutil.copytree(bundle, here)
    for language, name in (("python", "run.py"), ("js", "run.mjs")):
        (here / name).write_text(re.findall(rf"```{language}\n(.*?)```", card, re.DOTALL)[0])
        assert f"<pre>{(here / name).read_text()}</pre>" in page
    for pixels, scores in golden:
        _save(pixels, here / "image.jpg")
        for command in ([sys.executable, "run.py"], ["node", "run.mjs"]):
            done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=100, check=True)
            lines = [line.rsplit(" ", 1) for line in done.stdout.splitlines()]
            best = np.argsort(-scores, kind="stable")[:5]
            np.testing.assert_allclose([float(score) for _, score in lines], scores[best], atol=1e-5)
            assert lines[0][0] == str(best[0])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(params=["file", "http"])
def address(request: pytest.FixtureRequest, bundle: Path) -> Iterator[str]:
    """Yields the URL of the page, as a file and from a static server."""
    if request.param == "file":
        yield (bundle / "demo.html").as_uri()
        return
    handler = functools.partial(_Silent, directory=str(bundle))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/demo.html"
        server.shutdown()


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Suppresses the log."""


def test_the_page_answers_as_the_file_does(browser: Any, address: str, golden: Any, tmp_path: Path) -> None:
    page, complaints = open_page(browser, address)
    for pixels, scores in golden[:3]:
        _save(pixels, tmp_path / "digit.png")
        page.set_input_files("#file", tmp_path / "digit.png")
        page.locator("#caption", has_text="digit.png, 8 x 8").wait_for()
        wait_for_answer(page)
        shares = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        best = np.argsort(-scores, kind="stable")[:5]
        items = page.locator(".int8 li")
        assert items.locator(".label").all_text_contents() == [str(place) for place in best]
        shown = [float(text.split("\u00a0")[0]) for text in items.locator(".share").all_text_contents()]
        np.testing.assert_allclose(shown, 100 * shares[best], atol=0.06)  # shown with one decimal
        width = items.locator(".bar").first.bounding_box()["width"]
        bar = items.locator(".bar i").first.bounding_box()["width"]
        assert bar / width == pytest.approx(float(shares[best[0]]), abs=0.01)
        page.evaluate("document.getElementById('caption').textContent = ''")
    assert complaints == []
    page.close()


def test_the_golden_pictures_give_their_answers_in_the_browser(browser: Any, address: str) -> None:
    page, complaints = open_page(browser, address)
    page.click("#check")
    page.locator("#checked table").wait_for(timeout=100_000)
    found = json.loads(page.get_attribute("#checked", "data-found"))
    assert found["passed"] and found["same"] == found["images"] == 8
    assert found["levels"] == 0 and min(found["on"], found["off"]) <= found["tolerance"]
    assert complaints == []
    page.close()


@pytest.fixture(scope="module", params=[True, False], ids=["turned", "as they lie"])
def of_phones(request: pytest.FixtureRequest, npm: Path) -> tuple[Path, bool]:
    """Returns the bundle of a run on pictures with an EXIF orientation, and whether the run applies it."""
    upright, draw = bool(request.param), np.random.default_rng(0)
    folder = npm / f"phones_{upright}"
    for number in range(80):
        place = folder / "pictures" / ("train", "test")[number % 2] / "ab"[number // 2 % 2]
        place.mkdir(parents=True, exist_ok=True)
        _phone(draw.integers(0, 256, (8, 12, 3), np.uint8), place / f"{number}.jpg")
    config = calibrate_only(folder / "run")
    config.data.source = "qatkit.data.pictures" if upright else "qatkit.data.image_folder"
    config.data.root, config.data.mean, config.data.std = str(folder / "pictures"), [0.5] * 3, [0.25] * 3
    config.calibration.images = config.calibration.batch_size = 32
    config.verify.min_float_agreement = 0.1 if upright else 0.9  # the bound used without labels
    config.export.bundle = config.export.demo = True
    config.export.demo_runtime = str(npm / "node_modules" / "onnxruntime-web")
    assert pipeline.train(config) == 0
    return folder / "run" / "bundle", upright


def _phone(pixels: NDArray[np.uint8], path: Path) -> None:
    """Saves a picture that lies on its side, with the EXIF orientation that says so."""
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees clockwise
    Image.fromarray(pixels).save(path, quality=100, subsampling=0, exif=exif)


def _scores(bundle: Path, path: Path, upright: bool) -> NDArray[np.float32]:
    """Returns the model's scores of a picture that qatkit_verify prepares, upright or as stored."""
    prepare = Preprocess.from_dict(json.loads((bundle / "preprocess.json").read_text()))
    session = onnxruntime.InferenceSession(str(bundle / "model.onnx"), providers=["CPUExecutionProvider"])
    found = session.run(None, {"input": prepare(open_picture(path, upright=upright))})[0][0]
    return np.asarray(found, np.float32)


def test_a_picture_is_turned_everywhere_where_training_turned_it(
    npm: Path, of_phones: tuple[Path, bool], tmp_path: Path
) -> None:
    bundle, upright = of_phones
    assert json.loads((bundle / "preprocess.json").read_text())["upright"] is upright
    here = npm / f"of_phones_{upright}"
    shutil.copytree(bundle, here)
    slope = np.add.outer(np.arange(8) * 30, np.zeros(12, int))[..., None] + [0, 20, 40]
    _phone(slope.astype(np.uint8), here / "image.jpg")
    right, wrong = (_scores(bundle, here / "image.jpg", how) for how in (upright, not upright))
    apart = np.abs(right - wrong).max()
    for language, command in (("python", [sys.executable, "run.py"]), ("js", ["node", "run.mjs"])):
        code = re.findall(rf"```{language}\n(.*?)```", (bundle / "card.md").read_text(), re.DOTALL)[0]
        (here / command[1]).write_text(code)
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=100, check=True)
        found = np.array([float(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines()])
        assert np.abs(found - np.sort(right)[::-1][: len(found)]).max() < 0.1 * apart


_PIXELS = """async ([content, source]) => {
  const exif = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
  const { plain, orientation } = exif.withoutExif(Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0)));
  const { data, width, height } = exif.turned(await createImageBitmap(new Blob([plain])), orientation);
  return { pixels: [...data], width, height };
}"""


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_the_page_turns_by_every_orientation_as_pillow_does(browser: Any, kind: str) -> None:
    """Also covers no orientation, and EXIF data that are cut off within an entry."""
    source = (ROOT / "qatkit" / "handover" / "demo" / "exif.mjs").read_text()
    drawn = np.random.default_rng(0).integers(0, 256, (2, 3, 3), np.uint8).repeat(16, 0).repeat(16, 1)
    page = browser.new_page()
    for told in (None, *range(1, 9), b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01"):
        content, exif = io.BytesIO(), Image.Exif()
        if isinstance(told, int):
            exif[0x0112] = told
        given = told if isinstance(told, bytes) else exif.tobytes() if told else b""
        lossless = {"quality": 100, "subsampling": 0} if kind == "jpeg" else {"lossless": True}
        Image.fromarray(drawn).save(content, kind, exif=given, **lossless)
        wanted = np.asarray(ImageOps.exif_transpose(Image.open(content)))
        found = page.evaluate(_PIXELS, [base64.b64encode(content.getvalue()).decode(), source])
        pixels = np.array(found["pixels"]).reshape(found["height"], found["width"], 4)[..., :3]
        assert pixels.shape == wanted.shape, told
        assert np.abs(pixels - wanted).max() <= (3 if kind == "jpeg" else 0), told
    page.close()


@pytest.mark.parametrize("kind", ["jpg", "png"])
def test_the_page_turns_a_picture_where_training_did(
    browser: Any, of_phones: tuple[Path, bool], kind: str, tmp_path: Path
) -> None:
    bundle, upright = of_phones
    page, complaints = open_page(browser, (bundle / "demo.html").as_uri())
    _phone(np.zeros((8, 12, 3), np.uint8), tmp_path / f"phone.{kind}")
    page.set_input_files("#file", tmp_path / f"phone.{kind}")
    page.locator("#caption", has_text=f"phone.{kind}, {'8 x 12' if upright else '12 x 8'}").wait_for()
    wait_for_answer(page)
    assert complaints == []
    page.close()


def test_what_is_no_picture_is_one_clear_line(browser: Any, bundle: Path, tmp_path: Path) -> None:
    page, _ = open_page(browser, (bundle / "demo.html").as_uri())
    (tmp_path / "notes.png").write_text("no picture")
    page.set_input_files("#file", tmp_path / "notes.png")
    page.locator("#problem", has_text="This browser cannot open notes.png as a picture").wait_for()
    page.locator("#thumbnails button").first.click()  # the page still works
    wait_for_answer(page)
    assert page.text_content("#problem") == ""
    page.close()


def test_the_page_is_named_fits_a_phone_and_is_used_by_keys(browser: Any, bundle: Path) -> None:
    page, complaints = open_page(browser, (bundle / "demo.html").as_uri(), width=400)
    assert page.title() == page.text_content("h1") == "Digits <8 x 8>"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "file"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # opens the first of the bundle's pictures
    wait_for_answer(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert complaints == []
    page.close()


def test_a_page_without_its_scripts_says_what_is_missing(browser: Any, bundle: Path, tmp_path: Path) -> None:
    shutil.copy(bundle / "demo.html", tmp_path)
    page, _ = open_page(browser, (tmp_path / "demo.html").as_uri())
    assert "demo/onnxruntime.js is missing next to this page" in page.text_content("#problem")
    page.close()
