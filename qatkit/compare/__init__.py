"""Runs side by side: every run below a folder in one table and on one page.

    find      which folders are runs, finished or not, and what each came to
    records   a run as a row, and which rows nothing beats
    text      the table on the terminal
    page      compare.html: the same with drawings, filters and links to each run's report
    command   `compare.py FOLDER`, and the end of a sweep

Reports are read as others' files: one that is broken is named in its row. Nothing here needs torch or ONNX Runtime.
"""
