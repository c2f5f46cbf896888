"""Other runtimes that read the exported file: each one record (`base.Runtime`) in a file of its own."""
