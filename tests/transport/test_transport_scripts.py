"""Short runs of the scripts that kill, fuzz, soak and measure the transport."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["kill_transport.py", "random", "--trials", "60"], "60 trials"),
        (["fuzz_transport.py", "--cases", "10000", "--seed", "7"], "10000 cases"),
        (["kill_transport.py", "steps", "--acting", "--stride", "90", "--order", "locks"], "acting opcodes"),
        (["kill_transport.py", "pairs", "--stride", "60", "--partners", "1", "--order", "locks"], "inside the writer"),
        (["kill_transport.py", "pressure", "--trials", "2"], "block: 2 trials"),
        (["soak_transport.py", "--minutes", "0.33", "--kill-every", "0.6"], "flat"),
        (["bench_transport.py", "--quick", "--only", "ring", "--pin", "auto", "--budget-s", "60"], "idle reader"),
    ],
)
def test_a_short_run_finds_nothing(arguments, says, tmp_path):
    script, *rest = arguments
    done = subprocess.run(
        [sys.executable, SCRIPTS / script, *rest],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
