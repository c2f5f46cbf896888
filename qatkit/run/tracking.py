"""A run in MLflow (`trainer.mlflow`): parameters, the metrics of training, the figures in the end, and the bundle.

Lightning's own MLFlowLogger does the logging. All stages of a run, and what goes on after a kill, are one run of
MLflow: its id is kept in the folder as mlflow.json. A server is asked before anything long; one that goes away later
ends no training: what it misses is said.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qatkit.bundle import PAGE_FILE, REPORT_FILE
from qatkit.config.schema import Config
from qatkit.run.folder import Run, main_process
from qatkit_verify.errors import ConfigError, first_line
from qatkit_verify.files import write_text
from qatkit_verify.untrusted import read_json

if TYPE_CHECKING:
    from lightning.pytorch.loggers import MLFlowLogger

TRACKED_FILE = "mlflow.json"
_KEY = "trainer.mlflow"
_SCHEMES = ("http", "https", "file", "sqlite", "postgresql", "mysql", "mssql", "databricks")
# While a server is tried: MLflow's own patience is minutes.
_IMPATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
_LONGEST = 500  # characters of a parameter: what MLflow's older servers take


def check_tracking(config: Config) -> None:
    """Whether the server is there.

    Raises:
        ConfigError: it is not, or MLflow is not installed.
    """
    uri = config.trainer.mlflow
    if uri is None or not main_process():
        return
    scheme, found, rest = uri.partition("://")
    if not found or scheme.partition("+")[0] not in _SCHEMES:
        raise ConfigError(_KEY, uri, "a tracking URI: http://HOST:PORT, sqlite:///FILE, file:///FOLDER")
    if "@" in rest.partition("/")[0] and scheme.startswith("http"):
        allowed = "a URI without credentials: MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD have them"
        raise ConfigError(_KEY, f"{scheme}://***@{rest.rpartition('@')[2]}", allowed)
    try:
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise ConfigError(_KEY, uri, "null, or after: uv sync --extra mlflow") from error
    try:
        with _environment(_IMPATIENT):
            MlflowClient(uri).search_experiments(max_results=1)
    except Exception as error:  # of requests, SQLAlchemy, MLflow itself
        raise ConfigError(_KEY, uri, f"a tracking server that answers ({first_line(error)[:200]})") from error


def tracker(run: Run, stage: str = "") -> MLFlowLogger | None:
    """Lightning's logger of a stage, whose name stands before those of its metrics; None where nothing is tracked."""
    config = run.config
    if config.trainer.mlflow is None:
        return None
    path = run.folder / TRACKED_FILE
    known = _stored(path).get(config.trainer.mlflow)
    logger: MLFlowLogger = _logger_type()(
        experiment_name=config.name,
        run_name=run.folder.name,
        tracking_uri=config.trainer.mlflow,
        run_id=known,
        prefix=stage.replace(" ", "_"),
    )
    if known is None and main_process():
        logger.log_hyperparams(parameters(run.asked or config))
        write_text(path, json.dumps({config.trainer.mlflow: logger.run_id}) + "\n")
    return logger


def track_end(run: Run, bundle: Path | None) -> None:
    """The figures of the report, and the bundle, or without one the report; nothing where nothing is tracked."""
    report = run.folder / REPORT_FILE
    if run.config.trainer.mlflow is None or not main_process() or not report.is_file():
        return
    logger = tracker(run)
    assert logger is not None
    logger.log_metrics(figures(read_json(report)))
    client = logger.experiment
    try:
        for path in [bundle] if bundle else [report, run.folder / PAGE_FILE]:
            if path.is_dir():
                client.log_artifacts(logger.run_id, str(path), path.name)
            else:
                client.log_artifact(logger.run_id, str(path))
    except Exception as error:  # of a store, in whatever library
        _missed(error)
    logger.finalize("success")


def parameters(config: Config) -> dict[str, str]:
    """Every setting by its dotted key, as text."""

    def flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in values.items():
            if isinstance(value, Mapping) and value:
                yield from flat(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    return {key: str(value)[:_LONGEST] for key, value in flat(asdict(config), "")}


def figures(report: Mapping[str, Any]) -> dict[str, float]:
    """What report.json measured, by keys of its own: accuracy.int8.top1, latency.float.median_ms, ..."""
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
    """{tracking URI: id of the run there}."""
    try:
        stored = read_json(path)
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


@cache
def _logger_type() -> type[MLFlowLogger]:
    from lightning.pytorch.loggers import MLFlowLogger

    class Patient(MLFlowLogger):
        """Training goes on without its server."""

        def log_metrics(self, *args: Any, **kwargs: Any) -> None:
            try:
                super().log_metrics(*args, **kwargs)
            except Exception as error:
                _missed(error)

        def finalize(self, *args: Any, **kwargs: Any) -> None:
            try:
                super().finalize(*args, **kwargs)
            except Exception as error:
                _missed(error)

    return Patient


def _missed(error: Exception) -> None:
    warnings.warn(f"{_KEY}: the tracking server missed something ({first_line(error)[:200]})", stacklevel=3)


@contextmanager
def _environment(changed: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})
