"""Where a run's bundle goes.

A place that could not be written to was refused before the run; one that went away since is one line, with the command
that publishes the bundle later.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from qatkit.config.schema import Config
from qatkit.handover import publish
from qatkit.records.run_files import SEALED_BUNDLE
from qatkit.run.folder import Run, main_process, say
from qatkit.run.tracking import check_tracking
from qatkit_verify.errors import ConfigError


def check_places(config: Config) -> None:
    """Whether what is made can go where it is asked to.

    Raises:
        ConfigError: a store or a server refuses, or is not there.
    """
    check_tracking(config)
    asked = config.export
    if asked.publish is None:
        return
    if not asked.bundle:
        allowed = "null without export.bundle=true, which makes what is published"
        raise ConfigError("export.publish", asked.publish, allowed)
    if main_process():
        publish.check(asked.publish, config.name, asked.version)


def published(run: Run, bundle: Path) -> int:
    """Publishes the bundle of a finished run where that is asked for: 0, or 1 where it fails."""
    wanted = run.config.export
    if wanted.publish is None:
        return 0
    try:
        with run.stage("publish", f"publishing to {wanted.publish}"):
            place = publish.publish(bundle, wanted.publish, run.config.name, wanted.version)
    except (ConfigError, OSError) as error:
        later = _later(bundle, run.config)
        print(f"error: {error}: the bundle is not published; to do it later: {later}", file=sys.stderr)
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
