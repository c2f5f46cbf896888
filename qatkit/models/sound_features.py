"""Features of recordings, computed in the model's graph (`data.features_in=graph`).

    samples [N, T] ── Conv1d with windowed cosines and sines ── squares ── Conv1d 1x1: mel bands ── ln (── 1x1: DCT)
                   ── (x - mean) / std ── [N, 1, frames, bands] ── the model

The kernels are those of `qatkit_verify.sound` and are not trained. The operators are standard ones of opset 13 and stay
float, because power spans too many orders of magnitude for 8 bits.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qatkit_verify.sound import SoundPreprocess, cosines, triangles, waves
from qatkit_verify.sound_limits import MFCC

FEATURES = "features"  # name of the module, by which overrides leave its operators float


class SoundFeatures(nn.Module):
    """A module from samples [N, T] in -1..1 to features [N, 1, frames, bands].

    Args:
        sound: the preprocessing to compute.
    """

    def __init__(self, sound: SoundPreprocess) -> None:
        super().__init__()
        real, imaginary = (part.T / 2.0**20 for part in waves(sound.window))
        self.real, self.imaginary = (_fixed(one[:, None], sound.hop) for one in (real, imaginary))
        index, weight = triangles(sound.rate, sound.window, sound.mels)
        bands = np.zeros((sound.mels, sound.window // 2 + 1))
        np.add.at(bands, (np.arange(sound.mels)[:, None], index), weight)
        self.bands = _fixed(bands[..., None])
        self.dct = (
            _fixed(cosines(sound.mels, sound.coefficients).T[..., None]) if sound.features == MFCC else None
        )
        self.offset, self.mean, self.std = sound.log_offset, sound.mean, sound.std

    def forward(self, samples: Tensor) -> Tensor:
        waveform = samples.unsqueeze(1)
        real, imaginary = self.real(waveform), self.imaginary(waveform)
        found = torch.log(self.bands(real * real + imaginary * imaginary) + self.offset)
        if self.dct is not None:
            found = self.dct(found)
        return ((found - self.mean) / self.std).transpose(1, 2).unsqueeze(1)


class WithFeatures(nn.Module):
    """A model of audio samples: it computes their features and passes them to the network.

    Args:
        sound: the preprocessing that is computed in the graph.
        network: the model whose input is the features.
    """

    def __init__(self, sound: SoundPreprocess, network: nn.Module) -> None:
        super().__init__()
        self.features = SoundFeatures(sound)
        self.network = network

    def forward(self, samples: Tensor) -> Tensor:
        return cast(Tensor, self.network(self.features(samples)))


def _fixed(weight: NDArray[np.float64], stride: int = 1) -> nn.Conv1d:
    """Returns a convolution with the fixed weight [out, in, kernel] and without a bias."""
    outputs, inputs, kernel = weight.shape
    made = nn.Conv1d(inputs, outputs, kernel, stride, bias=False)
    made.weight = nn.Parameter(torch.from_numpy(weight).float(), requires_grad=False)
    return made
