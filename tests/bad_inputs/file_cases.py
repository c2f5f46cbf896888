"""Damaged files, files of a wrong kind and malicious files, for every kind of file that qatkit reads."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import numpy as np
import torch
from cases import TINY, Case
from onnx import TensorProto, helper, numpy_helper

_PLAIN = tuple(one for one in TINY if not one.startswith("output_dir="))
_ONNX_RUN = ("output_dir=out", "data.workers=0", "verify.latency_runs=3", "data.image_size=8")
_DEPTH = 10_000


class _Code:
    """A pickle that runs a command when it is loaded."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, ("touch ran",)


def _torch_bytes(value: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def _zip(**members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            archive.writestr(name.replace("__", "/"), content)
    return stream.getvalue()


def _scripted() -> bytes:
    stream = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), stream)
    return stream.getvalue()


# Contents that are wrong for every kind of file.
ANY: dict[str, bytes] = {
    "empty": b"",
    "one": b"\0",
    "text": b"hello\n",
    "random": np.random.default_rng(0).bytes(5000),
    "zeros": bytes(100_000),
    "utf16": "a: 1\n".encode("utf-16"),
    "bom": b"\xef\xbb\xbf" + b"{]",
    "latin": b"n\xe4me: 1",
    "png": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "gzip": b"\x1f\x8b\x08" + bytes(20),
    "html": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
    "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1\n",
}
_LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
YAML: dict[str, bytes] = ANY | {
    "deep": b"a: " + b"[" * _DEPTH + b"]" * _DEPTH,
    "deep_maps": b"{a: " * _DEPTH + b"}" * _DEPTH,
    "list": b"[1, 2]",
    "scalar": b"5",
    "null": b"null",
    "laughs": _LAUGHS.encode(),
    "object": b"name: !!python/object/apply:os.system ['touch ran']",
    "tag": b"name: !nothing x",
    "twice": b"name: a\nname: b\n",
    "two": b"name: a\n---\nname: b\n",
    "tab": b"\tname: a",
    "int_key": b"1: 2",
    "list_key": b"? [1, 2]\n: 3",
    "itself": b"model: &a\n  kwargs: *a\n",
    "interpolation": b"name: ${nothing}",
    "environment": b"name: ${oc.env:HOME}",
    "recursive": b"name: ${name}",
    "digits": b"seed: " + b"9" * 5000,
    "nan": b"schedule: {lr: .nan}",
    "inf": b"schedule: {lr: .inf}",
    "type": b"schedule: {lr: [1]}",
    "group": b"schedule: 3",
    "unknown": b"schedul: {lr: 1}",
    "date": b"name: 2001-01-01",
    "binary": b"name: !!binary AAAA",
    "null_byte": b"name: 'a\0b'",
    "old_algorithm": b"algorithm: {equalize: true, bias_images: [x]}",
    "missing": b"name: ???",
    "algorithm": b"algorithm: {x: {target: os.system}}",
}
# Contents that no loader accepts as YAML, or that would exhaust the machine.
_BROKEN_YAML = ("zeros", "utf16", "bom", "random", "latin", "png", "gzip", "deep", "deep_maps", "laughs", "itself",
                "object", "tag", "two", "tab", "list_key", "digits", "null_byte")  # fmt: skip
JSON: dict[str, bytes] = ANY | {
    "deep": b"[" * _DEPTH + b"]" * _DEPTH,
    "deep_maps": b'{"a":' * _DEPTH + b"1" + b"}" * _DEPTH,
    "list": b"[]",
    "null": b"null",
    "number": b"5",
    "digits": b'{"preprocessing": ' + b"9" * 5000 + b"}",
    "huge": b'{"preprocessing": {"image_size": 1e400}}',
    "nan": b'{"preprocessing": NaN, "precision": NaN, "files": NaN}',
    "strings": b'{"preprocessing": "x", "precision": "x", "files": "x", "config": "x"}',
    "lists": b'{"preprocessing": [], "precision": [], "files": [], "config": []}',
    "nested": b'{"precision": {"points": 5}, "files": [5], "config": {"model": []}}',
    "surrogate": b'{"preprocessing": "\\ud800"}',
}
STATES: dict[str, Callable[[], bytes]] = {
    name: (lambda content=content: content) for name, content in ANY.items()
} | {
    "code": lambda: pickle.dumps(_Code()),
    "code_zip": lambda: _torch_bytes({"state_dict": _Code()}),
    "code_old": lambda: _torch_bytes(_Code(), _use_new_zipfile_serialization=False),
    "module": lambda: _torch_bytes(torch.nn.Linear(2, 2)),
    "other_zip": lambda: _zip(a=b"b"),
    "empty_zip": _zip,
    "data_only": lambda: _zip(archive__data_pkl=b"x", archive__version=b"3"),
    "scripted": _scripted,
    "number": lambda: _torch_bytes(5),
    "none": lambda: _torch_bytes(None),
    "tensor": lambda: _torch_bytes(torch.zeros(3)),
    "list": lambda: _torch_bytes([torch.zeros(3)]),
    "nothing": lambda: _torch_bytes({}),
    "nested": lambda: _torch_bytes({"state_dict": {"model": {"x": 1}}}),
    "int_keys": lambda: _torch_bytes({1: torch.zeros(2)}),
    "unfit": lambda: _torch_bytes({"x": torch.zeros(2)}),
    "half": lambda: _torch_bytes({"x": torch.zeros(999)})[:2000],
    "deep": lambda: pickle.dumps(0)[:-1] + b"(" * 100_000 + b".",
    "bomb": lambda: b"\x80\x02" + b"X" + struct.pack("<I", 2**31 - 1) + b"x",
    "qatkit": lambda: _torch_bytes({"qatkit": {}, "state_dict": {}}),
    "qatkit_list": lambda: _torch_bytes({"qatkit": [], "state_dict": []}),
    "qatkit_shape": lambda: _torch_bytes(
        {"qatkit": {"input_shape": [3, 10**9, 10**9], "num_classes": 10}, "state_dict": {}}
    ),
    "qatkit_text": lambda: _torch_bytes(
        {"qatkit": {"input_shape": "abc", "num_classes": "x"}, "state_dict": {}}
    ),
    "qatkit_classes": lambda: _torch_bytes(
        {"qatkit": {"input_shape": [3, 8, 8], "num_classes": -5}, "state_dict": {}}
    ),
}


def _safetensors(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + body


SAFE: dict[str, bytes] = ANY | {
    "long_header": struct.pack("<Q", 2**62) + b"{}",
    "no_header": _safetensors(b""),
    "bad_header": _safetensors(b"{]"),
    "nothing": _safetensors(b"{}"),
    "outside": _safetensors(b'{"x":{"dtype":"F32","shape":[1000],"data_offsets":[0,4000]}}', b"abc"),
    "overflow": _safetensors(b'{"x":{"dtype":"F32","shape":[4294967296,4294967296,2],"data_offsets":[0,4]}}', b"abcd"),
    "dtype": _safetensors(b'{"x":{"dtype":"X9","shape":[1],"data_offsets":[0,4]}}', b"abcd"),
    "negative": _safetensors(b'{"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', b"abcd"),
    "unfit": _safetensors(b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"abcd"),
    "deep": _safetensors(b"[" * _DEPTH),
    "metadata": _safetensors(b'{"__metadata__":{"key":"[]","about":"5","digest":"x"}}'),
}  # fmt: skip


def _model(
    nodes: Any,
    *,
    inputs: Any = None,
    outputs: Any = None,
    tensors: Any = (),
    opset: int = 13,
    ir: int = 8,
    domain: str = "",
) -> bytes:
    image = helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 3, 8, 8])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 10])
    graph = helper.make_graph(
        nodes, "g", [image] if inputs is None else inputs, [logits] if outputs is None else outputs,
                              list(tensors))  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(domain, opset)], ir_version=ir)
    return bytes(model.SerializeToString())


def _info(name: str, kind: int, shape: Any) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def _linear() -> list[Any]:
    return [
        _node("Flatten", ["input"], ["flat"]),
        _node("MatMul", ["flat", "w"], ["logits"]),
    ]


def _weight(array: Any = None) -> Any:
    return numpy_helper.from_array(np.ones((192, 10), np.float32) if array is None else array, "w")


def _external(location: str, length: int = 7680) -> Any:
    tensor = TensorProto(
        name="w", data_type=TensorProto.FLOAT, dims=[192, 10], data_location=TensorProto.EXTERNAL
    )
    for key, value in (("location", location), ("offset", "0"), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
    return tensor


def _huge() -> Any:
    return TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[10**9, 10**9])


_node = helper.make_node
_W = [_weight()]
_GOOD = _model(_linear(), tensors=_W)
_FLOAT = TensorProto.FLOAT
ONNX: dict[str, bytes] = ANY | {
    "half": _GOOD[: len(_GOOD) // 2],
    "tail": _GOOD + b"\xff\xff",
    "no_nodes": _model([], tensors=_W),
    "no_inputs": _model(_linear(), inputs=[], tensors=_W),
    "no_outputs": _model(_linear(), outputs=[], tensors=_W),
    "two_inputs": _model(_linear(), inputs=[_info("input", _FLOAT, ["N", 3, 8, 8]), _info("b", _FLOAT, [1])],
                         tensors=_W),
    "no_weights": _model([_node("Relu", ["input"], ["logits"])]),
    "opset_99": _model(_linear(), tensors=_W, opset=99),
    "opset_0": _model(_linear(), tensors=_W, opset=0),
    "opset_negative": _model(_linear(), tensors=_W, opset=-3),
    "ir_99": _model(_linear(), tensors=_W, ir=99),
    "domain": _model(_linear(), tensors=_W, domain="nothing"),
    "unknown": _model([_node("Nothing", ["input"], ["a"]), *_linear()], tensors=_W),
    "unknown_domain": _model([_node("X", ["input"], ["a"], domain="my.own"), *_linear()], tensors=_W),
    "cycle": _model([_node("Add", ["input", "b"], ["a"]), _node("Relu", ["a"], ["b"]), *_linear()],
                    tensors=_W),
    "itself": _model([_node("Relu", ["a"], ["a"]), *_linear()], tensors=_W),
    "undefined": _model([_node("MatMul", ["nowhere", "w"], ["logits"])], tensors=_W),
    "twice": _model([*_linear(), *_linear()], tensors=_W),
    "nan": _model(_linear(), tensors=[_weight(np.full((192, 10), np.nan, "f"))]),
    "misfit": _model(_linear(), tensors=[_weight(np.ones((5, 10), np.float32))]),
    "short_weights": _model(_linear(), tensors=[TensorProto(name="w", data_type=1, dims=[192, 10], raw_data=b"a")]),
    "huge_weights": _model(_linear(), tensors=[_huge()]),
    "negative_weights": _model(_linear(), tensors=[TensorProto(name="w", data_type=_FLOAT, dims=[-1, 10])]),
    "weights_type": _model(_linear(), tensors=[TensorProto(name="w", data_type=77, dims=[192, 10], raw_data=bytes(9))]),
    "external_missing": _model(_linear(), tensors=[_external("nothing.bin")]),
    "external_short": _model(_linear(), tensors=[_external("short.bin")]),
    "external_up": _model(_linear(), tensors=[_external("../../../../../../etc/passwd", 10)]),
    "external_absolute": _model(_linear(), tensors=[_external("/etc/passwd", 10)]),
    "external_device": _model(_linear(), tensors=[_external("/dev/zero")]),
    "external_pipe": _model(_linear(), tensors=[_external("pipe.bin")]),
    "external_folder": _model(_linear(), tensors=[_external(".")]),
    "external_empty": _model(_linear(), tensors=[_external("")]),
    "external_long": _model(_linear(), tensors=[_external("n" * 300)]),
    "external_huge": _model(_linear(), tensors=[_external("short.bin", 10**15)]),
    "external_negative": _model(_linear(), tensors=[_external("short.bin", -5)]),
    "int_input": _model(_linear(), inputs=[_info("input", TensorProto.INT64, ["N", 3, 8, 8])], tensors=_W),
    "no_shape": _model(_linear(), inputs=[_info("input", _FLOAT, None)], tensors=_W),
    "huge_input": _model(_linear(), inputs=[_info("input", _FLOAT, ["N", 3, 10**6, 10**6])], tensors=_W),
    "huge_batch": _model(_linear(), inputs=[_info("input", _FLOAT, [10**9, 3, 8, 8])], tensors=_W),
    "zero_input": _model(_linear(), inputs=[_info("input", _FLOAT, ["N", 3, 0, 0])], tensors=_W),
    "expand": _model([_node("Expand", ["input", "big"], ["e"]), _node("ReduceSum", ["e"], ["s"]),
                      *_linear()],
                     tensors=[_weight(), numpy_helper.from_array(np.array([10**4, 10**4, 3, 8, 8]), "big")]),
    "constant": _model([_node("ConstantOfShape", ["big"], ["e"]), *_linear()],
                       tensors=[_weight(), numpy_helper.from_array(np.array([10**6, 10**6]), "big")]),
}  # fmt: skip


def make_files(folder: Path) -> None:
    """Creates a finished run with a calibration cache in `good`, and every damaged file."""
    done = forked.outcome("train.py", (*_PLAIN, "output_dir=good", "calibration.cache=cache.st"), folder)
    assert done.status == 0, done.err
    for kind, contents in (("yaml", YAML), ("json", JSON), ("safe", SAFE), ("onnx", ONNX)):
        (folder / kind).mkdir()
        for name, content in contents.items():
            (folder / kind / name).write_bytes(content)
    (folder / "state").mkdir()
    for name, make in STATES.items():
        (folder / "state" / name).write_bytes(make())


@dataclass(frozen=True)
class FileCase(Case):
    """A command line and the files to copy before it runs: (damaged file, path in the working directory)."""

    files: tuple[tuple[str, str], ...] = ()
    good: tuple[str, ...] = ()  # files of the finished run, to be copied to `run/`


def run(case: FileCase, files: Path, folder: Path) -> forked.Outcome:
    for name in case.good:
        (folder / "run").mkdir(exist_ok=True)
        shutil.copy(files / "good" / name, folder / "run")
    for source, target in case.files:
        (folder / target).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(files / source, folder / target)
    if case.script == "export.py" and any("external" in one[0] for one in case.files):
        (folder / "short.bin").write_bytes(b"abc")
        os.mkfifo(folder / "pipe.bin")
    return forked.outcome(case.script, case.typed, folder)


# Start of the error message for files that are valid by themselves but conflict with a setting.
_SAYS = {
    ("huge_input", "dynamic"): "data.image_size=8: ",
    ("huge_input", "static"): "data.image_size=8: ",
    ("huge_batch", "dynamic"): "verify.latency_batch=1000000000: ",
    ("huge_batch", "static"): "calibration.images=512: ",
    ("no_weights", "static"): "onnx=bad.onnx: the model has no Conv",
}
# Modes that only read shapes accept sizes of 0, which some exporters write for dynamic axes.
_TAKEN = [("zero_input", "dynamic")]


def _cases() -> Iterator[FileCase]:
    for name in YAML:
        yield FileCase(("checkpoint=run/last.ckpt",), "", "export.py",
                       ((f"yaml/{name}", "run/config.yaml"),), ("last.ckpt",))  # fmt: skip
    for name in _BROKEN_YAML:
        group = ((f"yaml/{name}", "mine/algorithm/own.yaml"),)
        yield FileCase(("--config-dir", "mine", "recipe=own", *TINY), "",
                       files=((f"yaml/{name}", "mine/recipe/own.yaml"),))  # fmt: skip
        yield FileCase(("--config-dir", "mine", "algorithm=own", *TINY), "", files=group)
        yield FileCase(("--config-dir", "mine", "--help"), "--config-dir=", files=group)
    for name in JSON:
        yield FileCase((*TINY, "precision.front=run", "precision.point=1"), "precision.front=run: ",
                       files=((f"json/{name}", "run/report.json"),))  # fmt: skip
        yield FileCase((*TINY, "placement=own.json"), "placement=own.json: ",
                       files=((f"json/{name}", "own.json"),))  # fmt: skip
    for name in STATES:
        yield FileCase(
            (*TINY, "model.checkpoint=bad.pt"),
            "model.checkpoint=bad.pt: ",
            files=((f"state/{name}", "bad.pt"),),
        )
        yield FileCase(("checkpoint=run/last.ckpt",), "checkpoint=run/last.ckpt: ", "export.py",
                       ((f"state/{name}", "run/last.ckpt"),), ("config.yaml",))  # fmt: skip
        yield FileCase((*_PLAIN, "resume=run/last.ckpt"), "resume=run/last.ckpt: ",
                       files=((f"state/{name}", "run/last.ckpt"),), good=("config.yaml",))  # fmt: skip
    for name in SAFE:
        yield FileCase((*TINY, "model.checkpoint=bad.safetensors"), "model.checkpoint=bad.safetensors: ",
                       files=((f"safe/{name}", "bad.safetensors"),))  # fmt: skip
        yield FileCase((*TINY, "calibration.cache=cache.st"), "calibration.cache=cache.st: ",
                       files=((f"safe/{name}", "cache.st"),))  # fmt: skip
    for name in ONNX:
        for mode in ("dynamic", "static"):
            if (name, mode) in _TAKEN:
                continue
            says = _SAYS.get((name, mode), "onnx=bad.onnx: ")
            yield FileCase(("onnx=bad.onnx", f"mode={mode}", *_ONNX_RUN),
                           says, "export.py", ((f"onnx/{name}", "bad.onnx"),))  # fmt: skip


CASES = list(_cases())
# A damaged file next to the model is ignored if it only gives hints, but not if it defines the preprocessing.
HINTS = [
    FileCase(("onnx=run/model.float.onnx", "mode=dynamic", *_ONNX_RUN),
             "", "export.py", ((f"json/{name}", "run/report.json"),), ("model.float.onnx",))
    for name in JSON
]  # fmt: skip
