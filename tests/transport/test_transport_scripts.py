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
        (["soak_transport.py", "--minutes", "0.1", "--kill-every", "0.4"], "flat"),
        (["bench_transport.py", "--quick", "--only", "ring", "--pin", "auto"], "idle reader"),
    ],
)
def test_a_short_run_finds_nothing(arguments, says, tmp_path):
    script, *rest = arguments
    done = subprocess.run(
        [sys.executable, SCRIPTS / script, *rest],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
