"""Tests of the commands that install an extra, which differ between a checkout and an installed package."""

from __future__ import annotations

import shutil
from importlib import util
from pathlib import Path

import qatkit_verify.installed
from qatkit_verify.installed import in_checkout, install_extra


def test_a_checkout_installs_extras_with_uv() -> None:
    assert in_checkout()
    assert install_extra("timm") == "uv sync --inexact --extra timm"


def test_an_installed_package_installs_extras_with_pip(tmp_path: Path) -> None:
    copy = tmp_path / "site-packages" / "qatkit_verify" / "installed.py"
    copy.parent.mkdir(parents=True)
    shutil.copy(qatkit_verify.installed.__file__, copy)
    spec = util.spec_from_file_location("installed_copy", copy)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)

    assert not module.in_checkout()
    assert module.install_extra("timm") == "pip install 'qatkit[timm]'"
    assert module.install_extra("openvino", "qatkit-verify") == "pip install 'qatkit-verify[openvino]'"
