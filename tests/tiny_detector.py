"""A detector with one feature map that trains in seconds, and the configuration of its run."""

from __future__ import annotations

from pathlib import Path

import torch
from command_line import CONF
from torch import Tensor, nn

from qatkit.config.compose import compose_config
from qatkit.config.schema import Config
from qatkit.models.detectors.detector import Detector, grid
from qatkit.models.detectors.yolox import decoded
from qatkit.models.detectors.yolox_loss import YoloxLoss


class TinyDetector(Detector):
    """Predicts one box per cell of 8 x 8 pixels, like YOLOX on its finest feature map."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        layers = []
        for inputs, outputs, stride in ((3, 16, 2), (16, 32, 2), (32, 32, 2), (32, 32, 1)):
            layers += [
                nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
            ]
        self.backbone, self.head = nn.Sequential(*layers), nn.Conv2d(32, 4 + 1 + num_classes, 1)
        nn.init.constant_(self.head.bias[4:], -2.0)  # type: ignore[index]

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        rows = self.head(self.backbone(images)).flatten(2).transpose(1, 2)
        offsets, objectness, logits = rows[..., :4], rows[..., 4:5], rows[..., 5:]
        cells = grid(images.shape[2] // 8, images.shape[3] // 8, 8)
        boxes = decoded(offsets, cells, torch.full((len(cells), 1), 8.0))
        scores = logits.sigmoid() * objectness.sigmoid()
        return {
            "boxes": boxes,
            "scores": scores,
            "logits": logits,
            "objectness": objectness,
            "offsets": offsets,
        }

    @property
    def criterion(self):  # type: ignore[no-untyped-def]
        cells, strides = grid(6, 8, 8), torch.full((48, 1), 8.0)
        return lambda found, targets: YoloxLoss(cells, strides)(
            found[0], found[1], decoded(found[2], cells, strides), targets
        )


def asked(run: Path, root: Path, *changes: str) -> Config:
    return compose_config(
        CONF,
        [
            "data=voc_boxes", f"data.root={root}", "data.image_size=[48,64]", "data.workers=0", "data.batch_size=4",
            "data.augment=flip", "task=detection", f"model.name={__name__}.TinyDetector", "model.num_classes=null",
            f"output_dir={run}", "calibration.images=16", "calibration.batch_size=4", "verify.latency_runs=2",
            "verify.max_drop=8", "trainer.progress=false", "schedule.float_epochs=25", "schedule.float_lr=0.02",
            "schedule.optimizer=adamw", "schedule.epochs=1", "schedule.warmup=0.1", "schedule.lr=1e-4", *changes,
        ],
    )  # fmt: skip
