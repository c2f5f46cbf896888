"""The runtimes that can run the exported file; each is a record (`base.Runtime`) in a file of its own."""
