"""Defines the bundle of a run: its files (`manifest`), in a folder or a zip (`archive`), the signature of its
author (`signature`), and the expected outputs of the model (`golden`).
"""
