from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mps_trainer.cli import look
from mps_trainer.errors import ConfigError, RunError
from mps_trainer.report import describe, plot, summarize, write_page
from mps_trainer.run import State, Status


def batch_line(batch: int, **values: Any) -> dict[str, Any]:
    rng = np.random.default_rng(batch)
    auc = 0.95 - 0.45 * np.exp(-batch / 6)
    spread = np.sort(rng.normal(0.5 - batch / 80, 0.02, 5)) + np.array([-0.3, -0.15, 0, 0.15, 0.3])
    line = {
        "kind": "batch",
        "t": 100.0 + batch,
        "step": 4 * batch,
        "batch": batch,
        "loss": 0.7 * np.exp(-batch / 15) + rng.normal(0, 0.01),
        "auc": min(1.0, auc + rng.normal(0, 0.02)),
        "auc_window": auc,
        "experiences": 128 * batch,
        "scores": spread.tolist(),
        "dropped": {"oldest": 0 if batch < 12 else 30, "newest": 0},
    }
    return {**line, **values}


def write_run(run_dir: Path, lines: list[dict[str, Any]], operator: list[dict[str, Any]]) -> None:
    run_dir.mkdir(exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if operator:
        (run_dir / "operator.jsonl").write_text("".join(json.dumps(line) + "\n" for line in operator))
    status = Status(run_id="12345678", state=State.STOPPED, restarts=1, experiences=2560, batches=20, version=80)
    status.save(run_dir)


def operator_line(batch: int) -> dict[str, Any]:
    drop = {"eid": "e1", "score": 0.9, "why": f"quantile 0.1: score >= 0.{batch:04d}"}
    return {"t": batch, "batch": batch, "seen": 128, "fed": 128, "dropped": [drop] * (0 if batch < 3 else 12)}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    before = [batch_line(i) for i in range(1, 9)]
    after = [batch_line(i) for i in range(7, 21)]
    lines = [
        *before,
        {"kind": "resume", "t": 0, "step": 24, "batch": 6},
        *after,
        {"kind": "step", "step": 81, "loss": 1},
    ]
    write_run(tmp_path / "run", lines, [operator_line(i) for i in range(1, 21)])
    (tmp_path / "run/checkpoints/step-9").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step-80").mkdir()
    return tmp_path / "run"


def test_the_numbers_of_a_run(run_dir: Path) -> None:
    report = summarize(run_dir)
    assert (report.run_id, report.state, report.restarts) == ("12345678", "stopped", 1)
    assert (report.seen, report.fed, report.dropped, report.kept) == (2560, 2560, 216, 2344)
    assert report.drop_reasons == {"quantile 0.1": 216}
    assert report.lost == {"oldest": 30, "newest": 0}
    assert report.first_loss == batch_line(1)["loss"]
    assert report.last_loss == batch_line(20)["loss"]
    assert (report.first_auc, report.last_auc) == (batch_line(1)["auc"], batch_line(20)["auc_window"])
    assert report.paths["checkpoint"].name == "step-80"


def test_the_report_reads_well(run_dir: Path) -> None:
    lines = dict(describe(summarize(run_dir)))
    assert lines["run"] == "12345678, stopped, on cpu"
    assert lines["experiences"].startswith("2,560 seen, 2,560 fed to the sidecar, 2,560 received in 20 batches")
    assert lines["loss"].startswith(f"{batch_line(1)['loss']:.3f} first, {batch_line(20)['loss']:.3f} last   [")
    assert len(lines["loss"].partition("[")[2].split()) == 14
    assert lines["AUC"].endswith("] (each batch before training on it)")
    assert lines["filter"] == "dropped 216 of 2,560, 2,344 passed on (quantile 0.1: 216)"
    assert lines["lost"] == "30 pushed out of a full ring (drop_oldest); the sidecar never saw them"
    assert lines["restarts"] == "1"
    assert lines["checkpoint"].endswith("checkpoints/step-80")
    assert lines["run folder"] == str(run_dir)
    assert "error" not in lines


def test_the_report_of_a_failed_run_without_a_batch(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [], [])
    status = Status(run_id="12345678", state=State.FAILED, error="the loss is nan\n  What to do: lower lr")
    status.save(tmp_path / "run")
    lines = describe(summarize(tmp_path / "run"))
    assert ("loss", "none") in lines
    assert ("AUC", "none") in lines
    assert lines[lines.index(("error", "the loss is nan")) + 1] == ("", "  What to do: lower lr")


def test_a_run_without_operator_lines_or_batches(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [], [])
    report = summarize(tmp_path / "run")
    assert (report.seen, report.first_loss, report.last_auc, report.lost) == (None, None, None, {})
    with pytest.raises(RunError, match="holds no batch"):
        plot(tmp_path / "run", tmp_path / "out.png")


def test_a_half_written_line_is_skipped(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "batch", "ba')
    assert summarize(run_dir).last_loss == batch_line(20)["loss"]


ODD_VALUES = (None, "x", [], {}, [1], {"a": "b"}, True, float("nan"), float("inf"), 10**400, [[1], 2, 3, 4, 5], -1)


def test_lines_that_are_damaged_are_left_out(run_dir: Path) -> None:
    expected = describe(summarize(run_dir))
    for name in ("metrics.jsonl", "operator.jsonl"):
        with (run_dir / name).open("ab") as file:
            file.write(b'\n\xff\xfe\0\n[]\nnull\n7\n"x"\n{"kind": "resume"}\n{"kind": "batch"}\n' + b"[" * 100_000)
    assert describe(summarize(run_dir)) == expected


def test_values_of_a_wrong_type_are_left_out(tmp_path: Path) -> None:
    batches = [batch_line(1)]
    for name in ("kind", "t", "step", "batch", "loss", "auc", "auc_window", "scores", "dropped"):
        batches += [{**batch_line(2 + i), name: value} for i, value in enumerate(ODD_VALUES)]
    batches += [{"kind": "resume", "batch": value} for value in ODD_VALUES]
    operator = [{**operator_line(9), name: value} for name in ("t", "seen", "fed", "dropped") for value in ODD_VALUES]
    operator += [{**operator_line(9), "dropped": [{"why": value}]} for value in ODD_VALUES]
    write_run(tmp_path / "run", batches, operator)
    report = summarize(tmp_path / "run")
    assert report.first_loss == batch_line(1)["loss"]
    assert report.seen == 128 * sum(1 for line in operator if line["seen"] == 128)
    assert describe(report)
    assert plot(tmp_path / "run", tmp_path / "run.png").exists()


def test_files_that_are_folders(run_dir: Path) -> None:
    (run_dir / "operator.jsonl").unlink()
    (run_dir / "operator.jsonl").mkdir()
    report = summarize(run_dir)
    assert (report.seen, report.experiences, report.lost["oldest"]) == (None, 2560, 30)
    lines = dict(describe(report))
    assert lines["missing"].startswith("operator.jsonl cannot be read (Is a directory), so what the operator saw")
    assert lines["filter"] == "not known: operator.jsonl cannot be read"
    page = write_page(run_dir, run_dir / "page.html").read_text()
    assert "operator.jsonl cannot be read (Is a directory)" in page
    assert "<p>Not known.</p>" in page
    assert "Nothing" not in page


def test_the_command_tells_the_rest_of_a_run_whose_logs_are_folders(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("operator.jsonl", "metrics.jsonl"):
        (run_dir / name).unlink()
        (run_dir / name).mkdir()
    look.report(str(run_dir))
    said = capsys.readouterr().out
    assert "12345678, stopped, on cpu" in said
    assert "metrics.jsonl cannot be read (Is a directory)" in said
    assert "operator.jsonl cannot be read (Is a directory)" in said
    assert "holds no batch yet" in said
    assert (run_dir / "report.html").exists()


def test_a_copy_beside_the_checkpoints_is_none(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "step-80.bak").mkdir()
    (run_dir / "checkpoints" / "step-").mkdir()
    assert summarize(run_dir).paths["checkpoint"].name == "step-80"


def test_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no folder"):
        summarize(tmp_path / "nothing")
    with pytest.raises(RunError, match=r"status\.json does not exist"):
        summarize(tmp_path)


def test_the_picture(run_dir: Path, tmp_path: Path) -> None:
    png = plot(run_dir, tmp_path / "plots" / "run.png")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert png.stat().st_size > 20_000


def test_the_picture_of_a_run_that_only_feeds(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [batch_line(i, scores=None, auc=None, auc_window=None, dropped={}) for i in (1, 2)], [])
    assert plot(tmp_path / "run", tmp_path / "run.png").exists()


def test_without_matplotlib_the_error_names_the_extra(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[report\]'"):
        plot(run_dir, run_dir / "run.png")


def test_summarize_imports_nothing_heavy(run_dir: Path) -> None:
    code = (
        "import sys, pathlib; from mps_trainer.report import summarize; summarize(pathlib.Path(sys.argv[1]));"
        "print([m for m in ('torch', 'matplotlib', 'pyarrow', 'ray') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run_dir)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
