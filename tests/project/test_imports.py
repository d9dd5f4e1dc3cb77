"""Importing is cheap: looked at by the loaded modules, not by the clock."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "ray", "trinity", "vllm", "pyarrow", "transformers", "pandas", "matplotlib", "tensorboard"}


def loaded_after(code: str) -> set[str]:
    out = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint('\\n'.join(sys.modules), file=sys.stderr)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return {line.partition(".")[0] for line in out.stderr.splitlines()}


@pytest.mark.parametrize(
    "code",
    [
        "import mps_trainer",
        "import mps_trainer.config, mps_trainer.run, mps_trainer.columns, mps_trainer.errors",
        "import mps_trainer.launcher.supervisor, mps_trainer.launcher.up",
        "from mps_trainer.cli import main\nimport sys\nsys.argv = ['mps-trainer', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass",
    ],
)
def test_nothing_heavy_is_loaded(code):
    assert loaded_after(code) & HEAVY == set()


@pytest.mark.parametrize(
    "module", ["mps_trainer.transport", "mps_trainer.operator.extract", "mps_trainer.operator.use_scores"]
)
def test_the_operators_helpers_do_not_load_torch(module):
    assert loaded_after(f"import {module}") & (HEAVY - {"pyarrow"}) == set()


def test_the_probe_can_see_a_heavy_module():
    assert "torch" in loaded_after("import mps_trainer.tasks")


def test_public_names():
    import mps_trainer

    for name in mps_trainer.__all__:
        assert getattr(mps_trainer, name) is not None
    assert sorted(mps_trainer.__all__) == list(mps_trainer.__all__)
    with pytest.raises(AttributeError):
        mps_trainer.no_such_name  # noqa: B018
