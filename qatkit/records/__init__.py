"""Results of all parts of the project as plain dataclasses. Reading them requires neither torch nor ONNX Runtime.

results             a whole run: the final table, report.json and the report read it
analysis            sensitivity and isolation, layer by layer
tried               the candidates of choices: calibration methods, algorithms, epochs
precision           the Pareto front of mixed precision
ladder              the rungs of a rescue
plan                the stages of a run with their times
examples            test samples for drawings
study               the trials of a search; objectives: the figures that a search optimizes
comparison          several runs as rows of a table
figures             the figures of a report by name; scores: the main metric in records
encodings           scales and zero points by tensor name; aimet: the same in AIMET's formats
run_files           the names of the files in a run's folder; decoder_files, detections: of special models
preprocessing_file  the preprocessing in model.json
"""
