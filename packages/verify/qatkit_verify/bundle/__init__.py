"""Defines the bundle of a run.

manifest    its files, with their sizes and digests
archive     the folder or zip that contains them
signature   the signature of its author
golden      the expected outputs of the model
ports       the inputs and outputs of a model of arrays
"""
