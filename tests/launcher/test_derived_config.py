"""The derived config: what it adds, what it keeps, and where it refuses to write."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launcher_helpers import CONFIG

from mps_trainer.errors import ConfigError
from mps_trainer.launcher.derived_config import HEADER, DerivedConfig, derive
from mps_trainer.launcher.trinity_config import read_trinity_config
from mps_trainer.run import boot_id, host_name, this_host

Write = Callable[..., Path]
RUN_FILE = Path("/state/runs/0123abcd.json")
HOST_LINE = f'          run_host: "{this_host()}"'


def derived(path: Path, *, one_gpu: bool = False) -> DerivedConfig:
    return derive(read_trinity_config(path), run_file=RUN_FILE, one_gpu=one_gpu)


def changes(config: DerivedConfig) -> list[str]:
    lines = config.diff.splitlines()[2:]
    return [line for line in lines if line[0] in "+-"]


def test_golden_only_the_named_keys_change(write_config: Write, tmp_path: Path) -> None:
    path = write_config()
    before = path.read_bytes()
    result = derived(path, one_gpu=True)
    result.write()
    assert path.read_bytes() == before
    expected = CONFIG.format(name="run", root=tmp_path / "ckpt")
    expected = expected.replace(
        "mode: explore\n",
        'ray_namespace: "lab/run"\ncluster:\n  node_num: 1\n  gpu_per_node: 1\nmode: explore\n',
    ).replace("        args:\n", f'        args:\n          run_file: "{RUN_FILE}"\n{HOST_LINE}\n')
    header, _, body = (tmp_path / "run.mps.yaml").read_text().partition("\n")
    assert header.startswith(HEADER)
    assert body == expected
    assert all(line.startswith("+") for line in changes(result))


def test_the_operator_learns_on_which_host_the_run_file_is(write_config: Write) -> None:
    derived(write_config()).write()
    text = write_config().with_name("run.mps.yaml").read_text()
    assert f'run_host: "{host_name()} {boot_id()}"' in text


@pytest.mark.parametrize("key", ["run_file", "run_host"])
def test_what_the_launcher_sets_is_not_for_the_user(write_config: Write, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is set in run.yaml; the launcher sets it"):
        read_trinity_config(write_config(("ring_slots: 2", f"{key}: x")))


def test_interpolations_and_comments_stay_text(write_config: Write) -> None:
    text = derived(write_config()).text
    for kept in ('"${oc.env:HOME}/model"', "# how we explore", "# scratch disk", "# no GPU on my laptop"):
        assert kept in text


def test_a_namespace_of_the_users_own_is_not_touched(write_config: Write) -> None:
    path = write_config(("project: lab", "project: lab\nray_namespace: ${oc.env:NS,mine}"))
    result = derived(path)
    assert changes(result) == [f'+          run_file: "{RUN_FILE}"', f"+{HOST_LINE}"]


def test_an_empty_namespace_is_filled_in_its_place(write_config: Write) -> None:
    result = derived(write_config(("project: lab", 'project: lab\nray_namespace: ""  # later')))
    assert '+ray_namespace: "lab/run"  # later' in changes(result)


OURS = f'run_file: "{RUN_FILE}", run_host: "{this_host()}"'
ARGS = """\
      - name: mps_trainer.operator.AuxTrainer
        args:
          device: cpu   # no GPU on my laptop
          ring_slots: 2
          ring_slot: 1MiB
          ready_timeout: 120s
"""


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ("      - name: aux_trainer\n", ["+        args:", f'+          run_file: "{RUN_FILE}"', f"+{HOST_LINE}"]),
        (
            "      - name: aux_trainer\n        args: {}\n",
            ["-        args: {}", f"+        args: {{{OURS}}}"],
        ),
        (
            "      - name: aux_trainer\n        args:\n",
            ["-        args:", f"+        args: {{{OURS}}}"],
        ),
        (
            "      - name: aux_trainer\n        args: {use: feed}  # x\n",
            ["-        args: {use: feed}  # x", f"+        args: {{{OURS}, use: feed}}  # x"],
        ),
        (
            "      - {name: aux_trainer, args: {use: feed}}\n",
            [
                "-      - {name: aux_trainer, args: {use: feed}}",
                f"+      - {{name: aux_trainer, args: {{{OURS}, use: feed}}}}",
            ],
        ),
        (
            "      - args:\n          use: feed\n        name: aux_trainer\n",
            [f'+          run_file: "{RUN_FILE}"', f"+{HOST_LINE}"],
        ),
    ],
)
def test_every_way_to_write_the_block(write_config: Write, block: str, expected: list[str]) -> None:
    result = derived(write_config((ARGS, block)))
    assert [line for line in changes(result) if "ray_namespace" not in line] == expected


def test_a_cluster_with_an_address_gets_its_shape(write_config: Write) -> None:
    result = derived(write_config(("project: lab", "project: lab\ncluster:\n  ray_address: auto")), one_gpu=True)
    assert "+  gpu_per_node: 1" in changes(result)


def test_a_cluster_shape_of_the_users_own_stays(write_config: Write) -> None:
    path = write_config(("project: lab", "project: lab\ncluster: {node_num: 1, gpu_per_node: 1}"))
    assert not any("cluster" in line for line in changes(derived(path, one_gpu=True)))


def test_without_a_gpu_the_cluster_is_not_touched(write_config: Write) -> None:
    assert "gpu_per_node" not in derived(write_config()).text


def test_an_alias_that_another_key_shares_is_refused(write_config: Write) -> None:
    block = "      - name: aux_trainer\n        args: &shared\n          use: feed\nservice: *shared\n"
    with pytest.raises(ConfigError, match="cannot make the derived config") as caught:
        derived(write_config((ARGS, block)))
    assert "without anchors" in caught.value.todo


def test_a_file_that_we_did_not_write_is_not_overwritten(write_config: Write) -> None:
    path = write_config()
    there = path.with_name("run.mps.yaml")
    there.write_text("precious: true\n")
    with pytest.raises(ConfigError, match="was not written by mps-trainer"):
        derived(path).write()
    assert there.read_text() == "precious: true\n"


def test_a_derived_config_is_overwritten_and_is_no_input(write_config: Write) -> None:
    path = write_config()
    derived(path).write()
    derived(path).write()
    with pytest.raises(ConfigError, match="is a derived config"):
        read_trinity_config(path.with_name("run.mps.yaml"))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user may enter, and not write to."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(stat.S_IRWXU | stat.S_IXGRP | stat.S_IRGRP | stat.S_IXOTH | stat.S_IROTH)
        yield folder


_AS_NOBODY = """
import os, sys
from pathlib import Path
from mps_trainer.errors import ConfigError
from mps_trainer.launcher.derived_config import derive
from mps_trainer.launcher.trinity_config import read_trinity_config
derived = derive(read_trinity_config(Path(sys.argv[1])), run_file=Path("/x.json"), one_gpu=False)
if os.geteuid() == 0:
    os.seteuid(65534)
try:
    derived.write()
except ConfigError as error:
    print(error)
"""


def test_a_read_only_folder_is_named(write_config: Write, open_folder: Path) -> None:
    path = open_folder / "run.yaml"
    path.write_text(write_config().read_text())
    path.chmod(0o644)
    if os.geteuid() != 0:
        open_folder.chmod(0o555)
    answer = subprocess.run(
        [sys.executable, "-c", _AS_NOBODY, str(path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert f"cannot write {open_folder / 'run.mps.yaml'}: Permission denied" in answer.stdout
    assert "make that folder writable" in answer.stdout
