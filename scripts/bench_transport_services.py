"""Ray and FastAPI for bench_transport.py: services rather than links, with a consumer of their own.

A peer that is not installed raises ImportError when it is opened, and is skipped by name.
"""

import logging
import multiprocessing
import os
import socket
import sys
import time

import numpy as np
from bench_transport_machine import checksum, cpu_s


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
