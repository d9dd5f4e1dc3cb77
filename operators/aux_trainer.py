"""Registers the short name `aux_trainer` for those who run Trinity with `--plugin-dir`.

`trinity run --plugin-dir operators` replaces your own plugin folder: to keep it, copy this file there, or write
the dotted name `mps_trainer.operator.AuxTrainer` into the YAML, which needs no plugin folder at all.
"""

from trinity.buffer.operators import EXPERIENCE_OPERATORS

from mps_trainer.operator import AuxTrainer

EXPERIENCE_OPERATORS.register_module("aux_trainer")(AuxTrainer)
