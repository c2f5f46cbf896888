"""Chromium with a bundle's demo page, and the npm packages that bundles run on."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_PACKAGES = Path(__file__).with_name("handover") / "package.json"


@contextmanager
def javascript_packages(folder: Path) -> Iterator[Path]:
    """Installs the packages of package.json in `folder`, yields and then removes the folder; skips on failure."""
    if shutil.which("npm") is None:
        pytest.skip("no npm on the PATH")
    shutil.copy(_PACKAGES, folder)
    install = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock"]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    if done.returncode:
        pytest.skip(f"npm install: {done.stderr.strip().splitlines()[-1:]}")
    yield folder
    shutil.rmtree(folder)


@contextmanager
def chromium() -> Iterator[Any]:
    """Yields a headless Chromium; skips if it or Playwright is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the extra browser is not installed")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no chromium on the PATH")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


def open_page(browser: Any, address: str, width: int = 1280) -> tuple[Any, list[str]]:
    """Returns the demo page after it loaded or failed, and a list of its console's warnings and errors."""
    page, complaints = browser.new_page(viewport={"width": width, "height": 800}), list[str]()
    page.on(
        "console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address)
    page.locator("#status", has_text=re.compile("^Ready|could not")).wait_for(timeout=100_000)
    return page, complaints


def wait_for_answer(page: Any) -> None:
    """Waits until both models have answered or the page reports that there is no answer."""
    answered = re.compile(r"^INT8: .* Float: .*\.$|No answer")
    page.locator("#status", has_text=answered).wait_for(timeout=100_000)
