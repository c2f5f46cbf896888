"""Defines the bundle of a run: the file to deploy, with everything that is needed to check it elsewhere.

manifest    the list of all files of the bundle, with their sizes and digests
archive     the folder or zip that contains them
signature   the author's signature of the manifest
golden      a few inputs of the model, with the expected outputs
ports       the inputs and outputs of a model of arrays, that is, of neither images nor recordings
"""
