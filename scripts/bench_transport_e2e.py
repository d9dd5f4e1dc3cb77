"""The payload of bench_transport.py, and the way from torch tensors to torch tensors, the codec the same for all.

256 experiences with 2,048 tokens on average: tokens, logprobs and mask of the response, a reward, a feature vector of
1,024 to 8,192 floats on three of four, prompt and response text, ids. 8.6 MB.
"""

import multiprocessing
import secrets
import statistics
import time

import numpy as np
import torch
from bench_transport_links import LINKS, new_address
from bench_transport_machine import DEPTH, PINS, cpu_s, pin, spent, writer_on_its_core
from bench_transport_services import SERVICES

from mps_trainer.columns import Column
from mps_trainer.transport import Codec, OperatorChannel, RingSettings, SidecarHub

N = 256
COLUMNS = (
    Column(name="eid", source="eid.uid", dtype="text", maximum=200),
    Column(name="group", source="eid.tid", dtype="text", maximum=160),
    Column(name="reward", source="reward"),
    Column(name="tokens", source="tokens", dtype="int32", shape=(None,), maximum=8192),
    Column(name="logprobs", source="logprobs", shape=(None,), maximum=8192),
    Column(name="mask", source="action_mask", dtype="bool", shape=(None,), maximum=8192),
    Column(name="feature", source="info.feature", shape=(None,), maximum=8192),
    Column(name="prompt", source="prompt_text", dtype="text", maximum=32768),
    Column(name="response", source="response_text", dtype="text", maximum=32768),
)
TENSORS = ("tokens", "logprobs", "mask", "feature")


def make_experiences(seed, n=N):
    """A list of dicts of torch tensors, text and numbers, as an operator finds them."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(2048) - 0.18, 0.6, n), 277, 7012).astype(int)
    made = []
    for i, length in enumerate(lengths):
        response = int(0.75 * length)
        width = int(rng.choice([1024, 2048, 4096, 8192])) if i % 4 else 0
        made.append(
            {
                "eid": f"{i // 8}/{seed}/{i}",
                "group": f"{i // 8}/{seed}",
                "reward": float(rng.random()),
                "tokens": torch.from_numpy(rng.integers(0, 150000, length, dtype=np.int32)),
                "logprobs": torch.from_numpy(rng.random(response, dtype=np.float32)),
                "mask": torch.from_numpy(rng.random(response) > 0.1),
                "feature": torch.from_numpy(rng.random(width, dtype=np.float32)),
                "prompt": "p" * (3 * (length - response)),
                "response": "abc" * response,
            }
        )
    return made


def rows_of(experiences):
    """The rows that the codec wants: numpy views of the tensors, one list a column."""
    rows = {c.name: [e[c.name] for e in experiences] for c in COLUMNS}
    for name in TENSORS:
        rows[name] = [tensor.numpy() for tensor in rows[name]]
    rows["reward"] = np.array(rows["reward"], np.float32)
    return rows


def encode_into(codec, experiences, out):
    measured = codec.measure(rows_of(experiences))
    message = codec.message(measured, 0, measured.num_rows)
    codec.write(measured, 0, measured.num_rows, message, out)
    return out[: message.nbytes]


def encoded_batches(count=4):
    """Arrow bytes of batches, as uint8 arrays cut to the length of the shortest."""
    codec = Codec(COLUMNS)
    batches = [encode_into(codec, make_experiences(seed), np.empty(16 << 20, np.uint8)) for seed in range(count)]
    shortest = min(batch.nbytes for batch in batches) // 64 * 64
    return [batch[:shortest] for batch in batches]


def total_of(batch):
    """What a learner at least does: every token, logprob, mask bit and feature is read, as torch tensors."""
    sums = [torch.from_numpy(batch[name].values).sum(dtype=torch.float64).item() for name in TENSORS]
    return sum(sums)


def total_of_bytes(array):
    return total_of(Codec(COLUMNS).decode(array))


def expected_total(experiences):
    return sum(e[name].sum(dtype=torch.float64).item() for e in experiences for name in TENSORS)


def _settings():
    import warnings

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def _ring_consumer(run_id, core, control):
    _settings()
    with SidecarHub(run_id, COLUMNS) as hub:
        pin(core)
        control.send("ready")
        while (n := control.recv()) is not None:
            total = 0.0
            for _ in range(n):
                while not hub.wait(1.0):
                    pass
                with hub.receive() as delivery:
                    total += total_of(delivery.batch)
            control.send(total)
        hub.close(unlink=True)


def _link_consumer(name, link, core, control):
    _settings()
    reader = LINKS[name][1](link)
    pin(core)
    codec = Codec(COLUMNS)
    control.send("ready")
    while (n := control.recv()) is not None:
        total = 0.0
        for _ in range(n):
            array = reader.receive()
            total += total_of(codec.decode(array))
            del array
            reader.done()
        control.send(total)
    reader.close()


class _Processes:
    """A producer here, a consumer there."""

    def __init__(self, target, *args):
        self.control, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=target, args=(*args, theirs), daemon=True)
        self.process.start()

    def start(self):
        if not self.control.poll(120):
            raise TimeoutError("the consumer says nothing")
        self.control.recv()

    def round(self, batches, n, send):
        self.control.send(n)
        before, start = cpu_s(), time.perf_counter()
        for i in range(n):
            send(batches[i % len(batches)])
        if not self.control.poll(120):
            raise TimeoutError("the consumer says nothing")
        total = self.control.recv()
        return time.perf_counter() - start, cpu_s() - before, total

    def stop(self):
        self.control.send(None)
        self.process.join(20)


def ring_case(batches, rounds, n):
    run_id = f"b{secrets.token_hex(4)}"
    processes = _Processes(_ring_consumer, run_id, PINS[1])
    processes.start()
    with OperatorChannel.create(run_id, COLUMNS, RingSettings(), backpressure="block", block_timeout_s=60.0) as channel:

        def send(experiences):
            result = channel.send(rows_of(experiences), request_id=1, want_scores=False)
            if result.rows_dropped:
                raise RuntimeError(f"dropped {result.rows_dropped} rows")

        yield from (processes.round(batches, n, send) for _ in range(rounds))
    processes.stop()


def link_case(name):
    def run(batches, rounds, n):
        address, codec = new_address(name), Codec(COLUMNS)
        writer = LINKS[name][0](address, 11 << 20, DEPTH)
        processes = _Processes(_link_consumer, name, address, PINS[1])
        processes.start()
        # As many buffers as may be on their way: zmq and mp.Queue send from the buffer after `send` has returned.
        buffers, turn = [np.zeros(11 << 20, np.uint8) for _ in range(8)], iter(range(10**9))

        def send(experiences):
            writer.send(encode_into(codec, experiences, buffers[next(turn) % 8]))

        yield from (processes.round(batches, n, send) for _ in range(rounds))
        processes.stop()
        writer.close()

    return run


def service_case(name):
    def run(batches, rounds, n):
        service, codec = SERVICES[name](), Codec(COLUMNS)
        buffer = np.zeros(11 << 20, np.uint8)
        for _ in range(rounds):
            before, start = cpu_s(), time.perf_counter()
            total = service.learn_all(lambda i: encode_into(codec, batches[i % len(batches)], buffer), n)
            yield time.perf_counter() - start, cpu_s() - before, total
        service.close()

    return run


CASES = {
    "ring": ring_case,
    **{name: link_case(name) for name in LINKS if not name.startswith("ring")},
    **{name: service_case(name) for name in SERVICES},
}


def measure_end_to_end(cases, rounds, n):
    """{peer: ([experiences/s], [writer processor s per batch])}; the first round warms up."""
    _settings()
    batches = [make_experiences(seed) for seed in range(4)]
    expected = sum(expected_total(batches[i % 4]) for i in range(n))
    rows = {}
    for name, case in cases.items():
        if spent():
            break
        try:
            with writer_on_its_core(name in LINKS):
                samples = list(case(batches, rounds + 1, n))[1:]
        except ImportError as error:
            print(f"  {name}: skipped ({error})", flush=True)
            continue
        for _, _, total in samples:
            if abs(total - expected) > 1e-6 * expected:
                raise RuntimeError(f"{name} delivered other tensors: {total} is not {expected}")
        rows[name] = ([n * N / took for took, _, _ in samples], [cpu / n for _, cpu, _ in samples])
        print(f"  {name}: {statistics.median(rows[name][0]):.0f} experiences/s", flush=True)
    return rows
