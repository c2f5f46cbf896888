"""Tests of mistakes in a user's own code: status 2 and one line with the exception, its file and line.

The cases are in tests/user_mistakes.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import ROOT, Launch, python
from user_mistakes import LOAD, MISTAKES, MODEL, NET, QUICK, SOURCE

from qatkit.config.schema import Config
from qatkit.jobs import pipeline

BASE = (
    "model.name=tiny_run.Net",
    "model.num_classes=null",
    "data.image_size=8",
    "data.workers=0",
    "data.batch_size=16",
    "calibration.images=32",
    "calibration.batch_size=16",
    "schedule=calibrate_only",
    "trainer=cpu",
    "trainer.progress=false",
    "verify.latency_runs=1",
    "verify.max_drop=null",
    "verify.threads=1",
    "output_dir=run",
)
HELPER = '''
import numpy as np
import torch
from PIL import Image
from torch import nn
from qatkit.data import Preprocessing, Splits, TensorImages

PIXELS = torch.randint(0, 256, (40, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = [i % 4 for i in range(40)]
NAMES = ("a", "b", "c", "d")
IN_WORKER = lambda: torch.utils.data.get_worker_info() is not None
HALVES = Preprocessing(8, 8, (0.5,) * 3, (0.5,) * 3)


class Images:
    """Gives what it is asked for."""
    def __init__(self, targets=LABELS, get=lambda index: (PIXELS[index], LABELS[index]), count=40):
        self.targets, self.get, self.count = targets, get, count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        return self.get(index)


def splits(train=None, classes=NAMES):
    return Splits(Images() if train is None else train, Images(), classes, HALVES)


def source(root, download, seed):
    return splits()


class Net(nn.Module):
    def __init__(self, num_classes=4):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, num_classes)
    def forward(self, x):
        return self.fc(torch.relu(self.conv(x)).mean((2, 3)))
'''
CHECK = "from qatkit.verify.checks.base import Check\nclass Mine(Check):\n    name = 'mine'\n"
CHECKS = "verify.checks=[qatkit.verify.checks.parity.ParityCheck,{}.Mine]"
BOUNDS = ["verify.audit=false", "verify.max_size_ratio=null"]
SLOW = "import os, time\n"  # imports for a slow dataset, for which worker processes pay off
LATE: dict[str, tuple[str, list[str], str]] = {
    "a worker": (
        f"{SLOW}def get(index):\n    time.sleep(0.02)\n"
        "    return PIXELS[index + 40 * IN_WORKER()], LABELS[index]  # here\n"
        f"{LOAD}    return Splits(Images(), Images(get=get), NAMES, HALVES)",
        [SOURCE, "data.workers=1", "data.eval_batch_size=8"],
        "data.source={}.load: the code raised an exception (IndexError: ",
    ),
    "a worker that ends": (
        f"{SLOW}def get(index):\n    time.sleep(0.02)\n"
        "    return os._exit(1) if IN_WORKER() else (PIXELS[index], LABELS[index])\n"
        f"{LOAD}    return Splits(Images(), Images(get=get), NAMES, HALVES)",
        [SOURCE, "data.workers=1", "data.eval_batch_size=8"],
        "data.workers=1: a worker process ended (DataLoader worker",
    ),
    "a forward in training": (
        f"{NET}        if self.training:\n            raise RuntimeError('not yet')  # here\n"
        "        return super().forward(x)",
        [MODEL, "schedule.float_epochs=1"],
        "model.name={}.Mine: the code raised an exception (RuntimeError: not yet; ",
    ),
    "an observer": (
        "from qatkit.quant.observers import MinMaxObserver\nclass Mine(MinMaxObserver):\n"
        "    def update(self, values, *rest):\n"
        "        values.no_such_method()  # here",
        ["calibration.observer={}.Mine"],
        "calibration.observer={}.Mine: the code raised an exception (AttributeError: ",
    ),
    "a quantizer": (
        "from qatkit.quant.fake_quantize import FakeQuantize\nclass Mine(FakeQuantize):\n    def forward(self, x):\n"
        "        return super().forward(x, 1)  # here",
        ["quantizer.activation={}.Mine"],
        "quantizer.activation={}.Mine: the code raised an exception (TypeError: ",
    ),
    "an observer of other arguments": (
        "from qatkit.quant.observers import MinMaxObserver\nclass Mine(MinMaxObserver):\n    def update(self): ...",
        ["calibration.observer={}.Mine"],
        "calibration.observer={}.Mine: the code raised an exception (TypeError: Mine.update() takes 1 positional",
    ),
    "what a check measures": (
        f"{CHECK}    def measure(self, subject, results):\n        return results.nothing  # here",
        [CHECKS, *BOUNDS],
        "verify.checks={}.Mine: the code raised an exception (AttributeError: ",
    ),
    "a check that gives nothing": (
        f"{CHECK}    def measure(self, subject, results): ...",
        [CHECKS, *BOUNDS],
        "verify.checks=mine: expected a check whose `measure` returns Results; the check returned NoneType",
    ),
}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yields a folder on the module path with a helper for users' modules, and unloads them afterwards."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "helper.py").write_text(HELPER)
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def job(config: Config) -> int:
    return pipeline.train(config)


def typed(name: str, settings: list[str]) -> list[str]:
    """Returns the command line of a case, with a data source unless the case names its own."""
    asked = [one.format(name) for one in settings]
    data = [] if any(one.startswith("data.source") for one in asked) else ["data.source=helper.source"]
    return [*BASE, *data, *asked]


def refused(
    case: tuple[str, list[str], str], folder: Path, launch: Launch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, settings, told = case
    name = f"mine_{len(code)}_{abs(hash(code)) % 10**6}"
    text = f"from helper import *\n{code}\n"
    (folder / f"{name}.py").write_text(text)

    status = launch(job, *typed(name, settings))

    said = capfd.readouterr()
    lines = [line for line in said.err.splitlines() if not line.startswith("warning: ")]
    assert status == 2, said
    line = lines[-1]
    assert line.startswith("error: ") and told.replace("{}", name) in line
    assert "Traceback" not in said.err and len(line) < 900
    here = [number for number, one in enumerate(text.splitlines(), 1) if one.endswith("# here")]
    for number in here:
        assert f"{folder / name}.py:{number}" in line


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in MISTAKES]
)
def test_a_mistake_of_a_user_is_one_line_with_its_place(
    case: str, written: Path, launch: Launch, capfd: pytest.CaptureFixture[str]
) -> None:
    refused(MISTAKES[case], written, launch, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("case", LATE)
def test_a_mistake_that_shows_late_is_one_line_too(
    case: str, written: Path, launch: Launch, capfd: pytest.CaptureFixture[str]
) -> None:
    refused(LATE[case], written, launch, capfd)


@pytest.mark.parametrize(
    "targets", ["np.array(LABELS)", "torch.tensor(LABELS)", "[np.int8(one) for one in LABELS]"]
)
def test_labels_of_numpy_and_torch_are_labels(targets: str, written: Path) -> None:
    from helper import Images, np, splits, torch  # type: ignore[import-not-found]

    from qatkit.config.schema import DataConfig
    from qatkit.data import DataModule

    given = eval(targets, {"np": np, "torch": torch, "LABELS": [i % 4 for i in range(40)]})
    both = splits(Images(given, lambda i: (torch.zeros(3, 8, 8, dtype=torch.uint8), given[i])))
    data = DataModule(DataConfig(workers=0, batch_size=40), lambda root, download, seed: both, 0)
    ((_, labels),) = data.train_dataloader()
    assert sorted(labels.tolist()) == sorted(i % 4 for i in range(40))


def test_the_traceback_is_there_when_asked_for(
    written: Path, launch: Launch, capfd: pytest.CaptureFixture[str]
) -> None:
    (written / "early.py").write_text("def load(root, download, seed):\n    return 1 / 0\n")
    assert launch(job, *typed("early", [SOURCE, "trainer.debug=true"])) == 2
    said = capfd.readouterr().err
    assert "Traceback" in said and 'early.py", line 2, in load\n    return 1 / 0' in said
    assert said.splitlines()[-1].startswith(
        "error: data.source=early.load: the code raised an exception (ZeroDivisionError: "
    )


def test_a_defect_of_ours_keeps_its_traceback(
    launch: Launch, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "keep_freed_memory", None)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        launch(job, *BASE)
    assert "error: " not in capfd.readouterr().err


@pytest.mark.slow
def test_a_real_command_line_says_one_line(written: Path, tmp_path: Path) -> None:
    """Runs the script in a separate process, with a data loader worker that raises."""
    source = "from helper import *\n" + LATE["a worker"][0]
    (written / "own.py").write_text(source)
    line = 1 + next(i for i, text in enumerate(source.splitlines()) if text.endswith("# here"))
    path = f"import sys; sys.path.insert(0, {str(written)!r}); sys.argv[0] = {str(ROOT / 'train.py')!r}; "
    run = f"import runpy; runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')"
    typed_there = typed("own", LATE["a worker"][1])
    typed_there[0] = "model.name=helper.Net"
    done = python("-c", path + run, *typed_there, cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{written / 'own.py'}:{line}" in done.stderr.splitlines()[-1]
