"""The report at the end of a run: the table on the terminal, report.json and report.html."""

from qatkit.records.results import Results
from qatkit.report.page import render_page, write_page
from qatkit.report.record import file_records, write_report
from qatkit.report.table import plain_report, print_report
from qatkit_verify.hardware import installed_versions, this_hardware

__all__ = [
    "Results",
    "file_records",
    "installed_versions",
    "plain_report",
    "print_report",
    "render_page",
    "this_hardware",
    "write_page",
    "write_report",
]
