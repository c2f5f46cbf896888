"""The configuration's schema: one dataclass per group, each setting with its default, its meaning and its limits.

YAML files and command lines are checked against these dataclasses, and an error for a typo or a wrong type
names the key. They are plain dataclasses. Hydra and OmegaConf fill them, and only `qatkit.config` and the command
line import these two; the library receives filled dataclasses. Rules for several settings are in `rules`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from qatkit.config.fields import PLACE, Choices, Range, setting
from qatkit.config.schema.clean import CleanConfig
from qatkit.config.schema.files import (
    FILE_MODES,
    MODES,
    UNLABELLED_BOUNDS,
    AnalysisConfig,
    EncodingsConfig,
    ExportConfig,
    VerifyConfig,
)
from qatkit.config.schema.goals import PrecisionConfig, RescueConfig, SearchConfig, TargetConfig
from qatkit.config.schema.model import DataConfig, ModelConfig
from qatkit.config.schema.quantization import (
    BackendConfig,
    CalibrationConfig,
    OverrideConfig,
    QuantizerConfig,
    WeightsConfig,
)
from qatkit.config.schema.training import ScheduleConfig, TrainerConfig

__all__ = [
    "FILE_MODES",
    "MODES",
    "UNLABELLED_BOUNDS",
    "AnalysisConfig",
    "BackendConfig",
    "CalibrationConfig",
    "CleanConfig",
    "Config",
    "DataConfig",
    "EncodingsConfig",
    "ExportConfig",
    "ModelConfig",
    "OverrideConfig",
    "PrecisionConfig",
    "QuantizerConfig",
    "RescueConfig",
    "ScheduleConfig",
    "SearchConfig",
    "TargetConfig",
    "TrainerConfig",
    "VerifyConfig",
    "WeightsConfig",
]


@dataclass
class Config:
    """The settings of a run."""

    name: str = setting("run", "name of the run, which is also part of the path of its default folder", PLACE)
    seed: int = setting(0, "seed of every random draw", Range(0, 2**32 - 1))
    output_dir: str | None = setting(None, "folder of the run; null: outputs/NAME/DATE_TIME", PLACE)
    resume: str | None = setting(
        None,
        "auto: resume the newest unfinished run of this configuration, if there is one; null: start "
        "a new run; or the path of a checkpoint in a run's folder",
        PLACE,
    )
    checkpoint: str | None = setting(None, "export.py only: the checkpoint to export", PLACE)
    onnx: str | None = setting(
        None,
        "a float ONNX file. export.py: the file to quantize, clean or describe (mode), instead of a checkpoint; "
        "train.py: the model of recipe=onnx_ptq and recipe=onnx_qat",
        PLACE,
    )
    mode: str | None = setting(
        None,
        "with onnx=FILE, what is done with the file. static: quantize weights and activations, with "
        "calibration; dynamic: quantize weights, and activations at run time; float16: convert to "
        "float16; weight_only: quantize only weights (settings: weights.*); clean: only clean it "
        "(clean.*); summary: print a table of its operators; encodings: write the scales and zero "
        "points of a quantized file as JSON (encodings.*); null: only without onnx=FILE",
        FILE_MODES,
    )
    clean: CleanConfig = field(default_factory=CleanConfig)
    encodings: EncodingsConfig = field(default_factory=EncodingsConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    task: str = setting(
        "classification",
        "what the model is for: classification, audio_classification (of recordings), segmentation "
        "(one class per pixel), detection (boxes with classes), regression (numbers per sample), "
        "embedding (vectors of samples with class labels), text_classification (one class per text "
        "or pair of texts), causal_lm (the next token of a text), text_pairs (how related two texts "
        "are, from one embedding each), outputs (outputs of any meaning, compared with those of the "
        "float file), or the dotted path of a class derived from qatkit.tasks.base.Task",
    )
    placement: str = setting(
        "fixed",
        "which operators are int8. fixed: those that the backend lists; measured: the fastest of "
        "several placements on this machine, which are measured first; variants: only write the files "
        "of these placements, for qatkit-measure on another machine; or the placement.json of such a "
        "measurement",
        PLACE,
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    quantizer: QuantizerConfig = field(default_factory=QuantizerConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    algorithm: dict[str, Any] = setting(
        dict,
        "post-training algorithms, which need no labels, as NAME: {target: dotted path of a "
        "qatkit.algorithms.Algorithm, SETTING: value}; they run in the order of their stages, then "
        "as listed",
    )
    algorithm_choice: str = setting(
        "all",
        "all: run every listed algorithm; auto: keep those that reduce the error on held-out "
        "calibration samples by more than noise",
        Choices(("all", "auto")),
    )
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    analysis: AnalysisConfig = field(default_factory=AnalysisConfig)
    rescue: RescueConfig = field(default_factory=RescueConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
