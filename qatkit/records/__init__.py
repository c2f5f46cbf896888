"""Results of all parts of the project as plain dataclasses. Reading them requires neither torch nor ONNX Runtime.

results             a whole run: the final table, report.json and the report read it
analysis            sensitivity and isolation, layer by layer
tried               the candidates of choices: calibration methods, algorithms, epochs
precision           the Pareto front of mixed precision
ladder              the rungs of a rescue
plan                the stages of a run with their times
examples            test samples for drawings
study               the trials of a search
objectives          the figures that a search optimizes
comparison          several runs as rows of a table
figures             the figures in a report: accuracy, distance from float, latency, size
scores              the key of the main metric in records
encodings           scales and zero points by tensor name
aimet               encodings in AIMET's formats
run_files           the names of the files in a run's folder, and model.json
decoder_files       the files of a language model's decoder
detections          the additional file of a detector, with non-maximum suppression
preprocessing_file  the preprocessing in the model.json next to an ONNX file
"""
