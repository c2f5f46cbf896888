"""Tests that rewrite rules give the same file if each is tried only at the operators that it can match."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx_ir as ir
import pytest
import torch
from chain import noise
from onnxscript import rewriter
from torch import Tensor, nn

from qatkit.export.default_rules import _RuleOfOperators, _rules, apply_default_rules


class Rewritten(nn.Module):
    """A model for several rules: chains of casts, transposes, reshapes and clamps, a full slice, a Pad."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(nn.functional.pad(x, (1, 1, 1, 1))))
        y = y.permute(0, 2, 3, 1).permute(0, 3, 1, 2).double().float()[:, 0:]
        y = y.reshape(2, 4, 64).reshape(2, 256).unsqueeze(1).unsqueeze(1)
        result: Tensor = y.expand(2, 1, 1, 256).relu().clamp(0.5, 6.0).clamp(1.0, 3.0)
        return result


def changed_by(rewrite: Callable[[ir.Model], object]) -> tuple[bytes, bytes]:
    """Returns the file of a program before and after `rewrite`."""
    torch.manual_seed(0)
    program = torch.onnx.export(
        Rewritten().eval(), (noise(2, 3, 8, 8),), dynamo=True, opset_version=18, optimize=False, verbose=False
    )
    assert program is not None
    before = ir.to_proto(program.model).SerializeToString(deterministic=True)
    rewrite(program.model)
    after: onnx.ModelProto = ir.to_proto(program.model)
    return before, after.SerializeToString(deterministic=True)


def test_rules_give_the_same_as_when_tried_everywhere() -> None:
    before, found = changed_by(apply_default_rules)
    same, expected = changed_by(rewriter.rewrite)
    assert before == same != expected
    assert found == expected


def test_nearly_all_rules_are_tried_at_their_operators_alone() -> None:
    rules = _rules()
    if rules is None:
        pytest.skip("this onnxscript does not name its rules")
    known = [isinstance(rule, _RuleOfOperators) and rule._operators is not None for rule in rules]
    assert sum(known) > 0.9 * len(known) > 0
