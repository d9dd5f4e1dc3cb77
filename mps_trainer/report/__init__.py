"""What a run did: numbers (`summarize`) and a picture (`plot`), from the files in its run folder."""

from mps_trainer.report.plot import plot
from mps_trainer.report.summary import RunReport, summarize
from mps_trainer.report.text import describe

__all__ = ["RunReport", "describe", "plot", "summarize"]
