"""Ray moves exceptions between processes, so they must survive pickling."""

import copy

import pytest

from mps_trainer import errors

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_survives_pickling_with_both_parts(kind):
    again = copy.copy(kind("found this", "do that"))  # copy goes through __reduce__, as pickle does
    assert type(again) is kind
    assert str(again) == "found this\n  What to do: do that"


@pytest.mark.parametrize("kind", [c for c in CLASSES if c is not errors.MpsTrainerError])
def test_an_error_is_also_the_standard_type_it_replaces(kind):
    assert issubclass(kind, (ValueError, RuntimeError, OSError))
