"""APScheduler 3 in three processes that share a job store, as a web application with three workers comes to run it.

Its guide says that a job store must not be shared between schedulers. A replicated agent has no other place for its
jobs, so this is what such deployments have. Run as a program, this is one of the three.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from bench import redis_peer, work
from bench.contestants import SLOTS, WORKERS, Contestant, need, ready


class OnSQLAlchemy(Contestant):
    name = "APScheduler, SQLAlchemy"
    how = "three processes share a job store in SQLite"
    lead_s = 15.0  # its processes learn of jobs only when they start, so they are started for each measurement

    def __init__(self, folder: Path) -> None:
        need("apscheduler", "sqlalchemy")
        super().__init__(folder)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    async def arrange(self, due_ms: Mapping[str, int], work_ms: int) -> None:
        await self.stop_workers()
        scheduler = make_scheduler(self.store(), background=True)
        scheduler.start(paused=True)
        for name, at_ms in due_ms.items():
            at = datetime.datetime.fromtimestamp(at_ms / 1_000, datetime.UTC)
            # Not due once but hourly, of which only the first comes: two of three processes end with an error when the
            # third has removed a job that is over.
            scheduler.add_job("bench.work:do", "interval", hours=1, start_date=at, args=(name, work_ms), id=name)
        scheduler.shutdown()
        for worker in WORKERS:
            self.worker(worker, "bench.apscheduler_peer", self.store())
        await self.start_workers()

    def store(self) -> str:
        return f"sqlite:///{self.folder / 'jobs.db'}"


class OnRedis(OnSQLAlchemy):
    name = "APScheduler, Redis"
    how = "three processes share a job store in Redis"

    def __init__(self, folder: Path) -> None:
        need("apscheduler", "redis")
        redis_peer.find_server()
        Contestant.__init__(self, folder)
        self.port = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with redis_peer.server(self.folder) as self.port:
            yield

    def store(self) -> str:
        return f"redis:{self.port}"


def make_scheduler(store: str, *, background: bool) -> Any:
    """With a pool as large as the others' slots, and no due time thrown away for being late."""
    from apscheduler.executors.pool import ThreadPoolExecutor
    from apscheduler.jobstores.redis import RedisJobStore
    from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
    from apscheduler.schedulers.background import BackgroundScheduler
    from apscheduler.schedulers.blocking import BlockingScheduler

    kind, _, port = store.partition(":")
    if kind == "redis":
        place = RedisJobStore(host="127.0.0.1", port=int(port))
    else:
        # Writers of other processes are waited for: with the driver's 5 s a process ends when a thousand are due.
        place = SQLAlchemyJobStore(url=store, engine_options={"connect_args": {"timeout": 60}})
    return (BackgroundScheduler if background else BlockingScheduler)(
        jobstores={"default": place},
        executors={"default": ThreadPoolExecutor(SLOTS)},
        job_defaults={"misfire_grace_time": None},
        timezone=datetime.UTC,
    )


def main() -> None:
    from apscheduler.events import EVENT_SCHEDULER_STARTED

    scheduler = make_scheduler(sys.argv[1], background=False)
    folder, name = Path(os.environ[work.FOLDER]), os.environ[work.WORKER]
    scheduler.add_listener(lambda _: ready(folder, name), EVENT_SCHEDULER_STARTED)
    scheduler.start()


if __name__ == "__main__":
    main()
