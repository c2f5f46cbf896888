"""Measures the exported file in ONNX Runtime.

A machine that only runs files needs neither torch nor rich: torch is imported only where a module is passed
in, and rich only where a progress bar is requested.
"""
