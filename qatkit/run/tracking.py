"""Logs a run to MLflow (`trainer.mlflow`): parameters, training metrics, final figures, report and bundle.

Lightning's own MLFlowLogger does the logging. All stages of a run, including those after a restart, are one
run of MLflow, whose id is kept in the folder as mlflow.json. The server is contacted before the long stages.
If it becomes unavailable later, training is neither ended nor delayed: failed calls are kept in this process
and sent once the server is back. If some are left at the end, a message gives the command that logs them
later:

    python -m qatkit.run.tracking RUN_FOLDER http://HOST:PORT
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger

from qatkit.config.schema import Config
from qatkit.records.run_files import HANDED_OVER, PAGE_FILE, REPORT_FILE
from qatkit.run.folder import Run, main_process, say
from qatkit_verify.errors import ConfigError, first_line
from qatkit_verify.files import write_text
from qatkit_verify.installed import install_extra
from qatkit_verify.untrusted import read_json

TRACKED_FILE = "mlflow.json"
_KEY = "trainer.mlflow"
_SCHEMES = ("http", "https", "file", "sqlite", "postgresql", "mysql", "mssql", "databricks")
# Limits while training waits for an answer, since MLflow's own retries take minutes.
_IMPATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
# Minimum pause before a server that did not answer is tried again: in seconds, and as a multiple of the time that
# the failed call took.
_PAUSE, _TIMES = 30.0, 20.0
_STATE = "the state of the run"
_AWAY = "does not answer; unsent data is sent when it does"
_NO_KEY = re.compile(r"[^A-Za-z0-9_./: -]")  # characters that MLflow rejects in names of parameters


def check_tracking(config: Config) -> None:
    """Checks, if `trainer.mlflow` is set, that the server answers.

    Raises:
        ConfigError: the URI is wrong or contains credentials, the server does not answer or has deleted the
            experiment, or MLflow is not installed.
    """
    uri = config.trainer.mlflow
    if uri is None or not main_process():
        return
    scheme, found, rest = uri.partition("://")
    if not found or scheme.partition("+")[0] not in _SCHEMES or not rest.strip("/"):
        raise ConfigError(
            _KEY, uri, "a tracking URI, such as http://HOST:PORT, sqlite:///FILE or file:///FOLDER"
        )
    if "@" in rest.partition("/")[0] and scheme.startswith("http"):
        allowed = "a URI without credentials (use MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD)"
        raise ConfigError(_KEY, f"{scheme}://***@{rest.rpartition('@')[2]}", allowed)
    try:
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        allowed = f"null without the extra mlflow (install it with {install_extra('mlflow')})"
        raise ConfigError(_KEY, uri, allowed) from error
    try:
        with _impatient():
            experiment = MlflowClient(uri).get_experiment_by_name(config.name)
    except Exception as error:  # of requests, SQLAlchemy, MLflow itself
        reason = f"the tracking server does not answer ({first_line(error)[:200]})"
        raise ConfigError(_KEY, uri, reason=reason) from error
    if experiment is not None and experiment.lifecycle_stage == "deleted":
        allowed = (
            f"another name, since this experiment was deleted on {uri} (mlflow "
            "experiments restore brings it back)"
        )
        raise ConfigError("name", config.name, allowed)


class Tracker(MLFlowLogger):
    """A run in MLflow. Calls that fail since the server is unavailable are kept in order and sent later.

    Attributes:
        stage: the prefix of the names of metrics.
        waiting: the calls that are not sent yet, each with what it sends and whether MLflow's own retries apply.
    """

    def __init__(self, folder: Path, uri: str, name: str) -> None:
        self._file = folder / TRACKED_FILE
        known = _stored(self._file).get(uri)
        super().__init__(name, folder.name, uri, run_id=known)
        self.stage, self._new, self._uri = "", known is None, uri
        self.waiting = list[tuple[Callable[[], object], str, bool]]()
        self._again, self._told = 0.0, set[str]()
        self._begun = self._sending = False

    @property
    def experiment(self) -> Any:
        """MLflow's client.

        Lightning reads it at the start of each stage, when the server may not answer. Reading it therefore contacts
        the server only while a call is being sent.
        """
        return super().experiment if self._initialized or self._sending else self._mlflow_client

    def begin(self, told: Mapping[str, str]) -> None:
        """Creates a run with its parameters, or continues an earlier one; called once, before any other method."""
        if self._begun:
            return
        self._begun = True
        if self._new:
            self.send(self._remember, "the new run")
            self.send(partial(self.log_hyperparams, dict(told)), "the settings")
        else:
            self.send(lambda: self.experiment.update_run(self.run_id, "RUNNING"), _STATE)

    def _remember(self) -> None:
        write_text(self._file, json.dumps(_stored(self._file) | {self._uri: self.run_id}) + "\n")

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        named = {f"{self.stage}-{key}" if self.stage else key: value for key, value in metrics.items()}
        what = f"metrics of the stage {self.stage}" if self.stage else "metrics"
        self.send(partial(super().log_metrics, named, step), what)

    def finalize(self, status: str = "success") -> None:
        """Sends waiting calls when Lightning calls it after a stage; ends the MLflow run only if the stage failed."""
        if status != "success":
            self.send(partial(super().finalize, status), _STATE)
        self.flush()

    def end(self, bundle: Path | None) -> None:
        """Logs the figures of the report, the report itself and the bundle, and finishes the run."""
        folder = self._file.parent
        self.stage = ""
        self.log_metrics(figures(read_json(folder / REPORT_FILE)))
        for path in (folder / REPORT_FILE, folder / PAGE_FILE, bundle):
            if path is not None:
                self.send(partial(self._upload, path), path.name, patient=True)
        self.send(partial(super().finalize, "success"), _STATE)
        self.flush()

    def _upload(self, path: Path) -> None:
        if path.is_dir():
            self.experiment.log_artifacts(self.run_id, str(path), path.name)
        else:
            self.experiment.log_artifact(self.run_id, str(path))

    def send(self, call: Callable[[], object], what: str, *, patient: bool = False) -> None:
        """Sends a call now, or keeps it for later if the server recently did not answer.

        Args:
            call: the call.
            what: what it sends, for messages.
            patient: whether MLflow's own retries apply.
        """
        if not main_process():
            return
        self.waiting.append((call, what, patient))
        if time.monotonic() >= self._again:
            self.flush()

    def flush(self) -> None:
        """Sends waiting calls until none is left or the server does not answer; drops calls that it rejects."""
        while self.waiting:
            (call, what, patient), start = self.waiting[0], time.monotonic()
            try:
                self._sending = True
                with nullcontext() if patient else _impatient():
                    call()
            except Exception as error:  # of requests, SQLAlchemy, MLflow itself
                if not _refused(error):
                    self._again = time.monotonic() + max(_PAUSE, _TIMES * (time.monotonic() - start))
                    self._say(_AWAY, error)
                    return
                self._say(f"rejected {what}", error)
            finally:
                self._sending = False
            self.waiting.pop(0)
            self._told.discard(_AWAY)

    def _say(self, text: str, error: Exception) -> None:
        """Reports each text once; an unavailable server again after it has answered in between."""
        if text not in self._told:
            self._told.add(text)
            say(f"{_KEY}={self._uri}: the tracking server {text} ({first_line(error)[:200]})")


def tracker(run: Run, stage: str = "") -> Tracker | None:
    """Returns Lightning's logger for a stage, or None if the run is not tracked.

    The name of the stage is the prefix of its metrics.
    """
    config = run.config
    if config.trainer.mlflow is None:
        return None
    logger = _tracker_of(run.folder.absolute(), config.trainer.mlflow, config.name)
    logger.begin(parameters(asdict(run.asked or config)))
    logger.stage = stage.replace(" ", "_")
    return logger


_tracker_of = cache(Tracker)  # shared by all stages of a run, so that none loses its waiting calls


def track_end(run: Run, bundle: Path | None) -> None:
    """Logs the end of a run that has a report; does nothing if the run is not tracked."""
    if run.config.trainer.mlflow is None or not main_process() or not (run.folder / REPORT_FILE).is_file():
        return
    logger = tracker(run)
    assert logger is not None
    logger.end(bundle)
    if logger.waiting:
        later = shlex.join(["python", "-m", __name__, str(run.folder), run.config.trainer.mlflow])
        say(f"{_KEY}: this run is only partly logged; to send its figures, report and bundle later: {later}")


def parameters(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns all settings of a configuration as text, by dotted key."""

    def flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in values.items():
            if isinstance(value, Mapping) and value:
                yield from flat(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    return {_NO_KEY.sub("_", key): str(value) for key, value in flat(settings, "")}


def figures(report: Mapping[str, Any]) -> dict[str, float]:
    """Returns the measurements of report.json by dotted keys: accuracy.int8.KEY, latency.float.median_ms, ..."""
    found = dict[str, float]()
    for group in ("accuracy", "fidelity", "latency"):
        for row, values in report[group].items():
            found |= {
                f"{group}.{row}.{name}": float(value)
                for name, value in values.items()
                if isinstance(value, int | float)
            }
    found |= {f"bytes.{row}": float(value) for row, value in report["sizes"].items()}
    return found | {"shortfalls": float(len(report["shortfalls"]))}


def _stored(path: Path) -> dict[str, str]:
    """Returns the ids of the run on each tracking server, by tracking URI."""
    try:
        stored = read_json(path)
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _refused(error: Exception) -> bool:
    """Returns whether an error is permanent: the server or MLflow itself rejects the call."""
    from mlflow.exceptions import MlflowException

    return isinstance(error, MlflowException) and error.get_http_status_code() < 500


@contextmanager
def _impatient() -> Iterator[None]:
    """Limits the time for an answer to seconds within the context, unless environment variables set other limits.

    Retries are not logged.
    """
    changed = {name: value for name, value in _IMPATIENT.items() if name not in os.environ}
    os.environ.update(changed)
    tries = logging.getLogger("urllib3.connectionpool")
    level = tries.level
    tries.setLevel(logging.ERROR)
    try:
        yield
    finally:
        tries.setLevel(level)
        for name in changed:
            del os.environ[name]


def _finished(folder: Path) -> tuple[str, dict[str, str]]:
    """Returns the name and the parameters of the finished run in a folder.

    Raises:
        ConfigError: the folder has no report, or a damaged one.
    """
    try:
        report = read_json(folder / REPORT_FILE)
        figures(report)
        return str(report["name"]), parameters(report["config"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"the key {error} is missing" if isinstance(error, KeyError) else first_line(error)
        raise ConfigError("run", folder, f"the folder of a finished run ({REPORT_FILE}: {reason})") from error


def main(typed: Sequence[str] | None = None) -> int:
    """Logs a finished run: its settings, figures, report and bundle. The exit status is 2 for a mistake."""
    parser = argparse.ArgumentParser("python -m qatkit.run.tracking", description=main.__doc__)
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument("uri", help="URI of the tracking server, such as http://HOST:PORT")
    given = parser.parse_args(typed)
    try:
        name, told = _finished(given.run)
        config = Config(name=name)
        config.trainer.mlflow = given.uri
        check_tracking(config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    logger = Tracker(given.run.absolute(), given.uri, name)
    logger.begin(told)
    logger.end(next((path for one in HANDED_OVER if (path := given.run / one).exists()), None))
    return 1 if logger.waiting else 0


if __name__ == "__main__":
    sys.exit(main())
