"""Exports ONNX files, lowers them to an opset, and converts given files to other number types."""
