"""A finished or running run as one page to read, look at and listen to."""

from audiorl.report.page import write_report
from audiorl.report.picture import plot_result

__all__ = ["plot_result", "write_report"]
