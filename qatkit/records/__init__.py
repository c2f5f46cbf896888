"""Results of all parts of the project as plain dataclasses. Reading them requires neither torch nor ONNX Runtime.

results      a run as a whole: the final table, report.json and the report read it
analysis     sensitivity and isolation, layer by layer
precision    the Pareto front of mixed precision
ladder       the rungs of a rescue
study        the trials of a search; objectives: the figures that a search optimizes
comparison   several runs as rows of a table
figures      the figures of a report by name
run_files    the names of the files in a run's folder
"""
