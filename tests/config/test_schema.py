"""Tests of the configuration schema, option groups, recipes, limits, saved configurations and run folders."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any, cast

import pytest
import torchvision
from omegaconf import OmegaConf

from qatkit.config.compose import compose_config, load_config, save_config
from qatkit.config.rules import DOTTED, validate
from qatkit.config.schema import (
    BackendConfig,
    Config,
    ModelConfig,
    OverrideConfig,
    ScheduleConfig,
)
from qatkit.models import weights_preprocessing
from qatkit.run.find import output_dir
from qatkit_verify.dotted import resolve
from qatkit_verify.errors import ConfigError, as_typed

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
BACKENDS = sorted(path.stem for path in (CONF / "backend").glob("*.yaml"))
# Every third recipe is composed with one backend, taken in turn. The other pairs are slow tests.
PAIRS = [
    pytest.param(
        recipe, backend, marks=[] if i % 3 == 0 and (i + k) % len(BACKENDS) == 0 else [pytest.mark.slow]
    )
    for i, recipe in enumerate(RECIPES)
    for k, backend in enumerate(BACKENDS)
]
GROUPS = sorted(
    f"{path.parent.name}={path.stem}"
    for path in CONF.glob("*/*.yaml")
    if path.parent.name not in ("recipe", "launcher")  # launchers set Hydra's own keys; see test_sweep.py
)
SPACE = "search.space={schedule.lr:{low:1e-4,high:1e-2}}"
GIVEN = ("data.root=somewhere", "model.checkpoint=float.pt")  # keys that some recipes require


@pytest.mark.parametrize(("recipe", "backend"), PAIRS)
def test_every_recipe_composes_with_every_backend(recipe: str, backend: str) -> None:
    config = compose_config(CONF, [f"recipe={recipe}", f"backend={backend}", *GIVEN])

    assert config.name == recipe
    of_16_bits = {"w8a16": "fbgemm", "w4a16": "fbgemm"}  # FBGEMM with other number types
    assert config.backend.target == f"qatkit.quant.backends.{of_16_bits.get(backend, backend).upper()}"


def header(recipe: str) -> str:
    """Returns the comments above the settings of a recipe."""
    return (ROOT / "recipes" / f"{recipe}.yaml").read_text().split("defaults:")[0]


@functools.cache
def composed(recipe: str) -> Config:
    """Returns the configuration of the command in the header of a recipe."""
    command = re.search(r"^# uv run train.py(.*)$", header(recipe), re.MULTILINE)
    assert command is not None
    return compose_config(CONF, command[1].split())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_names_what_exists(recipe: str) -> None:
    """Dotted paths can be imported; torchvision, or the model's own package, has the model and its weights."""
    config = composed(recipe)

    for key in DOTTED:
        group, field = key.split(".")
        path = getattr(getattr(config, group), field)
        if "." in path:
            assert callable(resolve(path, key)) or key == "backend.target"
    if config.model.name.startswith(("onnx/", "hf/")):  # the user names the model's file or folder
        return
    if config.model.name.startswith("lite/"):
        pytest.importorskip("efficientnet_lite_pytorch")
        assert weights_preprocessing(config.model) is not None
        return
    if config.model.weights is not None:
        assert config.model.weights in torchvision.models.get_model_weights(config.model.name).__members__
    if "." not in config.model.name:
        kinds = (torchvision.models, torchvision.models.segmentation, torchvision.models.detection)
        assert any(config.model.name in torchvision.models.list_models(module=kind) for kind in kinds)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_says_its_command(recipe: str) -> None:
    assert composed(recipe).name == recipe
    # The header names the file of results if and only if there is one.
    measured = (ROOT / "recipes" / "results" / f"{recipe}.json").is_file()
    assert (f"recipes/results/{recipe}.json" in header(recipe)) == measured
    assert ("not run yet" in header(recipe)) == (not measured)


@pytest.mark.parametrize("option", GROUPS)
def test_every_option_of_every_group_composes(option: str) -> None:
    group = option.split("=")[0]
    # Every value of the file must arrive, so that no typo hides behind a default of the schema.
    config = compose_config(
        CONF, ["~recipe", option, *GIVEN, *([SPACE] if option == "search=optuna" else [])]
    )

    values = OmegaConf.to_container(OmegaConf.load(CONF / f"{option.replace('=', '/')}.yaml"))
    assert isinstance(values, dict)
    for part in values.pop("defaults", []):
        if part != "_self_":  # the file's own values win
            taken = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{part}.yaml"))
            values = cast(dict[str, Any], taken) | values
    if (CONF / f"{option.replace('=', '/')}.yaml").read_text().startswith("# @package _global_"):
        own = values.pop(group)  # the file also sets keys outside its group
        for key, value in values.items():
            assert getattr(config, str(key)) == value
        values = own
    composed = getattr(config, group)
    for field, value in values.items():
        if field not in ("root", "checkpoint") and "${onnx}" not in str(value):
            assert (composed[field] if isinstance(composed, dict) else getattr(composed, str(field))) == value
    assert not isinstance(composed, dict) or composed.keys() == values.keys()


def test_quickstart_runs_without_a_recipe() -> None:
    config = compose_config(CONF)

    assert config == compose_config(CONF, ["recipe=quickstart"])
    assert config.name == "quickstart"
    assert config.data.source == "qatkit.data.digits"
    assert config.schedule.float_epochs > 0


def test_recipes_override_axes_and_typed_values_override_both() -> None:
    assert compose_config(CONF, ["recipe=vit_qat", *GIVEN]).schedule.optimizer == "adamw"
    assert compose_config(CONF, ["recipe=vit_qat", "schedule=qat_sgd", *GIVEN]).schedule.optimizer == "sgd"
    assert compose_config(CONF, ["recipe=vit_qat", "schedule.lr=3e-6", *GIVEN]).schedule.lr == 3e-6


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("export.opset", 12, "an integer from 13 to 23"),
        ("calibration.images", 0, "an integer of at least 1"),
        ("calibration.percentile", 50.0, "a number above 50, up to 100"),
        ("calibration.percentile", 100.5, "a number above 50, up to 100"),
        ("calibration.deviations", 0.0, "a number above 0"),
        ("calibration.mixed_scales", "int8", "one of float, report"),
        ("calibration.mean_shifts", "bias", "one of correct, report"),
        ("data.augment", "flp", "one of none, flip, crop_flip, resized_crop"),
        ("data.batch_size", 0, "an integer of at least 1"),
        ("data.resize", 16, "a size that covers data.image_size=32"),
        ("data.resize", [40, 16], "a size that covers data.image_size=32"),
        ("data.resize", [40], "an integer of at least 1, or [height, width], or null"),
        ("data.image_size", [32, 0], "an integer of at least 1, or [height, width], or null"),
        ("data.image_size", "32x32", "an integer of at least 1, or [height, width], or null"),
        ("data.image_size", True, "an integer of at least 1, or [height, width], or null"),
        (
            "data.image_size",
            2**31,
            "an integer of at least 1, or [height, width], or null; the maximum is 2147483647",
        ),
        ("data.fit", "fill", "one of crop, resize, letterbox, or null"),
        ("data.pad_value", 256.0, "a number from 0 to 255, or null"),
        ("data.align", "left", "one of center, top_left, or null"),
        ("data.channels", "gbr", "one of rgb, bgr, or null"),
        ("data.layout", "hwc", "one of nchw, nhwc, or null (did you mean nhwc?)"),
        ("data.pixels", "0..256", "one of 0..1, 0..255, or null (did you mean 0..255?)"),
        ("data.mean", [0.1, 0.2], "one finite number per channel: 1 (grey) or 3 (RGB)"),
        ("data.std", [0.5], "null with data.mean=null"),
        ("data.workers", -1, "an integer of at least 0"),
        ("schedule.epochs", -1, "an integer of at least 0"),
        ("schedule.optimizer", "lion", "one of sgd, adamw"),
        ("schedule.decay", "step", "one of cosine, linear, constant"),
        ("schedule.batch_norm", "keep", "one of fold, freeze, train"),
        ("schedule.lr", 0.0, "a number above 0"),
        ("schedule.lr", float("nan"), "a number above 0"),
        ("schedule.lr", float("inf"), "a number above 0"),
        ("schedule.freeze_observers", 1.5, "a number from 0 to 1"),
        ("schedule.enable_fake_quant", -0.1, "a number from 0 to 1"),
        ("schedule.distill", 2.0, "a number from 0 to 1"),
        ("trainer.devices", 0, "an integer of at least 1, or -1 for all"),
        ("trainer.precision", "int8", "one of 32-true, bf16-mixed, 16-mixed"),
        ("trainer.accelerator", "npu", "one of auto, cpu, gpu, cuda"),
        ("verify.min_agreement", 99.9, "a number from 0 to 1"),
        ("verify.threads", 0, "an integer of at least 1"),
        ("analysis.sensitivity", "all", "one of none, estimate, exact"),
        ("analysis.top", 0, "an integer of at least 1"),
        ("analysis.images", 0, "an integer of at least 1"),
        ("analysis.batch_size", 0, "an integer of at least 1"),
        ("analysis.tensors", -1, "an integer of at least 0"),
        ("analysis.pictures", -1, "an integer of at least 0"),
        ("name", "a/b", "the name of a folder, without a path"),
        ("seed", -1, "an integer from 0 to 4294967295"),
    ],
)
def test_a_value_out_of_range_is_named(key: str, value: Any, allowed: str) -> None:
    config = compose_config(CONF)
    target: Any = config
    *groups, field = key.split(".")
    for group in groups:
        target = getattr(target, group)
    setattr(target, field, value)

    with pytest.raises(ConfigError) as raised:
        validate(config)

    assert str(raised.value).startswith(f"{key}={as_typed(value)}: expected {allowed}")


def test_a_size_is_a_number_or_two_on_the_command_line(tmp_path: Path) -> None:
    sides = ["data.image_size=[48,192]", "data.resize=[50,200]", "data.pixels=0..255", "data.fit=crop"]
    config = compose_config(CONF, [*sides, "data.channels=bgr", "data.layout=nhwc", "data.pad_value=127.5"])
    assert (config.data.image_size, config.data.resize) == ([48, 192], [50, 200])
    assert (config.data.channels, config.data.layout) == ("bgr", "nhwc")
    assert (config.data.pixels, config.data.pad_value) == ("0..255", 127.5)
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    assert compose_config(CONF, ["data.image_size=64", "data.pixels=0..1"]).data.image_size == 64
    for typed in ("true", "48x192", "[48]", "[48,192,3]", "48.5"):
        with pytest.raises(
            ConfigError, match=r"^data\.image_size=.*: expected an integer of at least 1, or \[height"
        ):
            compose_config(CONF, [f"data.image_size={typed}"])


def test_integer_ends_take_channels_first() -> None:
    config = compose_config(CONF, ["data.layout=nhwc"])
    config.export.io = "uint8"
    with pytest.raises(ConfigError, match=r"^export\.io=uint8: expected float32 with data\.layout=nhwc"):
        validate(config)


def test_the_ends_of_a_range_are_allowed() -> None:
    validate(Config(schedule=ScheduleConfig(epochs=0, freeze_observers=1.0, enable_fake_quant=0.0)))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (OverrideConfig(), "backend.overrides.conv1={}"),
        (
            OverrideConfig(float=True, weight_dtype="int8"),
            "backend.overrides.conv1={float: true, weight_dtype: int8}",
        ),
        (
            OverrideConfig(weight_dtype="int4", reduce_range=True),
            "backend.overrides.conv1.reduce_range=true: expected null with weight_dtype=int4",
        ),
        (
            OverrideConfig(weight_dtype="int5"),
            "backend.overrides.conv1.weight_dtype=int5: expected one of int8, int4, int3, int2",
        ),
        (
            OverrideConfig(activation_dtype="int4"),
            "backend.overrides.conv1.activation_dtype=int4: expected one of uint8, int8, uint4, int16, uint16",
        ),
    ],
)
def test_an_override_says_one_thing(override: OverrideConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate(Config(backend=BackendConfig(overrides={"conv1": override})))


def test_resolve_finds_what_the_path_names() -> None:
    assert resolve("torchvision.models.resnet18", "model.name") is torchvision.models.resnet18
    assert resolve("qatkit_verify.errors.ConfigError", "key") is ConfigError


@pytest.mark.parametrize(
    ("path", "fragment"),
    [
        ("resnet", "a dotted path, such as"),
        ("a..b", "a dotted path"),
        ("", "a dotted path, such as"),
        ("qatkit.nowhere.f", "No module named 'qatkit.nowhere'"),
        ("qatkit_verify.errors.ConfigEror", "a name in qatkit_verify.errors (did you mean ConfigError"),
    ],
)
def test_resolve_names_the_key_and_what_is_near(path: str, fragment: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve(path, "model.name")

    assert str(raised.value).startswith(f"model.name={path}: ")
    assert fragment in str(raised.value)


def test_a_saved_configuration_reads_back_equal(tmp_path: Path) -> None:
    overrides = {"op/linear": OverrideConfig(float=True), "layers.*.mlp": OverrideConfig(weight_dtype="int8")}
    config = Config(
        name="mine",
        model=ModelConfig(kwargs={"image_size": 32, "norm": None, "dims": [1, 2]}),
        backend=BackendConfig(overrides=overrides),
        schedule=ScheduleConfig(lr=1e-5),
    )
    config.data.mean, config.data.std = [0.1, 0.2, 0.3], [1.0, 1.0, 1.0]

    save_config(config, tmp_path / "config.yaml")

    assert load_config(tmp_path / "config.yaml") == config
    assert os.listdir(tmp_path) == ["config.yaml"]


@pytest.mark.parametrize(
    "text", ["schedule: {lrr: 1}", "schedule: {lr: fast}", "schedule: [1]", "just text", "a: [", "- 1"]
)
def test_an_invalid_saved_configuration_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError) as raised:
        load_config(path)

    assert str(raised.value).startswith(f"config={path}: expected a config.yaml written by train.py")
    assert "\n" not in str(raised.value)


def test_a_saved_value_out_of_range_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("export: {opset: 9}")

    with pytest.raises(ConfigError, match=r"export\.opset=9: expected an integer from 13 to 23"):
        load_config(tmp_path / "config.yaml")


def test_output_dir_is_dated_under_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert re.fullmatch(r"outputs/mine/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", str(output_dir(Config(name="mine"))))
    assert str(output_dir(Config(name="mine"), job=3)).endswith("_3")
    assert output_dir(Config(output_dir="here")) == Path("here")
    assert os.listdir(tmp_path) == []  # output_dir creates nothing


def test_an_output_dir_inside_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(
        ConfigError, match=r"output_dir=.*file/run: expected a folder that can be created and written to"
    ):
        output_dir(Config(output_dir=str(tmp_path / "file" / "run")))


def test_a_run_makes_every_check_of_the_schema() -> None:
    config = compose_config(CONF, ["recipe=quickstart"])
    assert list(config.verify.checks) == Config().verify.checks
    assert config.export.dynamic_axes == Config().export.dynamic_axes
