"""The ONNX file: export, lowering to the opset, names."""
