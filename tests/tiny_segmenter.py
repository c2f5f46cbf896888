"""A segmenter that trains in seconds, and the configuration of its run."""

from __future__ import annotations

from pathlib import Path

from command_line import CONF
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.config.compose import compose_config
from qatkit.config.schema import Config


class TinySegmenter(nn.Module):
    """A segmenter that upsamples its logits from half the size, with an auxiliary head for training."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.head, self.aux = nn.Conv2d(16, num_classes, 1), nn.Conv2d(16, num_classes, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        middle = self.first(x)
        logits = {"out": self.head(self.second(middle)), "aux": self.aux(middle)}
        return {
            name: F.interpolate(one, x.shape[-2:], mode="bilinear", align_corners=False)
            for name, one in logits.items()
        }


def asked(run: Path, root: Path, *changes: str) -> Config:
    return compose_config(
        CONF,
        [
            "data=label_pictures", f"data.root={root}", "data.image_size=[24,32]", "data.ignored=[9]", "data.workers=0",
            "data.batch_size=4", "task=segmentation", f"model.name={__name__}.TinySegmenter", "model.num_classes=null",
            f"output_dir={run}",
            "calibration.images=16", "calibration.batch_size=4", "verify.latency_runs=2", "verify.max_drop=5",
            "trainer.progress=false", "schedule.float_epochs=8", "schedule.float_lr=0.02", "schedule.epochs=1",
            "schedule.warmup=0", "schedule.lr=1e-4", *changes,
        ],
    )  # fmt: skip
