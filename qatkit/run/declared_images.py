"""Compares the image format that a model declares with the preprocessing of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from qatkit.config.schema import Config, ModelConfig
from qatkit.data.preprocessing import Preprocessing
from qatkit.importing.inputs import ImageInput
from qatkit.models.onnx_files import PREFIX
from qatkit.records.run_files import MODEL_FILE
from qatkit_verify.errors import ConfigError, counted
from qatkit_verify.fitting import UNIT

# Defaults of keys that may be missing in a model.json.
_USUAL = {"fit": "crop", "channel_order": "RGB", "layout": "NCHW", "pixels": UNIT}


def check_channels(config: Config, image: ImageInput | None, used: Preprocessing) -> None:
    """Raises ConfigError for images whose channels differ from those that the model declares."""
    wanted = None if image is None else image.image[0]
    if wanted in (None, used.channels):
        return
    file = config.model.name.removeprefix(PREFIX)
    allowed = f"{counted(wanted, 'number')}, since the input of {file} has {counted(wanted, 'channel')}"
    raise ConfigError("data.mean", list(used.mean), allowed)


def other_images(model: ModelConfig, told: Preprocessing | None, used: Preprocessing) -> tuple[str, ...]:
    """Returns a note for the report if the images are preprocessed differently than the model's model.json says."""
    if told in (None, used):
        return ()
    assert told is not None
    said, done = told.as_dict(), used.as_dict()
    keys = [key for key in {**said, **done} if said.get(key) != done.get(key)]
    return (
        f"the {MODEL_FILE} next to {Path(model.name).name} says {_listed(said, keys)}; "
        f"this run uses images with {_listed(done, keys)}, and measures its accuracy on them",
    )


def other_recordings(
    model: ModelConfig, told: Mapping[str, object] | None, used: Mapping[str, object]
) -> tuple[str, ...]:
    """Returns a note for the report if the recordings are preprocessed differently than the model's model.json says."""
    if told in (None, used):
        return ()
    assert told is not None
    keys = [key for key in {**told, **used} if told.get(key) != used.get(key)]
    return (
        f"the {MODEL_FILE} next to {Path(model.name).name} says {_listed(told, keys)}; "
        f"this run uses recordings with {_listed(used, keys)}, and measures its accuracy on them",
    )


def _listed(values: Mapping[str, object], keys: Iterable[str]) -> str:
    return ", ".join(f"{key} {values.get(key, _USUAL.get(key))}" for key in keys)
