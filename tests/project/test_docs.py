"""The documents say what the code does."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_settings_page_is_generated_from_the_code():
    script = ROOT / "scripts/settings_reference.py"
    subprocess.run([sys.executable, script, "--check"], check=True, timeout=60)
