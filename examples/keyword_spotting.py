"""A DS-CNN for keyword spotting on spectrograms, from waveforms to a verified INT8 file, in plain Python.

    uv run examples/keyword_spotting.py [FOLDER]

The model is that of Zhang et al., "Hello Edge: Keyword Spotting on Microcontrollers", 2017. Spoken words would need
a download, so four kinds of tones in noise replace them: rising, falling, steady and pulsed. Everything else is as
with real data: a spectrogram with one channel, 49 frames by 40 bins, and a model that is not for images.
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from qatkit.config.schema import ScheduleConfig
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.simplify import float_baseline
from qatkit.models.ds_cnn import DSCNN
from qatkit.train.learner import FloatModule
from qatkit.train.module import QATModule
from qatkit.verify.accuracy import accuracy
from qatkit.verify.audit import audit
from qatkit.verify.parity import parity
from qatkit_verify.session import open_session

KEYWORDS = ("rising", "falling", "steady", "pulsed")
RATE, SAMPLES, FFT, HOP, BINS = 8000, 8000, 256, 160, 40


def spectrograms(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns the spectrograms of `count` seconds of tones in noise, and their labels [count].

    Each second has a spectrogram of its own; together they are [count, 1, 49, 40], in log power divided by 4.
    """
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(KEYWORDS), (count,), generator=draw)
    time = torch.arange(SAMPLES) / RATE
    base = 300 + 500 * torch.rand(count, 1, generator=draw)
    slope = torch.tensor([400.0, -250.0, 0.0, 0.0])[labels].unsqueeze(1)
    tone = torch.sin(2 * torch.pi * (base * time + slope / 2 * time**2))
    pulses = torch.where(labels == 3, 1.0, 0.0).unsqueeze(1)
    tone = tone * (1 - pulses * (torch.sin(2 * torch.pi * 6 * time) < 0).float())
    sound = tone + 0.7 * torch.randn(count, SAMPLES, generator=draw)
    power = torch.stft(sound, FFT, HOP, window=torch.hann_window(FFT), center=False, return_complex=True)
    return (power.abs().square()[:, :BINS].clamp(min=1e-6).log() / 4).transpose(1, 2).unsqueeze(1), labels


def main(folder: Path) -> dict[str, float]:
    """Trains, quantizes, fine-tunes, exports and verifies; returns top-1 in percent of "float" and "int8"."""
    lightning.seed_everything(0, verbose=False)
    folder.mkdir(parents=True, exist_ok=True)
    train, test = (TensorDataset(*spectrograms(n, seed)) for n, seed in ((1024, 0), (512, 1)))
    loader = DataLoader(train, batch_size=64, shuffle=True)
    schedule = ScheduleConfig(lr=2e-3, float_lr=5e-2, optimizer="sgd")

    def fit(module: lightning.LightningModule, epochs: int) -> None:
        lightning.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False,
                          enable_model_summary=False).fit(module, loader)  # fmt: skip

    model = DSCNN(len(KEYWORDS))
    fit(FloatModule(model, schedule), 4)
    model.eval()

    module = QATModule(model, train.tensors[0][:2], schedule)
    module.calibrate(images for images, _ in DataLoader(train, batch_size=64))
    fit(module, 1)
    module.eval()
    module.ready_to_convert()

    files = {"float": folder / "float.onnx", "int8": folder / "int8.onnx"}
    export_onnx(float_baseline(model, train.tensors[0][:2]), train.tensors[0][:2], files["float"])
    converted = module.convert().graph
    export_onnx(converted, train.tensors[0][:2], files["int8"])

    batches = DataLoader(test, batch_size=64)
    found = {
        name: accuracy(open_session(path, threads=2), batches, progress=False).score
        for name, path in files.items()
    }
    agreed = parity(converted, files["int8"], batches)
    audited = audit(files["int8"])
    print(f"top-1 in ONNX Runtime: float {found['float']:.2f} %, INT8 {found['int8']:.2f} %")
    print(
        f"the file agrees with the converted module on {100 * agreed.agreement:.2f} % of {agreed.images} samples"
    )
    print(f"{100 * audited.int8_share:.1f} % of multiply-accumulates in int8; files: {folder}")
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "outputs/keyword_spotting"))
