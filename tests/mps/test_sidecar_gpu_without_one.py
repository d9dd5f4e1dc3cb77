"""The parts of the sidecar's GPU side that decide, with tensors on the CPU and real signals. tests/gpu has the rest."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from mps_trainer.errors import PlacementError
from mps_trainer.sidecar.gpu.numerics import NumericsReport
from mps_trainer.sidecar.gpu.safe_end import SafeEnd
from mps_trainer.sidecar.gpu.shared import SharedGpu

CPU = torch.device("cpu")
LOOP = """
import sys, time, torch
from mps_trainer.sidecar.gpu.safe_end import SafeEnd
asked = []
on_signal = (lambda: asked.append(1)) if sys.argv[1] == "flag" else None
class Told(SafeEnd):
    def synchronise(self):
        print("synchronised", flush=True)
with Told(torch.device("cpu"), on_signal=on_signal):
    print("up", flush=True)
    if sys.argv[1] == "raise":
        raise ValueError("a bug")
    if sys.argv[1] == "exit":
        sys.exit(7)
    while not asked and sys.argv[1] != "return":
        time.sleep(0.01)
print("after", flush=True)
"""


@pytest.mark.parametrize(
    ("how", "number", "status", "after"),
    [
        ("return", 0, 0, True),
        ("raise", 0, 1, False),
        ("exit", 0, 7, False),
        ("flag", signal.SIGTERM, 0, True),
        ("flag", signal.SIGINT, 0, True),
        ("signal", signal.SIGTERM, 143, False),
        ("signal", signal.SIGINT, 130, False),
    ],
)
def test_every_way_out_synchronises(how, number, status, after):
    child = subprocess.Popen(
        [sys.executable, "-c", LOOP, how], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert child.stdout.readline() == "up\n"
    if number:
        child.send_signal(number)
    with child.stdout:
        said = child.stdout.read()
    child.wait(90)
    assert "synchronised" in said
    assert ("after" in said) is after
    assert child.returncode == status


def test_handlers_are_put_back_and_can_be_left_alone():
    before = signal.getsignal(signal.SIGTERM)
    with SafeEnd(CPU, on_signal=lambda: None):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    with SafeEnd(CPU, signals=False):
        assert signal.getsignal(signal.SIGTERM) == before


def test_wrong_products_are_refused_with_the_shares_that_are_right():
    report = NumericsReport(cases=46, wrong=["bf16 64x512x256: 6.2 % of the output is not finite"], multiprocessors=26)
    with pytest.raises(PlacementError, match=r"with 20 % of the SMs \(26\) 1 of 46 products are wrong") as caught:
        report.require_right(20)
    assert "23 to 27" in caught.value.todo
    NumericsReport(cases=46).require_right(100)


def test_without_a_placement_the_sidecar_claims_nothing(state):
    before = dict(os.environ)
    with pytest.raises(PlacementError, match="no placement"):
        SharedGpu("abcd1234")
    assert dict(os.environ) == before
