"""Tests of runs tracked in MLflow by a real server on loopback, checked by its REST API and on its disk.

The client (mlflow-skinny, the extra) has no server. The server comes from the full MLflow, if that is installed
here or if QATKIT_MLFLOW names its program:

    python -m venv FOLDER && FOLDER/bin/pip install mlflow && export QATKIT_MLFLOW=FOLDER/bin/mlflow
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT, python, run_script
from tiny_run import report_of, sha256

from qatkit.run.tracking import TRACKED_FILE, Tracker, main, parameters

slow = [pytest.mark.slow, pytest.mark.timeout(1800)]
TYPED = (
    *("model.name=tiny_run.Net", "data.image_size=8", "data.batch_size=32", "data.workers=0"),
    *("calibration.images=64", "schedule.epochs=1", "schedule.float_epochs=2", "trainer.accelerator=cpu"),
    *("trainer.checkpoint_every=5", "trainer.progress=false", "verify.max_drop=null", "verify.min_agreement=0.9"),
    *("verify.latency_runs=3", "verify.threads=1", "output_dir=run"),
)  # fmt: skip


class Server:
    """An MLflow server that can be stopped and started again; its data are in `folder`."""

    def __init__(self, program: str, folder: Path) -> None:
        self.program, self.folder = program, folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        told = [self.program, "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1",
                "--backend-store-uri", f"sqlite:///{self.folder / 'store.db'}",
                "--artifacts-destination", str(self.folder / "artifacts")]  # fmt: skip
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        env["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(told, stdout=log, stderr=log, env=env, start_new_session=True)
        soon(self._is_there, seconds=400)

    def _is_there(self) -> bool:
        assert self.process is not None and self.process.poll() is None, (self.folder / "log").read_text()
        try:
            return bool(urllib.request.urlopen(f"{self.uri}/health", timeout=5).status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        """Kills the server and its workers."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def ask(self, call: str, **values: Any) -> dict[str, Any]:
        """Returns the REST API's answer to a POST of `values`, or to a GET without values."""
        url, typed = f"{self.uri}/api/2.0/mlflow/{call}", {"Content-Type": "application/json"}
        body = json.dumps(values).encode() if values else None
        with urllib.request.urlopen(urllib.request.Request(url, body, typed), timeout=30) as answer:
            found = json.load(answer)
        assert isinstance(found, dict)
        return found

    def runs(self, folder: Path) -> list[dict[str, Any]]:
        """Returns the runs of a test's experiment, which is named after the test's folder."""
        found = self.ask("experiments/search", max_results=100).get("experiments", [])
        ids = [one["experiment_id"] for one in found if one["name"] == folder.name]
        return list(self.ask("runs/search", experiment_ids=ids).get("runs", [])) if ids else []

    def history(self, run: str, metric: str) -> dict[int, float]:
        """Returns a metric's values by step."""
        found = self.ask(f"metrics/get-history?run_id={run}&metric_key={metric}").get("metrics", [])
        return {int(one["step"]): float(one["value"]) for one in found}

    def artifacts(self, run: str) -> Path:
        """Returns the folder with a run's artifacts."""
        (found,) = (self.folder / "artifacts").glob(f"*/{run}/artifacts")
        return found


def program() -> str:
    """Returns the mlflow program that has a server, or skips the test."""
    named = os.environ.get("QATKIT_MLFLOW")
    if named is None and find_spec("flask") is not None and find_spec("alembic") is not None:
        named = shutil.which("mlflow", path=str(Path(sys.executable).parent))
    if named is None or not os.access(named, os.X_OK):
        pytest.skip("QATKIT_MLFLOW names no program mlflow: pip install mlflow, in a venv of its own")
    return named


@pytest.fixture(scope="module")
def started_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yields a server on loopback."""
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    made = Server(program(), tmp_path_factory.mktemp("mlflow"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def server(started_server: Server) -> Server:
    """Returns the server, started again if a test has stopped it."""
    if started_server.process is None:
        started_server.start()
    return started_server


def soon(asked: Callable[[], object], seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not asked():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.2)


def environment() -> dict[str, str]:
    places = [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


def train(folder: Path, *typed: str) -> subprocess.CompletedProcess[str]:
    os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]
    return run_script("train.py", *TYPED, f"name={folder.name}", *typed, cwd=folder, timeout=900)


def started(folder: Path, *typed: str) -> subprocess.Popen[bytes]:
    """Starts a training whose output goes to the file `told`."""
    command = [sys.executable, str(ROOT / "train.py"), *TYPED, f"name={folder.name}", *typed]
    with (folder / "told").open("wb") as told:
        return subprocess.Popen(command, cwd=folder, env=environment(), stdout=told, stderr=told)


def below(folder: Path) -> dict[str, str]:
    """Returns the digests of the files in a folder, by relative path."""
    return {path.relative_to(folder).as_posix(): sha256(path) for path in folder.rglob("*") if path.is_file()}


def values(run: dict[str, Any], kind: str) -> dict[str, Any]:
    return {one["key"]: one.get("value", "") for one in run["data"].get(kind, [])}


def check_whole(server: Server, run: dict[str, Any], folder: Path) -> None:
    """Checks parameters, figures, report and bundle of a finished run."""
    assert run["info"]["status"] == "FINISHED"
    told = values(run, "params")
    assert told["schedule.float_epochs"] == "2" and told["model.name"] == "tiny_run.Net"
    assert told["model.kwargs.num_classes"] == "10" and told["export.opset"] == "13"
    found, report = values(run, "metrics"), report_of(folder)
    for row in ("float", "int8"):
        assert found[f"accuracy.{row}.top1"] == pytest.approx(report["accuracy"][row]["top1"])
        assert found[f"bytes.{row}"] == report["sizes"][row] == (folder / f"model.{row}.onnx").stat().st_size
    stored = below(server.artifacts(run["info"]["run_id"]))
    bundle = {f"bundle/{name}": digest for name, digest in below(folder / "bundle").items()}
    assert len(bundle) > 10
    assert stored == bundle | {name: sha256(folder / name) for name in ("report.json", "report.html")}


class TestWithAServer:
    """Tests of what a real server has stored at the end."""

    pytestmark = slow

    def test_a_run_is_there_whole(self, server: Server, tmp_path: Path) -> None:
        typed = (
            "export.bundle=true",
            "+model.kwargs.num_classes=10",
            "+backend.overrides={conv1:{reduce_range:true}}",
        )
        done = train(tmp_path, *typed, f"trainer.mlflow={server.uri}")
        assert done.returncode == 0, done.stderr
        (run,) = server.runs(tmp_path)
        check_whole(server, run, tmp_path / "run")
        stages = {key.partition("-")[0] for key in values(run, "metrics") if "-" in key}
        assert stages == {"float", "QAT"}
        told = json.loads((tmp_path / "run" / TRACKED_FILE).read_text())
        assert told == {server.uri: run["info"]["run_id"]}

    def test_without_a_bundle_the_report_is_there(self, server: Server, tmp_path: Path) -> None:
        done = train(tmp_path, "schedule.epochs=0", f"trainer.mlflow={server.uri}")
        assert done.returncode == 0, done.stderr
        (run,) = server.runs(tmp_path)
        stored = below(server.artifacts(run["info"]["run_id"]))
        assert stored == {name: sha256(tmp_path / "run" / name) for name in ("report.json", "report.html")}

    def test_a_killed_run_goes_on_as_the_same_one(self, server: Server, tmp_path: Path) -> None:
        typed = ("export.bundle=true", "schedule.epochs=3", "+model.kwargs.num_classes=10", "resume=auto")
        tracked = (*typed, f"trainer.mlflow={server.uri}")
        ids, seen = set[str](), list[str]()
        for stage in ("float", "QAT"):
            process = started(tmp_path, *tracked)
            soon(partial(self._came_to, server, tmp_path, stage, process))
            seen.append("" if process.poll() is None else stage)
            process.kill()
            process.wait()
            (run,) = server.runs(tmp_path)
            ids.add(run["info"]["run_id"])
            assert run["info"]["status"] == "RUNNING"
        assert seen == ["", ""], "it was over before it was killed"
        done = train(tmp_path, *tracked)
        assert done.returncode == 0, done.stderr
        (run,) = server.runs(tmp_path)
        assert {*ids, run["info"]["run_id"]} == ids and len(ids) == 1
        check_whole(server, run, tmp_path / "run")
        assert server.history(run["info"]["run_id"], "QAT-loss").keys() == {
            50,
            100,
        }  # 3 epochs of 44 steps

    def _came_to(self, server: Server, folder: Path, stage: str, process: subprocess.Popen[bytes]) -> bool:
        return self._has(server, folder, stage) or process.poll() is not None

    @staticmethod
    def _has(server: Server, folder: Path, stage: str) -> bool:
        return any(
            key.startswith(f"{stage}-") for run in server.runs(folder) for key in values(run, "metrics")
        )

    @pytest.mark.parametrize("back", [True, False], ids=["it comes back", "it does not"])
    def test_a_server_that_goes_away_ends_no_training(
        self, server: Server, tmp_path: Path, back: bool
    ) -> None:
        typed = ("export.bundle=true", "schedule.epochs=6", "+model.kwargs.num_classes=10")
        alone = tmp_path / "alone"
        alone.mkdir()
        start = time.monotonic()
        assert train(alone, *typed).returncode == 0
        usual = time.monotonic() - start

        start, process = time.monotonic(), started(tmp_path, *typed, f"trainer.mlflow={server.uri}")
        soon(lambda: self._has(server, tmp_path, "float"))
        server.stop()
        away = f"trainer.mlflow={server.uri}: the tracking server does not answer"
        soon(lambda: away in (tmp_path / "told").read_text())
        if back:  # while the training is stopped
            process.send_signal(signal.SIGSTOP)
            server.start()
            process.send_signal(signal.SIGCONT)
        process.wait(timeout=1000)
        told = (tmp_path / "told").read_text()
        assert process.returncode == 0, told
        assert back or time.monotonic() - start < 2 * usual + 120
        assert "Traceback" not in told and ("later: " in told) is not back
        assert sha256(tmp_path / "run" / "model.int8.onnx") == sha256(alone / "run" / "model.int8.onnx")
        if not back:
            (later,) = re.findall(r"later: python (.*)", told)
            server.start()
            done = python(*later.split(), cwd=tmp_path)
            assert done.returncode == 0, done.stderr
        (run,) = server.runs(tmp_path)
        check_whole(server, run, tmp_path / "run")
        if back:  # the values that it missed are there, too
            found = server.history(run["info"]["run_id"], "QAT-loss")
            assert found.keys() == {50, 100, 150, 200, 250}  # 6 epochs of 44 steps

    def test_a_deleted_experiment_is_one_line(self, server: Server, tmp_path: Path) -> None:
        made = server.ask("experiments/create", name=tmp_path.name)["experiment_id"]
        server.ask("experiments/delete", experiment_id=made)
        done = train(tmp_path, f"trainer.mlflow={server.uri}")
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert done.stderr.startswith(
            f"error: name={tmp_path.name}: expected another name, since this experiment was deleted on "
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nobody", "silent", "another"])
def test_an_unreachable_server_is_one_line_before_anything_long(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        if kind != "nobody":
            port.listen()
        if kind == "another":
            threading.Thread(target=_another, args=(port,), daemon=True).start()
        uri, start = f"http://127.0.0.1:{port.getsockname()[1]}", time.monotonic()
        done = train(tmp_path, f"trainer.mlflow={uri}")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stdout + done.stderr
    assert done.stderr.startswith(f"error: trainer.mlflow={uri}: the tracking server does not answer (")
    assert time.monotonic() - start < 60 and not (tmp_path / "run").exists()


def _another(port: socket.socket) -> None:
    """Answers every request with 404, like a server that is not MLflow."""
    while True:
        try:
            one, _ = port.accept()
        except OSError:
            return
        with one:
            one.recv(4096)
            one.sendall(
                b"HTTP/1.1 404 Not Found\r\nContent-Length: 7\r\nContent-Type: text/html\r\n\r\nnothing"
            )


def test_names_of_parameters_are_such_as_mlflow_takes() -> None:
    settings = {"name": "n", "backend": {"overrides": {"blocks.*.[ab]": {"dtype": "int4"}}, "empty": {}}}
    assert parameters(settings) == {
        "name": "n", "backend.overrides.blocks._._ab_.dtype": "int4", "backend.empty": "{}"
    }  # fmt: skip


def test_each_kind_of_rejected_request_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exceptions = pytest.importorskip("mlflow.exceptions", reason="the extra mlflow is not installed")
    uri = "http://127.0.0.1:1"

    def rejected() -> None:
        raise exceptions.MlflowException("too long", error_code=exceptions.INVALID_PARAMETER_VALUE)

    logger = Tracker(tmp_path, uri, "name")
    for what in ("the settings", "metrics", "metrics", "bundle"):
        logger.send(rejected, what)
    told = capsys.readouterr().err.splitlines()
    assert told == [
        f"trainer.mlflow={uri}: the tracking server rejected {what} (too long)"
        for what in ("the settings", "metrics", "bundle")
    ]
    assert not logger.waiting


@pytest.mark.parametrize("report", [None, "{", "[]", '{"name": "n"}', '{"name": "n", "config": []}'])
def test_what_is_no_finished_run_is_logged_nowhere(
    report: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if report is not None:
        (tmp_path / "report.json").write_text(report)
    assert main([str(tmp_path), "http://127.0.0.1:1"]) == 2
    told = capsys.readouterr().err
    assert (
        told.startswith(f"error: run={tmp_path}: expected the folder of a finished run (report.json: ")
        and told.count("\n") == 1
    )
    assert [path.name for path in tmp_path.iterdir()] == ([] if report is None else ["report.json"])
