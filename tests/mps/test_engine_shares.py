"""What engines beside each other on one GPU are told. The GPU is recorded, the daemon fake."""

import os
import subprocess
import sys
import threading

import pytest
from mps_helpers import wait_for
from test_checks import H200
from test_summons import ask, share  # noqa: F401  # share is a fixture

from mps_trainer.launcher.engine_shares import EngineShares
from mps_trainer.launcher.memory_plan import ENGINE_EXTRA, plan_for_any_engine
from mps_trainer.mps.folder import mps_folder
from mps_trainer.mps.summons import EngineRecord, EngineRequest

# From another process: one process is one engine.
OTHER_ENGINE = (
    "import json, sys\nfrom dataclasses import asdict\nfrom pathlib import Path\n"
    "from mps_trainer.mps.summons import EngineRequest, EngineSession\n"
    "print(json.dumps(asdict(EngineSession(Path(sys.argv[1]), EngineRequest((sys.argv[2],), 'rollout'), 90.0).answer)))"
)
PLAN = plan_for_any_engine(H200.total, 0, 8 * 2**30)


def other_engine():
    command = [sys.executable, "-c", OTHER_ENGINE, mps_folder("abcd1234").summons_socket, H200.uuid]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_fake_daemon_second_engine_waits_until_the_first_has_named_its_number(share):  # noqa: F811
    made = share("cuda:0", answer_s=90.0)
    made.start()
    made.sidecar_is_ready()
    first = ask([H200.uuid])
    heard = []
    second = threading.Thread(target=lambda: heard.append(other_engine()))
    second.start()
    wait_for(lambda: len(made.engines) == 2)
    second.join(0.5)
    assert heard == []
    first.tell("config", wished=0.4, utilization=0.4)
    second.join(90)
    assert '"join": true' in heard[0]
    told = float(heard[0].partition('"utilization": ')[2].partition(",")[0].strip("} \n"))
    assert told <= first.answer.utilization - 0.4 - ENGINE_EXTRA / H200.total
    assert told > 0.4


def test_fake_daemon_second_engine_starts_alone_when_the_first_does_not_say_what_it_takes(share):  # noqa: F811
    made = share("cuda:0", answer_s=0.5)
    made.start()
    made.sidecar_is_ready()
    first = ask([H200.uuid])
    assert first.answer.join
    heard = other_engine()
    assert '"join": false' in heard
    assert "has not said how much memory it takes" in heard


@pytest.fixture
def child():
    started = subprocess.Popen(["/bin/sleep", "60"])
    yield started.pid
    started.kill()
    started.wait()


def test_share_that_was_told_counts_at_once_and_its_number_only_lowers_it(child):
    shares = EngineShares()
    first, second = (EngineRequest((H200.uuid,), "rollout", pid) for pid in (child, os.getpid()))
    assert shares.grant(first, PLAN, [EngineRecord(first)]) == PLAN.utilization[0]
    asked = EngineRecord(second)
    assert shares.is_open(second, [EngineRecord(first, "starting"), asked])
    assert shares.grant(second, PLAN, [EngineRecord(first, "starting"), asked]) == 0.0
    named = EngineRecord(first, "starting", utilization=0.5)
    assert not shares.is_open(second, [named, asked])
    assert 0 < shares.grant(second, PLAN, [named, asked]) < PLAN.utilization[0] - 0.5
    boast = EngineRecord(first, "starting", utilization=5.0)
    assert shares.grant(second, PLAN, [boast, asked]) == 0.0
    assert shares.grant(second, PLAN, [EngineRecord(first, "failed"), asked]) == PLAN.utilization[0]


def test_start_that_does_not_end_keeps_the_sidecar_for_a_limited_time(caplog):
    shares = EngineShares(start_s=0.0)
    request = EngineRequest((H200.uuid,), "rollout")
    shares.grant(request, PLAN, [])
    assert not shares.any_measures([EngineRecord(request, "starting")])
    assert not shares.any_measures([EngineRecord(request, "starting")])
    assert caplog.text.count("no longer keeps the sidecar as it is") == 1
    shares = EngineShares()
    shares.grant(request, PLAN, [])
    assert shares.any_measures([EngineRecord(request, "asking")]), "it has its answer, the record a moment later"
    assert not shares.any_measures([EngineRecord(request, "ready")])
