"""Tests of the refusal, with figures, of runs that need more memory than there is or more than a year."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_run import Net, calibrate_only, tiny
from torch import nn

from qatkit import models
from qatkit.config.schema import Config, ModelConfig
from qatkit.data import DataModule, sources
from qatkit.jobs import pipeline
from qatkit.run import memory
from qatkit_verify.errors import ConfigError

IMAGE = 4 * 3 * 8 * 8  # bytes of one float32 image


def data_of(config: Config) -> DataModule:
    return DataModule(config.data, sources.digits, config.seed)


def test_the_memory_available_is_that_of_the_machine_or_less() -> None:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total = int(lines["MemTotal"].split()[0]) * 1024
    found = memory.available_memory()

    assert found is not None and 2**27 < found <= total


@pytest.mark.parametrize("version", [1, 2])
def test_files_that_a_group_keeps_in_memory_make_room(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks a control group with mostly file cache, as in a container that has read an epoch of images."""
    names = {1: ("memory/", "limit_in_bytes", "usage_in_bytes", "total_"), 2: ("", "max", "current", "")}
    folder, limit, usage, prefix = names[version]
    group = tmp_path / folder
    group.mkdir(exist_ok=True)
    (group / f"memory.{limit}").write_text(f"{700 * 2**20}\n")
    (group / f"memory.{usage}").write_text(f"{690 * 2**20}\n")
    kept = {"anon": 90, f"{prefix}inactive_file": 400, f"{prefix}active_file": 150, "kernel": 20}
    (group / "memory.stat").write_text("".join(f"{name} {mib * 2**20}\n" for name, mib in kept.items()))
    cgroup = tmp_path / "cgroup"
    cgroup.write_text("12:cpu:/\n5:memory:/here\n" if version == 1 else "0::/here\n")
    monkeypatch.setattr(memory, "GROUPS", tmp_path)
    monkeypatch.setattr(memory, "OWN_GROUPS", cgroup)
    assert memory.available_memory() == (700 - (690 - 550)) * 2**20


def test_a_batch_whose_input_alone_exceeds_memory_is_refused(tmp_path: Path) -> None:
    config = calibrate_only(tmp_path)
    room = memory.available_memory()
    assert room is not None
    config.verify.latency_batch = 2 * room // IMAGE

    with pytest.raises(
        ConfigError, match=r"^verify.latency_batch=\d+: expected at most (\d+) here, for samples of 3x8x8; "
    ) as caught:
        memory.check_inputs(config, data_of(config))

    most = int(str(caught.value).split("at most ")[1].split()[0])
    assert most * IMAGE == pytest.approx(room, rel=0.2)  # other processes use memory, too
    config.verify.latency_batch = most // 2
    memory.check_inputs(config, data_of(config))


def test_a_run_says_so_before_anything_is_written(tmp_path: Path) -> None:
    config = calibrate_only(tmp_path / "run")
    config.verify.latency_batch = 2**31 - 1

    with pytest.raises(
        ConfigError,
        match=r"^verify.latency_batch=2147483647: expected at most \d+ here, for samples of 3x8x8; the inputs need "
        "1.65 TB",
    ):
        pipeline.train(config)
    assert not (tmp_path / "run").exists()


def test_an_image_that_is_larger_than_the_memory_names_its_size(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    config.data.image_size = 2_000_000

    with pytest.raises(
        ConfigError, match=r"^data.image_size=2000000: expected at most \d+ here; one image needs 48 TB"
    ):
        memory.check_inputs(config, data_of(config))


def test_an_image_too_small_for_the_model_names_its_size(tmp_path: Path) -> None:
    config = calibrate_only(tmp_path / "run")
    config.model = replace(config.model, name="squeezenet1_1")
    config.data.image_size = 1

    with pytest.raises(ConfigError, match=r"^model.name=squeezenet1_1: .*\[N, 3, 1, 1\], as data.image_size"):
        pipeline.train(config)


def test_a_batch_larger_than_the_data_needs_memory_for_the_data(tmp_path: Path) -> None:
    config = calibrate_only(tmp_path)
    config.data.eval_batch_size = 2**31 - 1  # 360 test images

    memory.check_inputs(config, data_of(config))


def test_a_model_costs_what_its_modules_give() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)
    )

    _, cost = memory.measured(model, torch.zeros(2, 3, 8, 8), 2)

    assert cost.largest == 4 * 16 * 4 * 4
    assert cost.kept == 4 * (3 * 16 * 4 * 4 + 10)
    assert 0 < cost.seconds < 1


def test_activations_that_training_keeps_are_counted(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    config.trainer.accelerator = "cpu"
    room = memory.available_memory()
    assert room is not None
    much = memory.Cost(largest=1000, kept=room // 16, seconds=1e-6)  # times 32 images

    with pytest.raises(
        ConfigError,
        match=r"^data.batch_size=32: expected at most 1\d here, for samples of 3x8x8; the activations need ",
    ):
        memory.check_model(config, data_of(config), much)
    memory.check_model(config, data_of(config), replace(much, kept=room // 64))


@pytest.mark.parametrize(
    ("key", "value"),
    [("schedule.epochs", 10**9), ("schedule.float_epochs", 10**9), ("verify.latency_runs", 2 * 10**9)],
)
def test_what_would_take_years_is_refused(tmp_path: Path, key: str, value: int) -> None:
    config = tiny(tmp_path)
    group, name = key.split(".")
    setattr(getattr(config, group), name, value)
    cost = memory.Cost(largest=1000, kept=1000, seconds=0.1)

    with pytest.raises(
        ConfigError, match=rf"^{key}={value}: expected at most (\d+) here; [\d,]+ would take [\d,]+ days"
    ) as caught:
        memory.check_model(config, data_of(config), cost)

    most = int(str(caught.value).split("at most ")[1].split()[0])
    setattr(getattr(config, group), name, most)
    memory.check_model(config, data_of(config), cost)


def test_a_year_is_counted_in_steps_of_the_model(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    config.schedule.epochs = 1
    data, cost = data_of(config), memory.Cost(1, 1, 0.01)

    memory.check_model(config, data, cost)  # 44 batches of 32, 3 passes each: 42 seconds
    config.schedule.max_steps = None
    config.schedule.epochs = int(366 * 86400 / (44 * 32 * 3 * 0.01))
    with pytest.raises(ConfigError, match="366 days"):
        memory.check_model(config, data, cost)
    config.schedule.max_steps = 100
    memory.check_model(config, data, cost)


def test_the_tiny_model_runs_twice_and_is_left_as_it_was() -> None:
    model = Net().eval()
    memory.measured(model, torch.zeros(2, 3, 8, 8), 2)

    assert not any(one._forward_hooks for one in model.modules())


def test_an_oblong_image_that_is_too_large_names_its_pixels(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    config.data.image_size = [1_000_000, 4_000_000]

    with pytest.raises(
        ConfigError,
        match=(
            r"^data.image_size=\[1000000, 4000000\]: expected at most \d+ pixels "
            r"in total here; one image needs 48 TB"
        ),
    ):
        memory.check_inputs(config, data_of(config))


def test_weights_that_memory_does_not_hold_are_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the files' headers are read: the model and its quantized copy need 4 bytes per parameter each."""
    counts = {"a": 100_000_000, "b": 20_000_000}
    for name, count in counts.items():
        tensor = {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}
        header = json.dumps({"__metadata__": {"format": "pt"}, "w": tensor}).encode()
        with (tmp_path / f"{name}.safetensors").open("wb") as stream:
            stream.write(len(header).to_bytes(8, "little") + header)
            stream.truncate(8 + len(header) + 4 * count)
    config = replace(calibrate_only(tmp_path), model=ModelConfig(f"hf/{tmp_path}", weights="DEFAULT"))
    found = models.parameters(config.model)
    assert found == sum(counts.values())

    monkeypatch.setattr(memory, "available_memory", lambda: 950_000_000)
    with pytest.raises(
        ConfigError, match=r"fits into memory; 120,000,000 parameters need 960 MB .* 950 MB is available"
    ):
        memory.check_weights_fit(config, found)
    monkeypatch.setattr(memory, "available_memory", lambda: 970_000_000)
    memory.check_weights_fit(config, found)
    memory.check_weights_fit(config, models.parameters(ModelConfig("hf/vit")))
    with pytest.raises(
        ConfigError, match="a model of at most 532,676,608 parameters, since an ONNX file is limited to 2 GB"
    ):
        memory.check_weights_fit(config, 2**29)
