"""Measured placement: chooses the int8 operators of a model by the latency on the machine that will run it.

operators, tensors and the time of each ── cut ──> the cheapest placement ── choices ──> sites that differ
from the backend's table ── record ──> placement.json
"""
