"""qatkit: quantization-aware training for PyTorch models, and export to a verified INT8 QDQ ONNX file.

The rooms, in the order in which a model passes through them: `models` and `data` (what comes in), `graph`
(trace, fuse, stub, prepare, convert), `calibrate`, `module` and `training`, `export`, `verify`, `report`;
`pipeline` is the way through. Numbers live in `spec`, `numerics`, `observers`, `fake_quantize`, `operators`.
"""
