"""Rewrites attention as operators that can be quantized, and defines the modules that replace it."""
