"""Quantizes weights to few bits with other tools; each peer returns the dequantized weights of a model's Linears.

`ort_*` are the asymmetric algorithms of ONNX Runtime's matmul_nbits_quantizer. `RTN`, `KQuant` and `HQQ` use only the
weights; `GPTQ` (`onnxruntime.quantization.neural_compressor.weight_only.gptq`) also uses the second moments of each
Linear's inputs in the float model, as `gptq_quantize` does. `olive_gptq` is Olive's layer-by-layer GPTQ pass; it
needs Olive.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Weights = dict[str, np.ndarray]  # by module path
# The arguments are the model, token ids [N, T], bits, the block size and the number of processes.
Peer = Callable[[nn.Module, Tensor, int, int, int], Weights]


def _mat_mul(weight: np.ndarray) -> Any:
    """Returns an ONNX model of one MatMul by a weight [out, in]."""
    from onnx import TensorProto, helper, numpy_helper

    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "product")],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, weight.shape[1]])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, len(weight)])],
        [numpy_helper.from_array(np.ascontiguousarray(weight.T), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def _dequantized(model: Any, inputs: int) -> np.ndarray:
    """Returns the dequantized weight [out, inputs] of a model's only 4-bit MatMulNBits."""
    from onnx import numpy_helper

    (node,) = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    size = next(one.i for one in node.attribute if one.name == "block_size")
    held = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    data, scale, zero = (held[key] for key in node.input[1:4])
    rows, blocks = data.shape[:2]
    codes = np.stack([data & 15, data >> 4], -1).reshape(rows, blocks, size).astype(np.float32)
    if zero.dtype == np.uint8:
        packed = zero.reshape(rows, -1)
        zero = np.stack([packed & 15, packed >> 4], -1).reshape(rows, -1)[:, :blocks]
    zeros = zero.reshape(rows, blocks, 1).astype(np.float32)
    values = (codes - zeros) * scale.reshape(rows, blocks, 1)
    return np.asarray(values.reshape(rows, -1)[:, :inputs])


def _by_weight(asked: tuple[np.ndarray, str, int]) -> np.ndarray:
    """Returns a weight [out, in], quantized to 4 bits by an algorithm that uses only the weight, and dequantized."""
    weight, name, block = asked
    from onnxruntime.quantization import matmul_nbits_quantizer as tool

    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    if name == "HQQ":
        config: Any = tool.HQQWeightOnlyQuantConfig(block_size=block, bits=4)
    elif name == "KQuant":
        config = tool.KQuantWeightOnlyQuantConfig()
    else:
        config = tool.DefaultWeightOnlyQuantConfig(block_size=block, is_symmetric=False, bits=4)
    quantizer = tool.MatMulNBitsQuantizer(
        _mat_mul(weight), block_size=block, is_symmetric=False, algo_config=config
    )
    quantizer.process()
    return _dequantized(quantizer.model.model, weight.shape[1])


def _by_moments(asked: tuple[np.ndarray, np.ndarray, int, int]) -> np.ndarray:
    """Returns a weight [out, in] after ONNX Runtime's GPTQ and the second quantization that its tool applies."""
    weight, moments, bits, block = asked
    from onnxruntime.quantization.neural_compressor import weight_only as tool

    rounded = tool.gptq(weight.T.copy(), moments.copy(), num_bits=bits, group_size=block, scheme="asym")
    values = tool.qdq_tensor(rounded.T, bits, block, "asym", "uint")
    return np.asarray(values.reshape(weight.shape), np.float32)


def _in_processes(
    function: Callable[[Any], np.ndarray], asked: list[Any], processes: int
) -> Iterator[np.ndarray]:
    # A forked process could not use CUDA.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(function, asked)


def _linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Returns the Linears to quantize, by module path; the head stays float."""
    found = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    return {name: one for name, one in found.items() if not name.endswith("lm_head")}


def _alone(name: str) -> Peer:
    def run(model: nn.Module, words: Tensor, bits: int, block: int, processes: int) -> Weights:
        if bits != 4:
            raise ValueError(f"--bits {bits}: {name} supports only 4 bits here")
        linears = _linears(model)
        asked = [(one.weight.detach().cpu().numpy(), name, block) for one in linears.values()]
        return dict(zip(linears, _in_processes(_by_weight, asked, processes), strict=True))

    return run


@torch.no_grad()
def _moments(model: nn.Module, linears: dict[str, nn.Linear], words: Tensor) -> Weights:
    """Returns 2 / windows times the sum of x xᵀ over the inputs x of each Linear, [in, in] in float64."""
    found: dict[str, Tensor] = {}

    def seen(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            values = given[0].flatten(0, -2).double()
            found[name] = found.get(name, 0) + 2 / len(words) * values.T @ values

        return hook

    hooks = [one.register_forward_pre_hook(seen(name)) for name, one in linears.items()]
    for window in words:
        model(window[None].to(next(model.parameters()).device))
    for hook in hooks:
        hook.remove()
    return {name: one.cpu().numpy() for name, one in found.items()}


def _ort_gptq(model: nn.Module, words: Tensor, bits: int, block: int, processes: int) -> Weights:
    linears = _linears(model)
    moments = _moments(model, linears, words)
    asked = [
        (one.weight.detach().cpu().numpy(), moments.pop(name), bits, block) for name, one in linears.items()
    ]
    return dict(zip(linears, _in_processes(_by_moments, asked, processes), strict=True))


def _olive_gptq(model: nn.Module, words: Tensor, bits: int, block: int, processes: int) -> Weights:
    from olive.common.hf.wrapper import ModelWrapper
    from olive.common.quant.utils import WeightQuantizer
    from olive.passes.pytorch import quant_utils
    from olive.passes.pytorch.gptq import Gptq

    linears = _linears(model)
    kept = {name: one.weight.detach().clone() for name, one in linears.items()}
    for one in linears.values():
        quantizer = WeightQuantizer(bits=bits, symmetric=False, group_size=block)
        one.quant_info = quant_utils.QuantInfo(quantizer=quantizer)
    quant_utils.get_calibration_dataset = lambda *_: [{"input_ids": window[None]} for window in words]
    quant_utils.run_layerwise_quantization(
        SimpleNamespace(), ModelWrapper.from_model(model.model), None, Gptq.accumulate_hessian,
        lambda module, _: Gptq.process_module(module), update_before_process=False, include_lm_head=False,
    )  # fmt: skip
    found = {name: one.weight.detach().cpu().numpy().copy() for name, one in linears.items()}
    for name, one in linears.items():
        one.weight.data = kept[name]
        del one.quant_info
    return found


PEERS: dict[str, Peer] = {
    "ort_rtn": _alone("RTN"),
    "ort_k_quant": _alone("KQuant"),
    "ort_hqq": _alone("HQQ"),
    "ort_gptq": _ort_gptq,
    "olive_gptq": _olive_gptq,
}
