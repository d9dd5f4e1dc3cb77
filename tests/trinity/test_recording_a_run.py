"""`mps-trainer record` on a real run, and a task that is checked on what it recorded."""

from __future__ import annotations

import re

from aux_runs import MPS_TRAINER, command, metric, operator
from trinity_harness import TrinityRun

from mps_trainer.operator.recording import read_recording


def test_what_a_real_run_records_is_what_the_trainer_gets_and_a_task_learns_from_it(trinity_run: TrinityRun) -> None:
    # A sidecar would end with this task: it must not be asked for.
    args = {"task": "no.such:Task", "use": "filter", "on_error": "raise"}
    config = trinity_run.write_config("explore", operators=[operator(**args)], steps=4, tasks=8, repeats=16)
    target = trinity_run.work_dir / "experiences.jsonl"
    with trinity_run.engine(config):
        outcome = trinity_run.run(config, command=[MPS_TRAINER, "record", "--to", str(target), "--max", "500"])
    assert outcome.returncode == 0, outcome.report()
    assert metric(outcome, "recorded") == [128.0, 256.0, 384.0, 500.0]
    recording = read_recording(target)
    assert [len(batch) for batch in recording.batches] == [128, 128, 128, 116]
    passed_on = {experience.eid.uid: experience for experience in outcome.experiences()}
    assert len(passed_on) == 512, "recording changes nothing"
    for experience in (e for batch in recording.batches for e in batch):
        theirs = passed_on[experience.eid.uid]
        assert experience.tokens.tolist() == theirs.tokens.tolist()
        assert (experience.reward, experience.prompt_length) == (theirs.reward, theirs.prompt_length)

    size = ("--batch-size", "64", "--steps", "150")
    answer = command(trinity_run, "check-task", "preference_classifier", "--data", str(target), *size)
    assert answer.returncode == 0, answer.stderr
    [auc] = re.findall(r"untrained, (0\.\d+) trained", answer.stdout)
    assert float(auc) > 0.7, answer.stdout
