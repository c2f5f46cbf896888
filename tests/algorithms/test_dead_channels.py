"""Tests of the notes on dead channels and on int32 bias overflow, each with its path and count."""

from __future__ import annotations

import torch
from chain import Chain, noise, prepared, settle
from torch import nn

from qatkit.algorithms import dead_channels
from qatkit.train.module import QATModule


def _with_dead_channels() -> nn.Module:
    """Returns a Chain: conv1 has two dead outputs; conv2 (four groups) has one and ignores inputs 0 and 5."""
    model = settle(Chain(), 3, 12, 12)
    with torch.no_grad():
        model.get_parameter("conv1.weight")[[2, 6]] = 0.0
        weight = model.get_parameter("conv2.weight")
        weight[0:4, 0] = weight[8:12, 1] = weight[9] = 0.0
    return model


def test_dead_outputs_and_unread_inputs_are_counted() -> None:
    graph = prepared(_with_dead_channels(), noise(2, 3, 12, 12))
    assert dead_channels(graph) == [
        (
            "conv1",
            "dead channels: all weights are zero in 2 of 8 output channels (constant outputs)",
        ),
        (
            "conv2",
            "dead channels: all weights are zero in 1 of 16 output channels (constant outputs)",
        ),
        ("conv2", "dead channels: all weights are zero in 2 of 8 input channels (inputs not read)"),
    ]
    assert dead_channels(prepared(settle(Chain(), 3, 12, 12), noise(2, 3, 12, 12))) == []


def test_batch_norm_counts_as_part_of_the_weight() -> None:
    model = settle(Chain(), 3, 12, 12)
    with torch.no_grad():
        model.get_parameter("bn1.weight")[3] = 0.0
    for batch_norm in ("fold", "train"):
        graph = prepared(model, noise(2, 3, 12, 12), batch_norm=batch_norm)
        assert dead_channels(graph) == [
            (
                "conv1",
                "dead channels: all weights are zero in 1 of 8 output channels (constant outputs)",
            )
        ]


def test_a_module_notes_them_and_convert_repairs_their_bias() -> None:
    images = noise(16, 3, 12, 12)
    module = QATModule(_with_dead_channels(), images[:2])
    assert [site for site, _ in module.notes] == ["conv1", "conv2", "conv2"]
    assert not [site for site, _ in module.skipped if site in ("conv1", "conv2")]
    module.calibrate([images])
    module.eval()
    module.ready_to_convert()
    converted = module.convert()
    # The scale of an all-zero channel is too small for its bias to fit int32. After it has been raised, the
    # outputs include the bias.
    assert (
        "conv1",
        "the scale of 2 channels was raised so that the bias fits int32; no output changes",
    ) in converted.skipped
    torch.testing.assert_close(converted.graph(images), module.graph(images), rtol=1e-5, atol=1e-5)
