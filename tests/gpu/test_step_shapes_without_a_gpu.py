"""`scripts/gpu_step_shapes.py` on the CPU: all is real but MPS; and what it does about clients that die or hang."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    forget()
    yield
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith("gpu_")]:
        del sys.modules[name]


def settings(monkeypatch: pytest.MonkeyPatch, *words: str) -> argparse.Namespace:
    import gpu_step_shapes

    monkeypatch.setattr(sys, "argv", ["gpu_step_shapes.py", *words])
    return gpu_step_shapes.arguments()


@pytest.mark.slow
def test_rows_are_measured_and_right_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import gpu_step_shapes

    out = tmp_path / "found.json"
    words = ["gpu_step_shapes.py", "--device", "cpu", "--shapes", "eager,fused,graph,pieces,few-8,share-25"]
    # No budget here: this machine may be slow.
    words += ["--cell-s", "0.01", "--budget-s", "10000", "--silent-s", "200", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    usual = signal.getsignal(signal.SIGTERM)
    try:
        code = gpu_step_shapes.main()
    finally:
        signal.signal(signal.SIGTERM, usual)
    found = json.loads(out.read_text())
    assert code == 0, (found["problems"], found["claims"])
    rows = {(row["task"], row["shape"]): row for row in found["rows"]}
    assert len(rows) == 12
    for (_, shape), row in rows.items():
        if shape in ("graph", "share-25"):
            assert row["failed"] == "NotImplementedError: needs CUDA"
            continue
        assert row["ends"] is True
        assert row["failed"] == ""
        assert row["facts"]["operations"] > 20
        assert [cell["beside"] for cell in row["cells"]] == ["nobody", "decode", "prompts"]
        assert all(cell["right"] and cell["losses finite"] and cell["steps"] >= 5 for cell in row["cells"])
        assert "kept" not in row["cells"][0]
        assert all(cell["kept"] >= 0 for cell in row["cells"][1:])
    # One fused optimizer is one operation; a piece of the batch is as many as the whole.
    assert rows["B", "fused"]["facts"]["operations"] < rows["B", "eager"]["facts"]["operations"]
    assert rows["B", "few-8"]["facts"]["operations"] == rows["B", "fused"]["facts"]["operations"]
    assert rows["B", "pieces"]["facts"]["operations"] > 2 * rows["B", "eager"]["facts"]["operations"]


def test_few_are_in_flight_forwards_and_backwards_with_mocked_events(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from gpu_step_flight import few_in_flight

    told: list[str] = []

    class MockedEvent:
        def record(self) -> None:
            told.append(f"after {len(told)}")

        def synchronize(self) -> None:
            told.append("waited")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", MockedEvent)
    x = torch.ones(4, requires_grad=True)
    with few_in_flight(8):
        y = x
        for _ in range(8):
            y = y * 2
        forwards = len(told)
        y.sum().backward()
    # Each half of eight is recorded, and the half before it waited for; so it goes on in backward.
    assert told[:3] == ["after 0", "after 1", "waited"]
    assert told.count("waited") == sum(one != "waited" for one in told) - 1
    assert len(told) > forwards == 3
    assert x.grad is not None
    assert x.grad.tolist() == [256.0] * 4


@pytest.mark.parametrize("task", ["A", "B"])
def test_wrong_weights_are_seen(task: str, tmp_path: Path) -> None:
    import torch
    from gpu_step_model import STEPS, Subject, reference
    from gpu_step_plan import TINY_SIZES
    from gpu_step_work import eager

    reference([task], TINY_SIZES, "cpu", str(tmp_path))
    subject = Subject(task, TINY_SIZES, "cpu", tmp_path)
    subject.adamw(foreach=True)
    step = eager(subject, 1)
    first = subject.compare([step(number) for number in range(STEPS)])
    assert first["right"] is True
    subject.reset()
    assert subject.compare([step(number) for number in range(STEPS)]) == first
    with torch.no_grad():
        # As a product leaves it of which a part was never written.
        subject.parameters[0][: len(subject.parameters[0]) // 2] = 1.0
    assert subject.compare(subject.losses)["right"] is False
    with torch.no_grad():
        subject.parameters[0][0] = float("nan")
    found = subject.compare(subject.losses)
    assert (found["right"], found["update off by"]) == (False, None)


class MockedParent:
    """Clients that say what the test wants and end, die or stay."""

    def __init__(self, acts: list[tuple[list[dict[str, Any]], int | None]]) -> None:
        self.acts = acts
        self.asked: list[list[list[str]]] = []
        self.killed = 0

    def start(self, function: str, *args: Any, env: dict[str, str] | None = None) -> Any:
        if function != "gpu_step_work:client":
            return MockedJob(None)
        rows, setup = args
        self.asked.append(list(rows))
        lines, status = self.acts.pop(0)
        Path(setup["log"]).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return MockedJob(status)


class MockedJob:
    def __init__(self, status: int | None) -> None:
        self.status = status
        self.process = argparse.Namespace(is_running=status is None)

    def wait(self, timeout_s: float) -> int | None:
        return self.status

    def said(self) -> str:
        return "its last words"


def begins(shape: str, **more: Any) -> list[dict[str, Any]]:
    row = {"task": "A", "shape": shape}
    return [{**row, "begins": True}, *([{**row, **more}] if more else [])]


def mocked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, acts: list[Any], **times: float) -> tuple[Any, Any]:
    import gpu_step_lab

    parent = MockedParent(acts)
    monkeypatch.setattr(gpu_step_lab, "kill_drained", lambda process, drain_s: setattr(parent, "killed", 1))
    lab = gpu_step_lab.Lab(settings(monkeypatch, "--device", "cpu"), tmp_path, times.get("deadline", 1e12))
    lab.args.silent_s = times.get("silent_s", 1000.0)
    lab.parent = parent
    lab.neighbour = MockedJob(None)
    return lab, parent


def test_a_client_that_dies_costs_its_own_row_with_a_mocked_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    acts = [(begins("eager", ends=True) + begins("fused"), -11), (begins("graph", ends=True), 0)]
    lab, parent = mocked(monkeypatch, tmp_path, acts)
    lab.measure([["A", "eager"], ["A", "fused"], ["A", "graph"]])
    assert parent.asked[1] == [["A", "graph"]]
    rows = lab.found["rows"]
    assert rows["A/eager"]["ends"]
    assert rows["A/graph"]["ends"]
    assert rows["A/fused"]["failed"] == "the client ended with status -11: its last words"


def test_a_client_that_hangs_is_ended_and_the_rest_goes_on_with_a_mocked_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    acts = [(begins("eager"), None), (begins("fused", failed="RuntimeError: no"), 0)]
    lab, parent = mocked(monkeypatch, tmp_path, acts, silent_s=-1.0)
    lab.measure([["A", "eager"], ["A", "fused"]])
    assert parent.killed == 1
    assert lab.found["rows"]["A/eager"]["failed"].startswith("ended by us")
    assert lab.found["rows"]["A/fused"]["failed"] == "RuntimeError: no"


def test_clients_that_never_begin_a_row_do_not_go_on_for_ever_with_a_mocked_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lab, parent = mocked(monkeypatch, tmp_path, [([], 1)])
    lab.measure([["A", "eager"], ["A", "fused"]])
    assert len(parent.asked) == 1
    assert all("status 1" in row["failed"] for row in lab.found["rows"].values())


def test_what_the_budget_cut_is_measured_the_next_time_with_a_mocked_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from gpu_step_lab import LEFT_OUT

    lab, parent = mocked(monkeypatch, tmp_path, [], deadline=0.0)
    lab.measure([["A", "eager"]])
    assert parent.asked == []
    assert lab.found["rows"]["A/eager"]["failed"] == LEFT_OUT
    rows = list(lab.found["rows"].values())
    lab.note({"task": "A", "shape": "fused", "ends": True})
    again, parent = mocked(monkeypatch, tmp_path, [(begins("eager", ends=True), 0)])
    again.go_on({"rows": [*rows, lab.found["rows"]["A/fused"]]})
    again.measure([["A", "eager"], ["A", "fused"]])
    assert parent.asked == [[["A", "eager"]]]
    assert again.found["rows"]["A/eager"]["ends"]


def test_variables_and_shares_of_clients_with_a_mocked_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from gpu_step_plan import SHAPES, clients_of, variables

    lab, _ = mocked(monkeypatch, tmp_path, [])
    lab._pipe, lab._uuid = tmp_path, "GPU-0"
    env = lab.environment(2**30, SHAPES["share-25"].share)
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert env["CUDA_MPS_CLIENT_PRIORITY"] == "1"
    clients = clients_of(["A"], list(SHAPES))
    assert {name: variables(rows).get("CUDA_LAUNCH_BLOCKING") for name, rows in clients.items()}["blocking"] == "1"
    # The numbers that a share makes wrong must not be asked for, and shares must not be mixed in one process.
    assert {shape.share for shape in SHAPES.values()} == {100, 50, 25, 10}
    for rows in clients.values():
        assert len({(SHAPES[name].share, SHAPES[name].blocking) for _, name in rows}) == 1


def test_a_plan_is_printed_and_nothing_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu_step_shapes

    monkeypatch.setattr(sys, "argv", ["gpu_step_shapes.py", "--plan", "--tasks", "A", "--shapes", "graph,eager"])
    assert gpu_step_shapes.main() == 0
    said = capsys.readouterr().out
    assert said.index("eager: ") < said.index("graph: ")
    assert "compile" not in said


class MockedCuda:
    """Of torch.cuda, what a captured step and a stream of its own need; notes what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def current_stream(self) -> Any:
        return argparse.Namespace(synchronize=lambda: self.calls.append("wait"))

    Stream = current_stream

    def CUDAGraph(self, keep_graph: bool) -> Any:
        note = self.calls.append
        return argparse.Namespace(
            instantiate=lambda: note("instantiate"), replay=lambda: note("replay"), raw_cuda_graph=lambda: 7
        )

    @contextmanager
    def graph(self, graph: Any, stream: Any) -> Iterator[None]:
        self.calls.append("capture")
        yield
        self.calls.append("captured")

    def stream(self, stream: Any) -> Any:
        self.calls.append(f"on {stream if isinstance(stream, str) else 'its own'}")
        return nullcontext()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> MockedCuda:
    import torch

    found = MockedCuda()
    for name in ("current_stream", "Stream", "CUDAGraph", "graph", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    return found


def test_a_step_is_captured_from_the_first_weights_with_a_mocked_gpu(
    cuda: MockedCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu_step_work
    from gpu_step_model import Subject, reference
    from gpu_step_plan import TINY_SIZES

    reference(["A"], TINY_SIZES, "cpu", str(tmp_path))
    subject = Subject("A", TINY_SIZES, "cpu", tmp_path)
    # Here a capture executes too, so the optimizer need not know of it.
    subject.adamw(foreach=True)
    gpu_step_work.eager(subject, 1)(0)
    monkeypatch.setattr(gpu_step_work, "nodes_of", lambda graph: graph.raw_cuda_graph())
    step, nodes = gpu_step_work.captured(subject)
    assert nodes == 7
    assert cuda.calls == ["wait", "capture", "captured", "instantiate"]
    assert step(0) == pytest.approx(subject.losses[0])
    assert cuda.calls[4:] == ["replay", "wait"]


@pytest.mark.parametrize("has_stream", [True, False], ids=["torch 2.12", "torch 2.10"])
def test_a_green_context_is_entered_and_left_with_a_mocked_gpu(
    cuda: MockedCuda, monkeypatch: pytest.MonkeyPatch, *, has_stream: bool
) -> None:
    import gpu_step_work
    import torch
    import torch.cuda.green_contexts
    from gpu_step_plan import SHAPES

    def create(num_sms: int, device_id: int) -> Any:
        assert (num_sms, device_id) == (16, 0)
        old = {name: lambda name=name: cuda.calls.append(name) for name in ("set_context", "pop_context")}
        return argparse.Namespace(**({"Stream": lambda: "a green one"} if has_stream else old))

    monkeypatch.setattr(torch.cuda.green_contexts, "GreenContext", argparse.Namespace(create=create))
    monkeypatch.setattr(torch, "zeros", lambda *_, device: None)
    with gpu_step_work.surroundings(SHAPES["green-16"], "cuda:0"):
        assert not torch._C._is_multithreading_enabled()
    assert torch._C._is_multithreading_enabled()
    begin, end = (["on a green one"], ["wait"]) if has_stream else (["set_context"], ["wait", "pop_context"])
    assert cuda.calls == begin + end
    cuda.calls.clear()
    with gpu_step_work.surroundings(SHAPES["eager"], "cuda:0"):
        pass
    assert cuda.calls == ["on its own", "wait"]
