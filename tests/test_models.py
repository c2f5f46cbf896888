"""Tests of the float model: names, pretrained weights, checkpoints, and one-line errors for bad input."""

from __future__ import annotations

import os
import pickle
import urllib.request
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer

from qatkit.config.schema import DataConfig, ModelConfig
from qatkit.data import DataModule, Preprocessing, image_folder
from qatkit.models import build, replace_heads, weights_preprocessing
from qatkit.models.torchvision_models import arguments
from qatkit_verify.errors import ConfigError

SHARED = Path(__file__).parents[1] / ".." / "shared"
VIT = "torchvision.models.vision_transformer.VisionTransformer"
VIT_KWARGS = {
    "image_size": 32,
    "patch_size": 4,
    "num_layers": 6,
    "num_heads": 3,
    "hidden_dim": 192,
    "mlp_dim": 768,
}
RESNET18_FILE = "resnet18-f37072fd.pth"


def tiny(num_classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, num_classes))


def headless() -> nn.Module:
    return nn.Identity()


def no_module() -> int:
    return 3


def refused(config: ModelConfig, num_classes: int | None = None) -> str:
    """Returns the message of the error that `build` raises, after checking that it is one line."""
    with pytest.raises(ConfigError) as caught:
        build(config, num_classes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def cached_resnet18(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Puts random weights into the download cache, where torchvision finds them; returns their state_dict."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    state: dict[str, torch.Tensor] = torchvision.models.resnet18().state_dict()
    torch.save(state, folder / RESNET18_FILE)
    return state


# --- names and numbers of classes


@pytest.mark.parametrize("name", ["squeezenet1_1", "mobilenet_v3_small"])
def test_a_torchvision_name_builds_that_model_in_eval_mode(name: str) -> None:
    model = build(ModelConfig(name=name), num_classes=7)
    assert type(model) is type(torchvision.models.get_model(name))
    assert not any(module.training for module in model.modules())
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 7)


def test_googlenet_builds_without_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build(ModelConfig(name="googlenet"), num_classes=4)
    assert model.aux1 is not None  # torchvision's default


def test_a_dotted_path_builds_a_class_or_a_function_of_the_users() -> None:
    model = build(ModelConfig(name=VIT, kwargs=VIT_KWARGS), num_classes=10)
    assert isinstance(model, VisionTransformer)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    for path in (f"{__name__}.tiny", f"{__name__}:tiny"):
        assert build(ModelConfig(name=path), 5)(torch.zeros(2, 12)).shape == (2, 5)
    assert build(ModelConfig(name=f"{__name__}.tiny"))(torch.zeros(2, 12)).shape == (2, 3)
    assert isinstance(build(ModelConfig(name=f"{__name__}.headless"), 5), nn.Identity)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            ModelConfig(name="resnet19"),
            "model.name=resnet19: expected a torchvision model or a dotted path (did you mean",
        ),
        (
            ModelConfig(name="no_such_package.net"),
            "model.name=no_such_package.net: expected a dotted path that can be imported (No mod",
        ),
        (
            ModelConfig(name="torchvision.models.nope"),
            "model.name=torchvision.models.nope: expected a name in torchvision.models (did you mean ",
        ),
        (ModelConfig(name="torchvision.__version__"), "a function or class, not str"),
        (ModelConfig(name=f"{__name__}.no_module"), "a callable that returns an nn.Module, not int"),
        (
            ModelConfig(kwargs={"widht": 2}),
            "model.kwargs={widht: 2}: expected arguments that resnet18 accepts (",
        ),
        (
            ModelConfig(weights="IMAGENET1K_V9"),
            "model.weights=IMAGENET1K_V9: expected one of IMAGENET1K_V1, DEFAULT",
        ),
        (ModelConfig(name="mnasnet0_5", weights="x"), "IMAGENET1K_V1, DEFAULT"),
        (
            ModelConfig(name=VIT, weights="DEFAULT"),
            "model.weights=DEFAULT: expected null for a builder of your own",
        ),
        (
            ModelConfig(weights="DEFAULT", checkpoint="x.pt"),
            "model.checkpoint=x.pt: expected an existing file",
        ),
        (ModelConfig(num_classes=0), "model.num_classes=0: expected an integer of at least 1"),
        (ModelConfig(checkpoint="/absent/x.pt"), "model.checkpoint=/absent/x.pt: expected an existing file"),
    ],
)
def test_bad_configuration(config: ModelConfig, message: str) -> None:
    assert message in refused(config)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("resnet18", {}),
        ("googlenet", {"transform_input": True, "aux_logits": False, "init_weights": False}),
        ("inception_v3", {"transform_input": True, "init_weights": False}),
    ],
)
def test_a_checkpoint_replaces_the_weights_a_model_started_from(
    name: str, kwargs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pretrained weights are not downloaded, but the input normalization that they may imply is kept."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "nothing"))
    trained = torchvision.models.get_model(name, num_classes=7, **kwargs).eval()
    torch.save(trained.state_dict(), tmp_path / "mine.pt")
    config = ModelConfig(name=name, weights="DEFAULT", checkpoint=str(tmp_path / "mine.pt"))
    images = torch.rand(2, 3, 96, 96)
    torch.testing.assert_close(build(config, 7)(images), trained(images), rtol=0, atol=0)
    assert not (tmp_path / "nothing").exists()
    assert weights_preprocessing(config) == weights_preprocessing(ModelConfig(name=name, weights="DEFAULT"))


@pytest.mark.parametrize(("weights", "size"), [("IMAGENET1K_V1", 224), ("IMAGENET1K_SWAG_E2E_V1", 384)])
def test_a_vit_has_the_positions_of_its_weights(weights: str, size: int) -> None:
    assert arguments(ModelConfig(name="vit_b_16", weights=weights)) == {"image_size": size}


def test_the_near_names_are_told() -> None:
    assert "resnet18" in refused(ModelConfig(name="resnet19"))


def test_numbers_of_classes_must_agree() -> None:
    text = refused(ModelConfig(num_classes=10), num_classes=12)
    assert text == "model.num_classes=10: expected null or 12, the number of classes of the data"
    text = refused(ModelConfig(kwargs={"num_classes": 10}), num_classes=12)
    assert text == "model.kwargs.num_classes=10: expected null or 12, the number of classes of the data"
    model = build(ModelConfig(name="squeezenet1_1", num_classes=10), 10)
    assert model.state_dict()["classifier.1.bias"].shape == (10,)


# --- pretrained weights


def test_weights_keep_their_head_for_the_same_classes(cached_resnet18: dict[str, torch.Tensor]) -> None:
    for classes in (None, 1000):
        model = build(ModelConfig(weights="IMAGENET1K_V1"), classes)
        for key, value in model.state_dict().items():
            assert torch.equal(value, cached_resnet18[key]), key


@pytest.mark.parametrize("given", ["config", "data"])
def test_weights_get_a_new_head_for_other_classes(
    cached_resnet18: dict[str, torch.Tensor], given: str
) -> None:
    config = ModelConfig(weights="DEFAULT", num_classes=10 if given == "config" else None)
    state = build(config, 10 if given == "data" else None).state_dict()
    assert state["fc.weight"].shape == (10, 512)
    assert state["fc.bias"].shape == (10,)
    kept = [key for key in cached_resnet18 if not key.startswith("fc.")]
    assert all(torch.equal(state[key], cached_resnet18[key]) for key in kept)
    assert len(kept) == 120


@pytest.mark.parametrize(
    ("name", "changed", "size"),
    [
        ("mobilenet_v2", ["classifier.1"], 64),
        ("vit_b_32", ["heads.head"], 224),
        ("squeezenet1_1", ["classifier.1"], 64),
        ("densenet121", ["classifier"], 64),
        ("swin_t", ["head"], 64),
        ("googlenet", ["aux1.fc2", "aux2.fc2", "fc"], 64),
        ("inception_v3", ["AuxLogits.fc", "fc"], 299),
    ],
)
def test_only_the_classifiers_are_replaced(name: str, changed: list[str], size: int) -> None:
    kwargs = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model = torchvision.models.get_model(name, **kwargs).eval()
    before = dict(model.named_modules())
    replace_heads(model, 1000, 6)
    assert sorted(path for path, module in model.named_modules() if module is not before[path]) == changed
    with torch.inference_mode():
        assert model(torch.zeros(1, 3, size, size)).shape == (1, 6)


def test_a_model_without_such_a_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.num_classes=6: the model has no layer with 7 outputs"):
        replace_heads(tiny(3), 7, 6)


def test_unavailable_weights_name_the_file_and_where_to_put_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(urllib.request, "_opener", None)  # an existing opener would ignore the proxy
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # a closed port: the connection really fails
    for name in ("no_proxy", "NO_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    text = refused(ModelConfig(weights="IMAGENET1K_V1"))
    assert text.startswith("model.weights=IMAGENET1K_V1: the weights cannot be fetched (")
    assert f"put {RESNET18_FILE} from https://" in text
    assert text.endswith(f"into {tmp_path / 'hub' / 'checkpoints'}")
    monkeypatch.setattr(urllib.request, "_opener", None)


def test_a_damaged_download_is_named(cached_resnet18: dict[str, torch.Tensor], tmp_path: Path) -> None:
    file = tmp_path / "hub" / "checkpoints" / RESNET18_FILE
    file.write_bytes(file.read_bytes()[:100_000])
    assert f"delete {file} to fetch them again" in refused(ModelConfig(weights="IMAGENET1K_V1"))


@pytest.mark.parametrize(
    ("name", "weights", "expected"),
    [
        ("resnet50", "IMAGENET1K_V2", (224, 232, "bilinear")),
        ("vit_b_16", "IMAGENET1K_SWAG_E2E_V1", (384, 384, "bicubic")),
        ("inception_v3", "DEFAULT", (299, 342, "bilinear")),
    ],
)
def test_preprocessing_of_the_weights(name: str, weights: str, expected: tuple[int, int, str]) -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    found = weights_preprocessing(ModelConfig(name=name, weights=weights))
    assert found == Preprocessing(*expected[:2], mean, std, expected[2])


def test_without_weights_there_is_no_preprocessing() -> None:
    assert weights_preprocessing(ModelConfig()) is None
    with pytest.raises(ConfigError, match=r"model\.weights=V7: expected one of IMAGENET1K_V1, DEFAULT"):
        weights_preprocessing(ModelConfig(weights="V7"))


# --- checkpoints


@pytest.mark.parametrize("form", ["plain", "lightning", "torchvision", "ddp", "lightning module"])
def test_checkpoints_load_in_every_usual_form(tmp_path: Path, form: str) -> None:
    torch.manual_seed(1)
    state = tiny().state_dict()
    content: dict[str, Any] = {
        "plain": state,
        "lightning": {"state_dict": state, "epoch": 3},
        "torchvision": {"model": state, "optimizer": {}},
        "ddp": {f"module.{key}": value for key, value in state.items()},
        "lightning module": {"state_dict": {f"model.{key}": value for key, value in state.items()}},
    }[form]
    torch.save(content, tmp_path / "x.pt")
    model = build(ModelConfig(name=f"{__name__}.tiny", checkpoint=str(tmp_path / "x.pt")), 3)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert not model.training


class Code:
    """An object whose pickle calls a function when it is loaded, as a malicious file would."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_bad_checkpoints_are_refused_in_one_line(tmp_path: Path) -> None:
    good = tmp_path / "good.pt"
    torch.save(tiny().state_dict(), good)

    def message(name: str, content: bytes | None = None) -> str:
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        text = refused(ModelConfig(name=f"{__name__}.tiny", checkpoint=str(path)), 3)
        assert text.startswith(f"model.checkpoint={path}: ")
        return text

    data = good.read_bytes()
    assert "damaged" in message("empty.pt", b"")
    assert "damaged" in message("text.pt", b"not a checkpoint at all")
    assert "damaged" in message("short.pt", data[: len(data) // 2])
    bias = torch.rand(3)
    weight = bias.numpy().tobytes()
    torch.save({"1.weight": torch.zeros(3, 12), "1.bias": bias}, good)
    data = good.read_bytes()
    assert data.count(weight) == 1
    assert "fails its checksum" in message("flipped.pt", data.replace(weight, bytes(len(weight))))
    assert "an existing file" in message(".")

    marker = tmp_path / "ran"
    torch.save({"1.weight": Code(marker)}, tmp_path / "code.pt")
    assert "contains pickled code (posix.mkdir), which is never run" in message("code.pt")
    message("code2.pt", pickle.dumps(Code(marker)))
    torch.save(tiny(), tmp_path / "module.pt")
    assert "contains pickled code (torch.nn.modules.container.Sequential)" in message("module.pt")
    assert not marker.exists()

    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"epoch": 3}, tmp_path / "other.pt")
    torch.save({}, tmp_path / "nothing.pt")
    for name in ("list.pt", "other.pt", "nothing.pt"):
        assert "a file with a state_dict" in message(name)


def test_a_checkpoint_of_another_architecture_names_first_keys(tmp_path: Path) -> None:
    path = str(tmp_path / "x.pt")
    torch.save(torchvision.models.resnet18(num_classes=3).state_dict(), path)
    text = refused(ModelConfig(name=f"{__name__}.tiny", checkpoint=path), 3)
    assert "tiny; the file lacks 1.weight and 1 more (did you mean " in text
    assert text.endswith("); the file has the unexpected conv1.weight and 121 more")
    text = refused(ModelConfig(checkpoint=path), 10)
    assert text.endswith(
        "a checkpoint of resnet18; fc.weight and 1 more have another shape ((3, 512) instead of (10, 512))"
    )


# --- the shared checkpoints


@pytest.fixture(scope="module")
def cifar_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with 200 test images, 20 of each class, and one training image per class."""
    archive = SHARED / "data" / "cifar10_jpeg.zip"
    if not archive.is_file():
        pytest.skip("needs ../shared/data/cifar10_jpeg.zip")
    root = tmp_path_factory.mktemp("cifar10")
    with zipfile.ZipFile(archive) as images:
        for name in images.namelist():
            split, _, file = name.partition("/")
            number = Path(file).stem
            if number.isdigit() and int(number) < {"train": 1, "test": 20}[split]:
                images.extract(name, root)
    return root


@pytest.mark.skipif(not (SHARED / "checkpoints").is_dir(), reason="needs ../shared/checkpoints")
@pytest.mark.parametrize(
    ("name", "file", "size", "kwargs", "accuracy"),
    [
        ("resnet18", "resnet18_cifar10.pt", 64, {}, 0.786),
        ("mobilenet_v2", "mobilenet_v2_cifar10.pt", 64, {}, 0.792),
        (VIT, "vit_cifar10.pt", 32, VIT_KWARGS, 0.672),
    ],
)
def test_the_real_checkpoints_recognise_real_images(
    name: str, file: str, size: int, kwargs: dict[str, Any], accuracy: float, cifar_folder: Path
) -> None:
    config = DataConfig(root=str(cifar_folder), image_size=size, workers=0)
    config.mean, config.std = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
    data = DataModule(config, image_folder, 0)
    model = build(ModelConfig(name=name, checkpoint=str(SHARED / "checkpoints" / file), kwargs=kwargs), 10)
    with torch.inference_mode():
        hits = [model(images).argmax(1) == labels for images, labels in data.test_batches()]
    # `accuracy` is measured on all 10,000 test images; on 200 of them, its standard deviation is 3 points.
    assert torch.cat(hits).float().mean().item() == pytest.approx(accuracy, abs=0.09)
