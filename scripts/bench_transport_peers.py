"""What bench_transport.py compares: ways to move bytes from one Python process to another on one machine.

Each one-way link is a writer class and a reader class with `send(array)` and `receive() -> array` / `done()`. A peer
that is not installed raises ImportError when it is opened, and is skipped by name. Ray and FastAPI are services rather
than links and bring their own consumer.
"""

import ctypes
import logging
import multiprocessing
import os
import resource
import secrets
import socket
import sys
import time

import numpy as np
from bench_transport_ring import BareIn, BareOut, RingIn, RingOut

#: Messages under way.
DEPTH = 4


class UnixOut:
    def __init__(self, address, nbytes, depth):
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(f"\0{address}")
        self.server.listen(1)
        self.socket = None

    def send(self, array):
        if self.socket is None:
            self.socket, _ = self.server.accept()
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        self.socket.sendall(array.nbytes.to_bytes(8, "little"))
        self.socket.sendall(array)

    def close(self):
        self.server.close()
        if self.socket:
            self.socket.close()


class UnixIn:
    def __init__(self, address):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self.socket.connect(f"\0{address}")
        self.buffer = np.zeros(17 << 20, np.uint8)
        self.size = bytearray(8)

    def _fill(self, view):
        while view:
            view = view[self.socket.recv_into(view) :]

    def receive(self):
        self._fill(memoryview(self.size))
        n = int.from_bytes(self.size, "little")
        self._fill(memoryview(self.buffer)[:n])
        return self.buffer[:n]

    def done(self):
        pass

    def close(self):
        self.socket.close()


class ZmqOut:
    def __init__(self, address, nbytes, depth):
        import zmq

        self.socket = zmq.Context.instance().socket(zmq.PUSH)
        self.socket.set_hwm(depth)
        self.socket.bind(f"ipc://@{address}")

    def send(self, array):
        self.socket.send(array, copy=array.nbytes < 65536)

    def close(self):
        self.socket.close(linger=0)


class ZmqIn:
    def __init__(self, address):
        import zmq

        self.socket = zmq.Context.instance().socket(zmq.PULL)
        self.socket.set_hwm(8)
        self.socket.connect(f"ipc://@{address}")

    def receive(self):
        return np.frombuffer(self.socket.recv(copy=False), np.uint8)

    def done(self):
        pass

    def close(self):
        self.socket.close(linger=0)


class IceoryxOut:
    def __init__(self, address, nbytes, depth):
        import iceoryx2 as iox2

        self.iox2, self.nbytes = iox2, nbytes
        iox2.set_log_level(iox2.LogLevel.Fatal)
        self.node = iox2.NodeBuilder.new().create(iox2.ServiceType.Ipc)
        builder = self.node.service_builder(iox2.ServiceName.new(address)).publish_subscribe(iox2.Slice[ctypes.c_uint8])
        self.service = (
            builder.max_publishers(1).max_subscribers(1).subscriber_max_buffer_size(depth)
            .enable_safe_overflow(False).open_or_create()
        )  # fmt: skip
        strategy = iox2.BackpressureStrategy.RetryUntilDelivered
        self.port = (
            self.service.publisher_builder().initial_max_slice_len(nbytes).backpressure_strategy(strategy).create()
        )
        event = self.node.service_builder(iox2.ServiceName.new(f"{address}.event")).event().open_or_create()
        self.notifier = event.notifier_builder().create()

    def send(self, array):
        sample = self.port.loan_slice_uninit(array.nbytes)
        target = (ctypes.c_uint8 * array.nbytes).from_address(sample.payload().data_ptr)
        np.copyto(np.frombuffer(target, np.uint8), array)
        sample.assume_init().send()
        self.notifier.notify()

    def close(self):
        self.port.delete()


class IceoryxIn:
    def __init__(self, address):
        import iceoryx2 as iox2

        self.iox2 = iox2
        iox2.set_log_level(iox2.LogLevel.Fatal)
        self.node = iox2.NodeBuilder.new().create(iox2.ServiceType.Ipc)
        service = (
            self.node.service_builder(iox2.ServiceName.new(address))
            .publish_subscribe(iox2.Slice[ctypes.c_uint8])
            .open()
        )
        self.port = service.subscriber_builder().create()
        event = self.node.service_builder(iox2.ServiceName.new(f"{address}.event")).event().open_or_create()
        self.listener = event.listener_builder().create()

    def receive(self):
        while (sample := self.port.receive()) is None:
            self.listener.timed_wait(self.iox2.Duration.from_secs(1))
        self.sample = sample
        payload = sample.payload()
        size = payload.len() if callable(payload.len) else payload.len
        return np.frombuffer((ctypes.c_uint8 * size).from_address(payload.data_ptr), np.uint8)

    def done(self):
        self.sample.delete()

    def close(self):
        self.port.delete()


class PipeOut:
    def __init__(self, address, nbytes, depth):
        _, self.writer_end = address

    def send(self, array):
        self.writer_end.send_bytes(array)

    def close(self):
        self.writer_end.close()


class PipeIn:
    def __init__(self, address):
        self.end, _ = address

    def receive(self):
        return np.frombuffer(self.end.recv_bytes(), np.uint8)

    def done(self):
        pass

    def close(self):
        self.end.close()


class QueueOut:
    def __init__(self, address, nbytes, depth):
        self.queue = address

    def send(self, array):
        self.queue.put(array)

    def close(self):
        self.queue.close()


class QueueIn:
    def __init__(self, queue):
        self.queue = queue

    def receive(self):
        return self.queue.get()

    def done(self):
        pass

    def close(self):
        self.queue.close()


LINKS = {
    "ring": (RingOut, RingIn),
    "ring (bare link, no API)": (BareOut, BareIn),
    "iceoryx2": (IceoryxOut, IceoryxIn),
    "unix socket": (UnixOut, UnixIn),
    "zmq ipc": (ZmqOut, ZmqIn),
    "mp.Pipe": (PipeOut, PipeIn),
    "mp.Queue": (QueueOut, QueueIn),
}


def new_address(name):
    """Where the two ends of a link meet: a name, or the object that a child process inherits."""
    if name == "mp.Pipe":
        return multiprocessing.Pipe(duplex=False)
    if name == "mp.Queue":
        return multiprocessing.get_context("spawn").Queue(DEPTH)
    return f"b{secrets.token_hex(5)}"


class RayService:
    """A consumer actor in a private Ray; 4 messages in flight, as actor calls allow."""

    def __init__(self):
        import ray

        logging.disable(logging.WARNING)
        here = {"PYTHONPATH": os.pathsep.join([os.path.dirname(os.path.abspath(__file__)), *sys.path])}
        ray.init(
            address="local",
            runtime_env={"env_vars": here},
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=400 << 20,
        )
        self.ray = ray

        @ray.remote(num_cpus=0)
        class Consumer:
            def take(self, array):
                return checksum(array)

            def learn(self, array):
                from bench_transport_e2e import total_of_bytes

                return total_of_bytes(array)

            def ping(self, array):
                now = time.monotonic_ns()
                return now - int(array[:8].view(np.int64)[0]), np.zeros(256, np.float32)

            def cpu(self):
                return cpu_s()

        self.actor = Consumer.remote()
        self.ray.get(self.actor.cpu.remote())

    def send_all(self, arrays, n):
        total, flying = 0, []
        for i in range(n):
            flying.append(self.actor.take.remote(self.ray.put(arrays[i % len(arrays)])))
            if len(flying) == 4:
                total += self.ray.get(flying.pop(0))
        return total + sum(self.ray.get(flying))

    def learn_all(self, encode, n):
        total, flying = 0.0, []
        for i in range(n):
            flying.append(self.actor.learn.remote(self.ray.put(encode(i))))
            if len(flying) == 4:
                total += self.ray.get(flying.pop(0))
        return total + sum(self.ray.get(flying))

    def ping(self, array):
        return self.ray.get(self.actor.ping.remote(array))[0]

    def consumer_cpu_s(self):
        return self.ray.get(self.actor.cpu.remote())

    def close(self):
        self.ray.shutdown()


class FastApiService:
    """A uvicorn server in another process and a `requests` session: the REST service that people are told to write."""

    def __init__(self):
        import fastapi  # noqa: F401  # to fail before a process is started
        import requests
        import uvicorn  # noqa: F401

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=_serve, args=(port,), daemon=True)
        self.process.start()
        self.session, self.url = requests.Session(), f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while not self._answers(requests.ConnectionError):
            if time.monotonic() > deadline:
                raise TimeoutError("uvicorn does not come up")
            self.process.join(0.1)

    def _answers(self, refused):
        try:
            self.session.get(f"{self.url}/cpu", timeout=5)
        except refused:
            return False
        return True

    def send_all(self, arrays, n):
        bodies = [memoryview(array) for array in arrays]
        return sum(
            int(self.session.post(f"{self.url}/take", data=bytes(bodies[i % len(bodies)])).text) for i in range(n)
        )

    def learn_all(self, encode, n):
        return sum(float(self.session.post(f"{self.url}/learn", data=bytes(encode(i))).text) for i in range(n))

    def ping(self, array):
        return int(self.session.post(f"{self.url}/ping", data=bytes(array)).headers["one-way-ns"])

    def consumer_cpu_s(self):
        return float(self.session.get(f"{self.url}/cpu").text)

    def close(self):
        self.session.close()
        self.process.terminate()
        self.process.join(10)


def _serve(port):
    import uvicorn
    from fastapi import FastAPI, Request, Response

    app = FastAPI()

    @app.post("/take")
    async def take(request: Request):
        return Response(str(checksum(np.frombuffer(await request.body(), np.uint8))))

    @app.post("/learn")
    async def learn(request: Request):
        from bench_transport_e2e import total_of_bytes

        return Response(str(total_of_bytes(np.frombuffer(await request.body(), np.uint8))))

    @app.post("/ping")
    async def ping(request: Request):
        sent = int(np.frombuffer(await request.body(), np.int64, 1)[0])
        return Response(bytes(1024), headers={"one-way-ns": str(time.monotonic_ns() - sent)})

    @app.get("/cpu")
    async def cpu():
        return Response(str(cpu_s()))

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


SERVICES = {"ray put/get": RayService, "fastapi": FastApiService}


def checksum(array):
    """Reads every byte: the sum of all 8-byte words, modulo 2**64."""
    return int(np.add.reduce(array[: array.nbytes // 8 * 8].view(np.uint64)))


def cpu_s():
    """Processor seconds of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
