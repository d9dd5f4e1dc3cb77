"""How bench_transport.py drives a link or a service: throughput and latency of one peer."""

import multiprocessing
import time

import numpy as np
from bench_transport_links import LINKS, new_address
from bench_transport_machine import DEPTH, PINS, checksum, cpu_s, pin, writer_on_its_core
from bench_transport_services import SERVICES

#: Bytes of a small message.
SMALL = 1024


def consume(name, address, reply_address, core, control):
    """The other process: takes commands from `control`, reads the link, answers with sums, latencies and its time."""
    reader = LINKS[name][1](address)
    back = None if hasattr(reader, "answer") else LINKS[name][0](reply_address, SMALL, DEPTH)
    pin(core)
    control.send("ready")
    reply = np.zeros(SMALL, np.uint8)
    while True:
        command, n = control.recv()
        if command == "stop":
            break
        if command == "take":
            total, before = 0, cpu_s()
            for _ in range(n):
                total += checksum(reader.receive())
                reader.done()
            control.send((total % 2**64, cpu_s() - before))
        elif command == "ping":
            late = []
            for _ in range(n):
                array = reader.receive()
                late.append(time.monotonic_ns() - int(array[:8].view(np.int64)[0]))
                del array
                if back is None:
                    reader.answer()
                    reader.done()
                else:
                    reader.done()
                    back.send(reply)
            control.send(late)
    reader.close()
    if back is not None:
        back.close()


class LinkPeer:
    """Two links of one kind, or one that brings answers, and a consumer process."""

    def __init__(self, name, nbytes):
        self.name = name
        address, self.reply_address = new_address(name), new_address(name)
        self.writer = LINKS[name][0](address, nbytes, DEPTH if nbytes > 65536 else 32)
        self.control, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        args = (name, address, self.reply_address, PINS[1], theirs)
        self.process = context.Process(target=consume, args=args, daemon=True)
        self.reader = None
        self.process.start()
        try:
            self._hear()
        except BaseException:
            self.close(cut=True)
            raise

    def _hear(self):
        if not self.control.poll(120):
            raise TimeoutError(f"the consumer of {self.name} says nothing")
        return self.control.recv()

    def throughput(self, arrays, n):
        expected = sum(checksum(arrays[i % len(arrays)]) for i in range(n)) % 2**64
        self.control.send(("take", n))
        with writer_on_its_core():
            before, start = cpu_s(), time.perf_counter()
            for i in range(n):
                self.writer.send(arrays[i % len(arrays)])
            total, consumer_cpu = self._hear()
            took = time.perf_counter() - start
        if total != expected:
            raise RuntimeError(f"{self.name} delivered wrong bytes")
        return took, cpu_s() - before, consumer_cpu

    def latency(self, n, pause_s):
        ask = getattr(self.writer, "ask", None)
        if ask is None:
            ask = self._send_and_receive
            if self.reader is None:
                # Before the first answer: iceoryx2 drops what is sent while nobody listens.
                self.reader = LINKS[self.name][1](self.reply_address)
        message, trips = np.zeros(SMALL, np.uint8), []
        self.control.send(("ping", n))
        with writer_on_its_core():
            for _ in range(n):
                if pause_s:
                    time.sleep(pause_s)
                message[:8] = np.frombuffer(time.monotonic_ns().to_bytes(8, "little"), np.uint8)
                start = time.perf_counter_ns()
                ask(message)
                trips.append(time.perf_counter_ns() - start)
        return self._hear(), trips

    def _send_and_receive(self, message):
        self.writer.send(message)
        self.reader.receive()
        self.reader.done()

    def close(self, *, cut=False):
        """`cut`: in the middle of a round, where the consumer waits for messages that will not come."""
        if cut:
            self.process.terminate()
        else:
            self.control.send(("stop", 0))
        self.process.join(20)
        if self.reader is not None:
            self.reader.close()
        self.writer.close()


class ServicePeer:
    """Ray or FastAPI."""

    def __init__(self, name, nbytes):
        self.name, self.service = name, SERVICES[name]()

    def throughput(self, arrays, n):
        consumer, before, start = self.service.consumer_cpu_s(), cpu_s(), time.perf_counter()
        total = self.service.send_all(arrays, n) % 2**64
        took, mine = time.perf_counter() - start, cpu_s() - before
        if total != sum(checksum(arrays[i % len(arrays)]) for i in range(n)) % 2**64:
            raise RuntimeError(f"{self.name} delivered wrong bytes")
        return took, mine, self.service.consumer_cpu_s() - consumer

    def latency(self, n, pause_s):
        late, trips, message = [], [], np.zeros(SMALL, np.uint8)
        for _ in range(n):
            if pause_s:
                time.sleep(pause_s)
            message[:8] = np.frombuffer(time.monotonic_ns().to_bytes(8, "little"), np.uint8)
            start = time.perf_counter_ns()
            late.append(self.service.ping(message))
            trips.append(time.perf_counter_ns() - start)
        return late, trips

    def close(self, *, cut=False):
        self.service.close()
