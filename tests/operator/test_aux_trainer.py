"""The operator against a real sidecar process, without Ray: what it feeds, what it does with scores, how it fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trinity.common.experience import EID, Experience

from mps_trainer.errors import ConfigError, MpsTrainerError, TaskError
from mps_trainer.operator import AuxTrainer
from mps_trainer.run import RunRecord
from mps_trainer.run.figures import Watcher
from mps_trainer.transport import leftovers

PAGE = (Path(__file__).parents[2] / "docs" / "watching.md").read_text()


def experiences(seed: int, size: int = 32) -> list[Experience]:
    """Reward 1 for more low tokens than usual."""
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for i in range(size):
        tokens = torch.randint(0, 50, (24,), generator=generator, dtype=torch.int32)
        reward = float((tokens[4:] < 25).float().mean() > 0.5)
        eid = EID(batch=seed, task=i // 8, run=i % 8, suffix="000000")
        batch.append(Experience(eid=eid, tokens=tokens, prompt_length=4, logprobs=-torch.ones(20), reward=reward))
    return batch


def operator(run: Any, **args: Any) -> AuxTrainer:
    own = {
        "task_args": run.settings.task_args,
        "run_file": str(run.paths.run_file),
        "ring_slot": "256KiB",
        "score_timeout": "90s",
    }
    return AuxTrainer(**{**own, **args})


def drive(aux: AuxTrainer, batches: list[list[Experience]]) -> list[tuple[list[Experience], dict[str, Any]]]:
    """prepare, process each batch, close: as Trinity's pipeline does."""

    async def main() -> list[Any]:
        await aux.prepare()
        try:
            return [await aux.process(batch) for batch in batches]
        finally:
            await aux.close()

    return asyncio.run(main())


def test_filter_drops_the_highest_scores_and_writes_down_why(make_run: Any) -> None:
    run = make_run(min_experiences=8)
    run.start()
    batches = [experiences(seed) for seed in range(4)]
    results = drive(operator(run, use="filter", filter={"value": 0.25}, min_version=1), batches)
    kept, metrics = results[0]
    assert kept == batches[0], "the model has not learnt anything yet"
    assert metrics["aux_trainer/score_too_early"] == 1
    for (kept, metrics), batch in zip(results[1:], batches[1:], strict=True):
        assert len(kept) == 24
        assert [e for e in batch if e in kept] == kept, "the order stays"
        assert metrics["aux_trainer/filtered"] == 8
        assert metrics["aux_trainer/fed"] == 32
        assert metrics["aux_trainer/score_late"] == 0
        assert 0 < metrics["aux_trainer/score_age_s"] < 120
        assert metrics["aux_trainer/score_latency_ms"] >= metrics["aux_trainer/score_wait_ms"]
        assert all(type(value) in (int, float) for value in metrics.values()), "Trinity drops every other type"
        assert [name for name in metrics if f"`{name.removeprefix('aux_trainer/')}`" not in PAGE] == []
        assert metrics["aux_trainer/reward_mean"] == pytest.approx(np.mean([e.reward for e in batch]))
        assert metrics["aux_trainer/reward_mean_kept"] == pytest.approx(np.mean([e.reward for e in kept]))
    totals = ("seen_total", "removed_total", "sidecar_restarts", "lost_total", "set_aside_total")
    assert [metrics[f"aux_trainer/{name}"] for name in totals] == [128, 24, 0, 0, 0]
    lines = [json.loads(line) for line in (run.run_dir / "operator.jsonl").read_text().splitlines()]
    assert [len(line["dropped"]) for line in lines] == [0, 8, 8, 8]
    assert "quantile 0.25: among the highest" in lines[1]["dropped"][0]["why"]
    assert all(line["score_age_s"] > 0 for line in lines)
    figures = Watcher(run.run_dir).look()
    assert (figures.seen, figures.removed) == (128, 24)
    assert len({line["operator"] for line in lines}) == 1
    status = run.status()
    assert 0 < status.score_latency_ms_p50 <= status.score_latency_ms_p99
    assert status.score_age_s is not None
    assert [line["score_latency_ms"] > 0 for line in run.metrics() if line["kind"] == "batch"]


def test_reward_keeps_the_raw_one(make_run: Any) -> None:
    run = make_run(min_experiences=8)
    run.start()
    batch = experiences(1)
    raw = [e.reward for e in batch]
    drive(operator(run, use="reward", reward={"how": "add", "weight": -1}, min_version=0), [batch])
    assert [e.info["raw_reward"] for e in batch] == raw
    assert all(e.reward <= e.info["raw_reward"] for e in batch)


def test_disabled_returns_the_very_same_and_opens_nothing() -> None:
    batch = experiences(1)
    as_they_were = Experience.serialize_many(batch)
    before = opened_and_mapped()
    [(kept, metrics)] = drive(AuxTrainer(enabled=False), [batch])
    assert kept is batch
    assert Experience.serialize_many(kept) == as_they_were
    assert metrics == {"aux_trainer/enabled": 0, "aux_trainer/errors_total": 0}
    assert opened_and_mapped() <= before


def opened_and_mapped() -> set[str]:
    """Our objects in /dev/shm that this process has open or mapped; other tests may not have collected theirs."""
    opened = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return {text.split()[-1] for text in [*opened, *mapped] if "mpst" in text}


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'filter'"):
        AuxTrainer(fliter={})


@pytest.mark.parametrize("on_error", ["pass", "raise"])
def test_no_run_at_all(tmp_path: Any, on_error: str) -> None:
    aux = AuxTrainer(run_file=str(tmp_path / "none.json"), use="filter", on_error=on_error)
    batch = experiences(1)
    if on_error == "raise":
        with pytest.raises(MpsTrainerError, match="start_mps"):
            drive(aux, [batch])
        return
    [(kept, metrics)] = drive(aux, [batch])
    assert kept is batch
    assert metrics["aux_trainer/connected"] == 0


def test_another_host_is_noticed(make_run: Any) -> None:
    run = make_run()
    elsewhere = replace(RunRecord.load(run.paths.run_file), boot_id="another", host="node7")
    elsewhere.save(run.paths.run_file)
    with pytest.raises(MpsTrainerError, match=r"(?s)on host node7.*does not cross hosts"):
        drive(operator(run, on_error="raise"), [])
    [(kept, metrics)] = drive(operator(run), [experiences(1)])
    assert len(kept) == 32
    assert metrics["aux_trainer/wrong_host"] == 1


def test_a_stopped_sidecar_costs_one_timeout_and_no_experience(make_run: Any) -> None:
    run = make_run(min_experiences=8)
    child, _ = run.start()
    aux = operator(run, use="filter", score_timeout="1s", min_version=0)

    async def main() -> tuple[list[Experience], dict[str, Any], float]:
        await aux.prepare()
        await aux.process(experiences(1))
        os.kill(child.pid, signal.SIGSTOP)
        begin = time.monotonic()
        kept, metrics = await aux.process(experiences(2))
        took = time.monotonic() - begin
        os.kill(child.pid, signal.SIGCONT)
        await aux.close()
        return kept, metrics, took

    kept, metrics, took = asyncio.run(main())
    assert len(kept) == 32
    assert metrics["aux_trainer/score_late"] == 1
    assert 1 <= took < 60


def test_a_dead_sidecar_costs_nothing(make_run: Any) -> None:
    run = make_run(min_experiences=8)
    child, _ = run.start()
    aux = operator(run, use="filter", score_timeout="90s")

    async def main() -> tuple[list[Experience], dict[str, Any]]:
        await aux.prepare()
        await aux.process(experiences(1))
        child.kill()
        child.wait()
        return await aux.process(experiences(2))

    kept, metrics = asyncio.run(main())
    assert leftovers(run.run_id), "the record waits for a successor"
    run.supervisor.release()
    asyncio.run(aux.close())
    assert leftovers(run.run_id) == [], "the run has ended: there is no successor"
    assert len(kept) == 32
    assert metrics["aux_trainer/sidecar_up"] == 0
    assert metrics["aux_trainer/process_ms"] < 60_000
    assert metrics["aux_trainer/fed"] == 32, "it waits in the ring for the successor"


def test_experiences_without_the_needed_column_pass_on_and_are_counted(make_run: Any, caplog: Any) -> None:
    run = make_run(task_args={"feature": "hidden", "feature_dim": 8})
    run.start()
    batch = experiences(1)
    for experience in batch[:4]:
        experience.info["hidden"] = torch.ones(8)
    aux = operator(run, use="filter")
    caplog.set_level("WARNING", "mps_trainer")
    logging.getLogger("mps_trainer").propagate = True
    [(kept, metrics)] = drive(aux, [batch])
    assert kept == batch
    assert metrics["aux_trainer/missing_column"] == 28
    assert metrics["aux_trainer/fed"] == 4
    assert "no info.hidden" in caplog.text


def test_an_error_of_ours_loses_no_batch(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    run.start()
    aux = operator(run, use="filter")
    monkeypatch.setattr(aux._policy, "apply", lambda *a: 1 / 0)
    batch = experiences(1)
    [(kept, metrics)] = drive(aux, [batch])
    assert kept is batch
    assert metrics["aux_trainer/errors_total"] == 1


def test_the_event_loop_goes_on_while_scores_are_awaited(make_run: Any) -> None:
    run = make_run(min_experiences=8)
    child, _ = run.start()
    aux = operator(run, use="filter", score_timeout="3s")
    delays: list[float] = []

    async def watch() -> None:
        while True:
            begin = time.monotonic()
            await asyncio.sleep(0.01)
            delays.append(time.monotonic() - begin - 0.01)

    async def main() -> None:
        await aux.prepare()
        watcher = asyncio.create_task(watch())
        os.kill(child.pid, signal.SIGSTOP)
        await aux.process(experiences(1))
        os.kill(child.pid, signal.SIGCONT)
        watcher.cancel()
        await aux.close()

    asyncio.run(main())
    assert len(delays) > 10, "the loop ran while the operator waited"
    assert max(delays) < 2, "under the time that the operator waited"


def test_a_log_that_cannot_be_written_changes_nothing_else(make_run: Any) -> None:
    run = make_run(min_experiences=8)
    run.start()
    (run.run_dir / "operator.jsonl").mkdir()  # root may write anywhere, but not into a folder
    batches = [experiences(1), experiences(2)]
    [_, (kept, metrics)] = drive(operator(run, use="filter", filter={"value": 0.25}, min_version=1), batches)
    assert len(kept) == 24
    assert metrics["aux_trainer/log_errors_total"] == 2
    assert metrics["aux_trainer/errors_total"] == 0


def test_rewards_of_numpy_types_are_written_down(make_run: Any) -> None:
    run = make_run(min_experiences=8)
    run.start()
    batches = [experiences(1), experiences(2)]
    for experience in batches[1]:
        experience.reward = np.float32(experience.reward)
    [_, (kept, metrics)] = drive(operator(run, use="filter", filter={"value": 0.25}, min_version=1), batches)
    assert len(kept) == 24
    assert metrics["aux_trainer/errors_total"] == metrics["aux_trainer/log_errors_total"] == 0


@pytest.mark.parametrize("on_error", ["pass", "raise"])
def test_whatever_goes_wrong_in_prepare_ends_no_run_unless_asked(tmp_path: Any, on_error: str) -> None:
    aux = AuxTrainer(run_file=str(tmp_path), on_error=on_error)  # a folder is no file: an error nobody expects
    if on_error == "raise":
        with pytest.raises((OSError, MpsTrainerError)):
            drive(aux, [])
        return
    batch = experiences(1)
    [(kept, metrics)] = drive(aux, [batch])
    assert kept is batch
    assert metrics["aux_trainer/errors_total"] >= 1


def test_the_host_is_known_without_the_run_file(tmp_path: Any) -> None:
    args = {"run_file": str(tmp_path / "on_the_other_host.json"), "run_host": "node7 0000-boot"}
    with pytest.raises(MpsTrainerError, match=r"(?s)on host node7.*does not cross hosts"):
        drive(AuxTrainer(**args, on_error="raise"), [])
    [(kept, metrics)] = drive(AuxTrainer(**args), [experiences(1)])
    assert len(kept) == 32
    assert metrics["aux_trainer/wrong_host"] == 1


@pytest.mark.parametrize("on_error", ["pass", "raise"])
def test_a_failed_sidecar_is_told_with_its_reason(
    make_run: Any, on_error: str, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task fails; the supervisor, as it does then, ends the run and removes its files."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
    run = make_run(task="failing_task:NanLater", min_experiences=1)
    child, _ = run.start()
    aux = operator(run, use="filter", task="preference_classifier", on_error=on_error)
    caplog.set_level("WARNING", "mps_trainer")
    logging.getLogger("mps_trainer").propagate = True

    async def main() -> tuple[list[Experience], dict[str, Any]]:
        await aux.prepare()
        with contextlib.suppress(MpsTrainerError):
            await aux.process(experiences(1))
        child.wait(90)
        run.supervisor.release()
        run.paths.remove()
        return await aux.process(experiences(2))

    if on_error == "raise":
        with pytest.raises(TaskError, match="the loss is nan"):
            asyncio.run(main())
        return
    kept, metrics = asyncio.run(main())
    assert len(kept) == 32
    assert metrics["aux_trainer/sidecar_failed"] == 1
    assert "the loss is nan" in caplog.text
    assert "start it again" not in caplog.text


@pytest.mark.parametrize("info", [{(1, 2): 3}, None, {"x": 10**5000}])
def test_a_strange_info_costs_no_batch(make_run: Any, info: Any) -> None:
    run = make_run(min_experiences=8)
    run.start()
    batches = [experiences(1), experiences(2)]
    for experience in batches[1]:
        experience.info = info
    [_, (kept, metrics)] = drive(operator(run, use="filter", filter={"value": 0.25}, min_version=1), batches)
    assert len(kept) == 24
    assert metrics["aux_trainer/errors_total"] == 0


def test_a_segment_removed_under_the_operator_is_made_again(make_run: Any) -> None:
    """What a logout with RemoveIPC does, while the sidecar is between two lives."""
    run = make_run(min_experiences=8)
    child, _ = run.start()
    aux = operator(run, use="feed")

    async def main() -> list[dict[str, Any]]:
        await aux.prepare()
        child.kill()
        child.wait()
        for name in leftovers(run.run_id):
            (Path("/dev/shm") / name).unlink()
        run.start()
        found: list[dict[str, Any]] = []
        # The feeder looks for a run once a second.
        while not (found and found[-1].get("aux_trainer/sidecar_up") and found[-1].get("aux_trainer/fed")):
            assert len(found) < 60, found[-1]
            found.append((await aux.process(experiences(len(found))))[1])
            await asyncio.sleep(1.1)
        await aux.close()
        return found

    found = asyncio.run(main())
    assert found[-1]["aux_trainer/fed"] == 32
    assert found[-1].get("aux_trainer/sidecar_up") == 1
