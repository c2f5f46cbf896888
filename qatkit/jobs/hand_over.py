"""The last stage of a run: writes and publishes a bundle, if that is requested and the file meets its bounds."""

from __future__ import annotations

import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from qatkit.config.schema import Config, ExportConfig
from qatkit.data import DataModule
from qatkit.encryption.vault import encrypted_copy
from qatkit.handover import publish
from qatkit.handover.demo.runtime import find_runtime
from qatkit.handover.write import BundleSource, write_bundle
from qatkit.records.run_files import CHECKPOINT_FILE, REPORT_FILE, SEALED_BUNDLE
from qatkit.report.next_steps import lines
from qatkit.run.backend import backend_of
from qatkit.run.folder import Run, main_process, say
from qatkit.run.tracking import check_tracking, track_end
from qatkit_verify.bundle.signature import private_key
from qatkit_verify.errors import ConfigError
from qatkit_verify.session import session_options
from qatkit_verify.untrusted import read_json


def check_hand_over(config: Config) -> None:
    """Checks the settings of the bundle before the long stages.

    Raises:
        ConfigError: a setting of the bundle is set without a bundle, a key cannot sign, the runtime of a demo is
            missing, or `check_places` raises it.
    """
    asked = config.export
    if asked.demo:
        if not asked.bundle:
            raise ConfigError(
                "export.demo", True, "false without export.bundle=true, which contains the page"
            )
        find_runtime(asked.demo_runtime)
    if asked.sign is not None:
        if not asked.bundle:
            raise ConfigError(
                "export.sign", asked.sign, ("null without export.bundle=true, since the key signs the bundle")
            )
        private_key(asked.sign)
    if asked.encrypt_bundle and (asked.encrypt is None or not asked.bundle):
        allowed = "false without export.encrypt=KEYFILE and export.bundle=true"
        raise ConfigError("export.encrypt_bundle", True, allowed)
    check_places(config)


def hand_over(run: Run, data: DataModule, status: int, int8: str) -> int:
    """Writes and publishes the bundle of a finished run, if a bundle is requested; returns the status of the run.

    Args:
        run: the finished run.
        data: the data of the run.
        status: the status of the run so far; if it is not 0, the file has missed a bound and no bundle is written.
        int8: the name of the file to deliver.
    """
    if not run.config.export.bundle:
        track_end(run, None)
        return status
    if status:
        checkpoint = run.folder / CHECKPOINT_FILE  # exists if the run trains or calibrates
        made = f"; export.py checkpoint={checkpoint} export.bundle=true writes one regardless"
        say(f"no bundle was written, since the file misses a bound{made if checkpoint.is_file() else ''}")
        track_end(run, None)
        return status
    with run.stage("bundle", "bundling"):
        path = bundled(source_of(run.config, run.folder, run.files / int8, data), run.folder)
    say(bundle_line(path))
    track_end(run, path)
    return published(run, path)


def ended(run: Run, status: int) -> int:
    """Prints suggestions for next steps as the last lines of a run, and returns `status`."""
    for line in lines(run.next):
        print(line, flush=True)
    return status


def bundled(source: BundleSource, folder: Path) -> Path:
    """Writes the bundle into `folder`; an encrypted one is assembled in memory."""
    if not source.export.seals_bundle:
        return write_bundle(source, folder)
    with tempfile.TemporaryDirectory() as memory:
        made = write_bundle(replace(source, export=replace(source.export, bundle_as="zip")), Path(memory))
        encrypted_copy(made, folder / SEALED_BUNDLE)
    return folder / SEALED_BUNDLE


def source_of(config: Config, run: Path, int8: Path, data: DataModule) -> BundleSource:
    """Returns the contents of a bundle of the run in the folder `run`, with the settings of `config`."""
    options = read_json(run / REPORT_FILE).get("session_options") if (run / REPORT_FILE).is_file() else None
    cache = config.calibration.cache
    return BundleSource(config.name, int8, run, data, config.export, config.verify.threads,
                  session_options(options if options is not None else backend_of(config).session_options),
                  Path(cache) if cache else None)  # fmt: skip


def bundle_line(path: Path) -> str:
    """Returns a line with the bundle's path and the command with which its recipient uses it."""
    if path.name == SEALED_BUNDLE:
        opened = f"python -m qatkit.encryption.command open {path} KEYFILE bundle.zip"
        return f"bundle: {path}  (to decrypt: {opened})"
    check = f"pip install qatkit_verify-*.whl && qatkit-verify {path.name}"
    return f"bundle: {path}  (to check it on the target: {check})"


def same_file(asked: ExportConfig, reported: ExportConfig) -> dict[str, object]:
    """Returns those settings with an effect on the file that differ, each with its value in `reported`.

    The result is empty if `asked` and `reported` make the same file.
    """
    keys = ("opset", "dynamic_batch", "dynamic_axes", "mode", "io", "packed_weights", "tensorrt_table")
    return {key: getattr(reported, key) for key in keys if getattr(asked, key) != getattr(reported, key)}


def check_places(config: Config) -> None:
    """Checks that the results can be stored at the configured destinations.

    Raises:
        ConfigError: a store or a server does not exist, or refuses access.
    """
    check_tracking(config)
    asked = config.export
    if asked.publish is None:
        return
    if not asked.bundle:
        allowed = "null without export.bundle=true, since the bundle is published"
        raise ConfigError("export.publish", asked.publish, allowed)
    if main_process():
        publish.check(asked.publish, config.name, asked.version)


def published(run: Run, bundle: Path) -> int:
    """Publishes the bundle of a finished run if requested; returns 0, or 1 if that fails."""
    wanted = run.config.export
    if wanted.publish is None:
        return 0
    try:
        with run.stage("publish", f"publishing to {wanted.publish}"):
            place = publish.publish(bundle, wanted.publish, run.config.name, wanted.version)
    except (ConfigError, OSError) as error:
        later = _later(bundle, run.config)
        print(f"error: the bundle was not published ({error}); to publish it later: {later}", file=sys.stderr)
        return 1
    say(f"published: {place}")
    return 0


def _later(bundle: Path, config: Config) -> str:
    typed = ["python", "-m", publish.__name__, str(bundle), str(config.export.publish), "--name", config.name]
    asked = {
        "--version": config.export.version,
        "--key": config.export.encrypt if bundle.name == SEALED_BUNDLE else None,
    }
    return shlex.join(typed + [text for flag, value in asked.items() if value for text in (flag, value)])
