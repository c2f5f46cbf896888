"""Compares the runs below a folder in one table and on one page.

    find      finds the folders of runs, finished or not, and reads their results
    text      writes the table for the terminal
    page      writes compare.html: the table with charts, filters and links to each run's report
    command   runs `compare.py FOLDER`, and writes the page at the end of a sweep

The rows and their Pareto front are defined in `qatkit.records.comparison`. Reports are read as untrusted files; a row
says so if its report is broken. Nothing here needs torch or ONNX Runtime.
"""
