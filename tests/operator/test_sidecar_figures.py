"""The sidecar's figures among the metrics of a batch."""

from __future__ import annotations

from pathlib import Path

from mps_trainer.operator.sidecar_figures import figures_of
from mps_trainer.run import Status

PAGE = (Path(__file__).parents[2] / "docs" / "watching.md").read_text()


def test_no_figure_has_the_name_of_one_of_the_batch_itself() -> None:
    status = Status(
        run_id="12345678", loss=0.5, auc=0.5, score_age_s=9, score_latency_ms_p50=1.0, score_latency_ms_p99=2.0
    )
    found = figures_of(status)
    assert found["sidecar_score_age_s"] == 9.0
    assert "score_age_s" not in found, "a batch without scores has no age of scores"
    assert {type(value) for value in found.values()} == {int, float}
    assert [name for name in found if f"`{name}`" not in PAGE] == []
    assert "sidecar_score_age_s" not in figures_of(Status(run_id="12345678"))
