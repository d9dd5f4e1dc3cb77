"""What a run did: numbers (`summarize`) and a picture (`plot`), from the files in its run folder."""

from mps_trainer.report.plot import plot
from mps_trainer.report.summary import RunReport, summarize

__all__ = ["RunReport", "plot", "summarize"]
