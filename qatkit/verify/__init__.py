"""Everything that is measured on the exported file, in ONNX Runtime."""

from qatkit.verify.accuracy import accuracy, module_accuracy
from qatkit.verify.audit import audit
from qatkit.verify.latency import latency
from qatkit.verify.parity import file_parity, first_divergence, parity
from qatkit.verify.session import open_session
from qatkit.verify.thresholds import thresholds

__all__ = [
    "accuracy",
    "audit",
    "file_parity",
    "first_divergence",
    "latency",
    "module_accuracy",
    "open_session",
    "parity",
    "thresholds",
]
