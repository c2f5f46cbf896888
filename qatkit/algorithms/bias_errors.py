"""Removes the mean error of an operator's output from the operator's bias (`qatkit.algorithms.bias_correction`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, fx, nn

from qatkit.algorithms import biases
from qatkit.algorithms.batches import Tensors, first_images, joined
from qatkit.graph.pass_result import PassResult
from qatkit.graph.phase import inference, set_phase
from qatkit.graph.quantizers import sorted_out
from qatkit.graph.signature import Example
from qatkit.quant.computed_weights import Computed
from qatkit.quant.qat_layers import QATOperator

if TYPE_CHECKING:
    from qatkit.algorithms.bias_correction import BiasCorrection

Hook = Callable[[QATOperator, tuple[Any, ...], Tensor], Tensor | None]


def correct(settings: BiasCorrection, graph_module: fx.GraphModule, inputs: Iterable[Example]) -> PassResult:
    """Removes the mean error of every operator from its bias: implements `BiasCorrection.__call__`."""
    chosen, skipped = targets(graph_module)
    images = first_images(graph_module, inputs, settings.images)
    with inference(graph_module):
        biases.restore(graph_module)
        if settings.method == "analytic":
            _analytic(graph_module, chosen.values(), images)
        else:
            _empirical(graph_module, chosen.values(), joined(graph_module, images), settings.trim)
    set_phase(graph_module, observe=False, quantize=True)
    return PassResult(graph_module, len(chosen), skipped)


def targets(graph_module: fx.GraphModule) -> tuple[dict[str, QATOperator], list[tuple[str, str]]]:
    """Returns the operators that can be corrected, by site, and (site, reason) of the other quantized operators."""
    return sorted_out(graph_module, _why_not)


def _why_not(module: QATOperator, reads: Counter[int]) -> str | None:
    own_norm = "its BatchNorm is not folded (schedule.batch_norm=fold folds it)"
    computed = "its weight is computed, so its BatchNorm stays"
    refused = [
        (computed if isinstance(module, Computed) else own_norm, module.bn is not None),
        ("it has no bias", module.bias is None),
        (
            "its bias is computed from other parameters",
            isinstance(module, Computed) and module.program("bias") is not None,
        ),
        ("several calls share its bias", reads[id(module.bias)] > 1),
    ]
    return next((f"bias not corrected: {text}" for text, found in refused if found), None)


def channel_means(y: Tensor, operator: nn.Module) -> Tensor:
    """Returns the means of an operator's output over positions, [N, channels], as float64.

    The means are computed in the type of the output, which is accurate enough because PyTorch's summation is
    pairwise.
    """
    channels = y.movedim(-1 if isinstance(operator, nn.Linear) else 1, 1)
    return (channels.flatten(2).mean(2) if y.ndim > 2 else channels).double()


def trimmed_mean(values: Tensor, trim: float) -> Tensor:
    """Returns the mean over the first axis without the share `trim` of the lowest and of the highest values."""
    cut = int(trim * len(values))
    return values.sort(0).values[cut : len(values) - cut].mean(0)


def _analytic(graph_module: fx.GraphModule, chosen: Iterable[QATOperator], images: Iterable[Tensors]) -> None:
    sums: dict[QATOperator, Tensor] = {}
    counts = Counter[QATOperator]()

    def add(operator: QATOperator, args: tuple[Any, ...], _: Tensor) -> None:
        x = args[0].double()
        # The first axis may be tokens or windows: a Linear treats all positions alike. For a Conv it is
        # images.
        x = x.flatten(0, -2) if isinstance(operator, nn.Linear) else x
        sums[operator] = sums.get(operator, 0) + x.sum(0, keepdim=True)
        counts[operator] += len(x)

    set_phase(graph_module, observe=False, quantize=False)
    with hooked(chosen, add):
        for batch in images:
            graph_module(*batch)
    set_phase(graph_module, observe=False, quantize=True)
    for operator, total in sums.items():
        mean = (total / counts[operator]).to(operator.weight.dtype)
        weight, _ = operator.quantized(operator.weight, operator.bias)
        assert operator.bias is not None
        shift = operator.run(mean, weight - operator.weight, None)
        mean_shift = channel_means(shift, operator)[0].to(operator.bias.dtype)
        biases.change(operator, operator.bias - mean_shift)


def _empirical(
    graph_module: fx.GraphModule, chosen: Iterable[QATOperator], batch: Tensors, trim: float
) -> None:
    wanted: dict[QATOperator, Tensor] = {}

    def remember(operator: QATOperator, _: tuple[Any, ...], y: Tensor) -> None:
        wanted[operator] = channel_means(y, operator)

    def correct(operator: QATOperator, args: tuple[Any, ...], y: Tensor) -> Tensor:
        _, bias = operator.quantized(operator.weight, operator.bias)  # the bias with which y was computed
        assert operator.bias is not None and bias is not None
        error = trimmed_mean(channel_means(y, operator) - wanted[operator], trim)
        biases.change(operator, bias - error)
        _, moved = operator.quantized(operator.weight, operator.bias)
        assert moved is not None
        shift = (moved - bias).to(y.dtype)  # this also shifts the output, so the operator need not run again
        return y + (shift if isinstance(operator, nn.Linear) else shift.reshape(-1, *[1] * (y.ndim - 2)))

    set_phase(graph_module, observe=False, quantize=False)
    with hooked(chosen, remember):
        graph_module(*batch)
    set_phase(graph_module, observe=False, quantize=True)
    with hooked(chosen, correct):
        graph_module(*batch)


def hooked(chosen: Iterable[QATOperator], hook: Hook) -> ExitStack:
    """Calls `hook` after each of the operators until the stack is closed; a returned tensor replaces the output."""
    stack = ExitStack()
    for operator in chosen:
        handle = operator.register_forward_hook(cast(Any, hook))
        stack.callback(handle.remove)
    return stack
