"""Operators that find a slow sidecar all the same."""

from __future__ import annotations

import pytest

from mps_trainer.operator import feeder


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine a sidecar that lives may need more than the second that an operator waits for it."""
    monkeypatch.setattr(feeder, "ATTACH_S", 90.0)


@pytest.fixture
def no_sidecar(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which there is none to wait for."""
    monkeypatch.setattr(feeder, "ATTACH_S", 0.1)
