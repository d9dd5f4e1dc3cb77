"""What a run did: numbers (`summarize`), a page (`write_page`), a picture (`plot`), from the files in its folder."""

from mps_trainer.report.page import write_page
from mps_trainer.report.plot import plot
from mps_trainer.report.summary import RunReport, summarize
from mps_trainer.report.text import describe

__all__ = ["RunReport", "describe", "plot", "summarize", "write_page"]
