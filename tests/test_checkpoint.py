"""Tests of checkpoints as training scripts write them: what is read, reported and refused."""

from __future__ import annotations

import argparse
import copy
import warnings
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from qatkit.config.schema import ModelConfig
from qatkit.models import build
from qatkit_verify.errors import ConfigError


def net(num_classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, num_classes))


def trained(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    model = net()
    model(torch.randn(4, 3, 4, 4))  # updates the running statistics
    return model


def taken(path: Path, **changes: Any) -> tuple[dict[str, Tensor], str]:
    """Returns the weights that a model loads from a file, and the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = build(ModelConfig(name=f"{__name__}.net", checkpoint=str(path), **changes), 3)
    return model.state_dict(), " ".join(str(one.message) for one in said)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in expected)


class Task(lightning.LightningModule):
    """A user's module that contains the model, a moving average and a loss with weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net, self.average = model, trained(2)
        self.criterion = nn.CrossEntropyLoss(weight=torch.ones(3))


def files() -> dict[str, Any]:
    """Returns what common training scripts save, by name."""
    model = trained()
    state, average = model.state_dict(), trained(2).state_dict()
    swa = torch.optim.swa_utils.AveragedModel(model)
    old = {key: value for key, value in state.items() if "num_batches_tracked" not in key}
    script = {"model": state, "model_ema": swa.state_dict(), "optimizer": {}, "epoch": 3}
    timm = {"epoch": 1, "arch": "net", "state_dict": state, "state_dict_ema": average, "version": 2}
    return {
        "plain": state,
        "DataParallel": nn.DataParallel(model).state_dict(),
        "compiled": {f"_orig_mod.{key}": value for key, value in state.items()},
        "a compiled part": {
            f"module.0._orig_mod.{k[2:]}" if k[0] == "0" else f"module.{k}": v for k, v in state.items()
        },
        "Lightning": {
            "state_dict": Task(model).state_dict(),
            "pytorch-lightning_version": "2",
            "callbacks": {},
        },
        "torchvision": {**script, "args": argparse.Namespace(lr=0.1, output_dir=Path("x"), device="cuda")},
        "timm": {**timm, "args": argparse.Namespace(model="net"), "metric": np.float64(81.5)},
        "SWA": swa.state_dict(),
        "old torch": old,
        "params": {"params": state, "params_ema": average},
        "model_state_dict": {"model_state_dict": state, "loss": torch.tensor(0.1)},
    }


@pytest.mark.parametrize("form", files())
def test_the_weights_are_those_that_were_saved(form: str, tmp_path: Path) -> None:
    torch.save(files()[form], tmp_path / "x.pt")
    found, _ = taken(tmp_path / "x.pt")
    expected = trained().state_dict()
    if form == "old torch":
        expected["1.num_batches_tracked"] = torch.tensor(0)
    assert same(found, expected)


def test_safetensors_are_read(tmp_path: Path) -> None:
    safetensors.torch.save_file(trained().state_dict(), tmp_path / "x.safetensors")
    assert same(taken(tmp_path / "x.safetensors")[0], trained().state_dict())


def test_what_was_taken_of_several_is_said_and_can_be_chosen(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(files()["timm"], path)
    assert "'state_dict' was loaded, not state_dict_ema" in taken(path)[1]
    assert same(taken(path, checkpoint_key="state_dict_ema")[0], trained(2).state_dict())
    with pytest.raises(
        ConfigError,
        match=r"checkpoint_key=ema: expected null or one of the state_dicts in .* \(state_dict, state_dict_ema",
    ):
        taken(path, checkpoint_key="ema")


def test_what_stands_beside_the_model_is_said(tmp_path: Path) -> None:
    torch.save(files()["Lightning"], tmp_path / "x.pt")
    said = taken(tmp_path / "x.pt")[1]
    # The average has 9 keys, the loss one.
    assert "keys outside of 'net.' were left out: average.0.weight and 9 more" in said
    torch.save(files()["plain"], tmp_path / "x.pt")
    assert taken(tmp_path / "x.pt")[1] == ""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_are_read_as_float32_and_said(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {k: v.to(dtype) if v.is_floating_point() else v for k, v in trained().state_dict().items()}
    torch.save(state, tmp_path / "x.pt")
    found, said = taken(tmp_path / "x.pt")
    assert same(found, {k: v.float() if v.is_floating_point() else v for k, v in state.items()})
    assert f"{str(dtype).removeprefix('torch.')} values were converted to float32" in said


def _changed(key: str, value: Tensor) -> dict[str, Tensor]:
    return {**trained().state_dict(), key: value}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            _changed("0.bias", torch.zeros(4, dtype=torch.complex64)),
            "0.bias is a complex64 tensor; only plain real numbers",
        ),
        (_changed("0.bias", torch.zeros(4).to_sparse()), "0.bias is a sparse tensor"),
        (_changed("0.bias", torch.zeros(4, device="meta")), "0.bias is a meta tensor"),
        (
            _changed("0.bias", torch.quantize_per_tensor(torch.zeros(4), 1.0, 0, torch.qint8)),
            "0.bias is a qint8 tensor",
        ),
        (_changed("3.bias", torch.tensor([0.0, float("nan"), 0.0])), "3.bias contains NaN"),
        (
            _changed("1.running_var", -torch.ones(4)),
            "1.running_var contains the variance -1, which is below 0",
        ),
        ({"model": {}}, "the file contains model"),
        ({"model": "resnet"}, "the file contains model"),
        (torch.zeros(3), "the file contains Tensor"),
        ([1, 2], "the file contains list"),
        ({}, "the file contains dict"),
    ],
    ids=range(11),
)
def test_what_no_model_can_take_is_refused(content: Any, said: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(ConfigError) as error:
        taken(tmp_path / "x.pt")
    text = str(error.value)
    assert text.startswith(f"model.checkpoint={tmp_path / 'x.pt'}: ") and said in text and "\n" not in text


def test_keys_that_do_not_fit_are_named_with_the_nearest(tmp_path: Path) -> None:
    state = trained().state_dict()
    torch.save({("head.weight" if k == "3.weight" else k): v for k, v in state.items()}, tmp_path / "x.pt")
    with pytest.raises(
        ConfigError,
        match=r"lacks 3.weight \(did you mean head.weight\?\); the file has the unexpected head.weight$",
    ):
        taken(tmp_path / "x.pt")


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_damaged_file_is_one_line(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{suffix}"
    state = copy.deepcopy(trained().state_dict())
    safetensors.torch.save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for damaged in (
        b"",
        b"text",
        whole[: len(whole) // 2],
        rng.bytes(len(whole)),
        whole[:50] + rng.bytes(200),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"damaged|contains pickled code|the file contains"):
            taken(path)
