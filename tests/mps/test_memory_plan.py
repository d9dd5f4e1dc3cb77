"""The plan in bytes, on the recorded size of an H200."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mps_trainer.errors import PlacementError
from mps_trainer.launcher.memory_plan import ENGINE_EXTRA, GIB, MIB, SMALLEST_POOL, EngineWish, plan_memory

H200 = 150754820096
ENGINE = EngineWish("rollout engine", 0.9, needs=20 * GIB)


def test_the_engines_share_is_lowered_by_what_the_sidecar_takes():
    plan = plan_memory(H200, 0, [ENGINE], wish=16 * GIB)
    assert plan.pool == 16 * GIB
    assert plan.limit > plan.pool
    assert 0.8 < plan.utilization[0] < 0.9
    assert sum(size for _, size in plan.rows) == H200
    assert min(size for _, size in plan.rows) >= 0
    assert "0.9 becomes" in plan.warnings[0]
    assert plan.table()[0] == ("used by others now", "0 B", "0.0 %")


def test_a_share_that_fits_already_is_not_touched():
    plan = plan_memory(H200, 0, [EngineWish("rollout engine", 0.6)], wish=8 * GIB)
    assert plan.utilization == (0.6,)
    assert plan.warnings == ()


def test_several_engines_are_lowered_alike_and_a_wide_one_is_warned_about():
    wishes = [EngineWish("rollout engine", 0.6, tensor_parallel=2), EngineWish("judge", 0.3)]
    plan = plan_memory(H200, 0, wishes, wish=8 * GIB)
    assert plan.utilization[0] / plan.utilization[1] == pytest.approx(2, abs=0.02)
    assert sum(plan.utilization) < 0.9
    assert any("spans 2 GPUs" in warning for warning in plan.warnings)


def test_a_weight_sync_buffer_and_other_processes_cost_the_engine():
    base = plan_memory(H200, 0, [ENGINE], wish=16 * GIB).utilization[0]
    buffer = EngineWish("rollout engine", 0.9, sync_buffer=4 * GIB)
    assert plan_memory(H200, 0, [buffer], wish=16 * GIB).utilization[0] < base - 0.02
    assert plan_memory(H200, 4 * GIB, [ENGINE], wish=16 * GIB).utilization[0] < base - 0.02


def test_without_a_wish_the_pool_follows_the_dry_step():
    assert plan_memory(H200, 0, [ENGINE], dry_step=4 * GIB).pool == 5 * GIB
    assert plan_memory(H200, 0, [ENGINE], dry_step=10 * MIB).pool == SMALLEST_POOL


def test_a_wish_below_the_dry_step_names_the_smallest_that_works():
    with pytest.raises(PlacementError, match=r"takes 3.0 GiB") as caught:
        plan_memory(H200, 0, [ENGINE], dry_step=3 * GIB, wish=GIB)
    assert "at least 3072MiB" in caught.value.todo
    plan_memory(H200, 0, [ENGINE], dry_step=3 * GIB, wish=3 * GIB)


def test_what_cannot_fit_is_refused_with_the_largest_that_can():
    with pytest.raises(PlacementError, match="do not fit") as caught:
        plan_memory(H200, 0, [ENGINE], wish=130 * GIB)
    largest = int(caught.value.todo.split()[-1].removesuffix("MiB")) * MIB
    assert plan_memory(H200, 0, [ENGINE], wish=largest).utilization[0] * H200 >= ENGINE.needs
    with pytest.raises(PlacementError, match="do not fit"):
        plan_memory(H200, 0, [ENGINE], wish=largest + 4 * GIB)


def test_a_full_gpu_has_no_room_at_all():
    with pytest.raises(PlacementError, match="do not fit") as caught:
        plan_memory(H200, H200 - GIB, [ENGINE])
    assert "another GPU" in caught.value.todo


def test_a_spare_gpu_without_mps_has_no_server_and_no_engine():
    plan = plan_memory(H200, 0, [], wish=64 * GIB, mps=False)
    assert dict(plan.rows)["MPS server"] == 0
    assert plan.utilization == ()


@given(
    total=st.integers(8 * GIB, 200 * GIB),
    used=st.integers(0, 4 * GIB),
    wish=st.integers(SMALLEST_POOL, 64 * GIB),
    shares=st.lists(st.floats(0.05, 0.95), min_size=1, max_size=3),
)
def test_a_plan_never_hands_out_more_than_there_is(total, used, wish, shares):
    engines = [EngineWish(f"engine {i}", share, needs=GIB) for i, share in enumerate(shares)]
    try:
        plan = plan_memory(total, used, engines, wish=wish)
    except PlacementError:
        return
    assert sum(size for _, size in plan.rows) == total
    assert min(size for _, size in plan.rows) >= 0
    assert all(share <= engine.utilization for share, engine in zip(plan.utilization, engines, strict=True))
    assert all(share * total >= GIB for share in plan.utilization)
    # vLLM refuses to start unless its share is free: nothing of the others may stand in its way.
    assert sum(plan.utilization) * total + ENGINE_EXTRA * len(engines) + plan.limit + used <= total + 1
