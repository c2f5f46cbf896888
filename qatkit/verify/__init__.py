"""Everything that is measured on the exported file, in ONNX Runtime.

A machine that only runs files needs neither torch nor rich for any of it: they are imported where a module is
handed in, or a progress bar is asked for.
"""
