"""A comparison of runs: every run below a folder in one table and on one page.

    find      finds the folders of runs, finished or not, and reads their results
    records   a run as a row, and the Pareto front of the rows (`qatkit.records.comparison`)
    text      the table on the terminal
    page      compare.html: the same with drawings, filters and links to each run's report
    command   `compare.py FOLDER`, and the end of a sweep

Reports are read as untrusted files: a broken one is named in its row. Nothing here needs torch or ONNX
Runtime.
"""
