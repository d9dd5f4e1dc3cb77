"""One-way links for bench_transport.py: ways to move bytes from one Python process to another on one machine.

Each is a writer class and a reader class with `send(array)` and `receive() -> array` / `done()`. A peer that is not
installed raises ImportError when it is opened, and is skipped by name.
"""

import ctypes
import multiprocessing
import secrets
import socket

import numpy as np
from bench_transport_machine import DEPTH
from bench_transport_ring import BareIn, BareOut, RingIn, RingOut


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
            self.listener.timed_wait(self.iox2.Duration.from_millis(50))
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
        # A run that is cut leaves arrays that nobody takes; its end would wait for them without a limit.
        self.queue.cancel_join_thread()

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
