"""Worker processes: jobs done in parallel, where a crash or a hang costs one job and not the run.

A worker serves one job at a time and outlives errors that it can catch.  What it cannot (a segmentation fault of a
compiler, an illegal memory access, a kernel that never ends) ends the worker, and the next job starts a new one.

    with Worker(setup) as worker:
        outcome = worker.call(job, timeout=60)
    for job, outcome, seconds in run_many(jobs, setup, processes=16): ...

``setup`` is a function without arguments (of a module, or a partial of one) that is called once in the worker and returns the
function of one job.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, Literal

from peakattn_lab.wording import failure

Setup = Callable[[], Callable[[Any], Any]]

_GRACE = 2.0  # seconds in which a worker that was told to may end by itself


@dataclass(frozen=True)
class Outcome:
    """How a job ended: ``done`` with a value; ``failed`` with an exception's line; ``crashed`` or ``hung`` with the worker."""

    status: Literal["done", "failed", "crashed", "hung"]
    value: Any = None
    message: str = ""


class SpoiltError(Exception):
    """Raised by a job's function when its process is of no more use, such as one with a broken CUDA context."""


def check_context(finish: Callable[[], None], cause: Exception) -> None:
    """Raise SpoiltError when a failure took the CUDA context with it, so that waiting for the device with ``finish`` fails."""
    try:
        finish()
    except Exception as error:
        raise SpoiltError(f"broke the CUDA context ({failure(error)})") from cause


class Worker:
    """One process that serves jobs; started with the first one, and again after it was lost."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._process: Any = None
        self._pipe: connection.Connection | None = None
        self._deadline = 0.0

    def call(self, job: Any, timeout: float) -> Outcome:
        """Do one job and wait for it, at most ``timeout`` seconds."""
        self.start(job, timeout)
        connection.wait(self.awaited, timeout)
        return self.outcome() or self._hung()

    def start(self, job: Any, timeout: float) -> None:
        """Begin a job without waiting; ``awaited`` then becomes ready, and ``outcome`` tells."""
        if self._process is None or not self._process.is_alive():
            self.close()
            context = _context()
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, self._setup), daemon=True)
            self._process.start()
            theirs.close()
        self._deadline = time.monotonic() + timeout
        with contextlib.suppress(BrokenPipeError):  # it died while idle; outcome() says so
            self._pipe.send(job)  # type: ignore[union-attr]

    @property
    def awaited(self) -> list[Any]:
        """What ``multiprocessing.connection.wait`` can wait for while a job runs."""
        return [self._pipe, self._process.sentinel]

    def outcome(self) -> Outcome | None:
        """How the job that was started ended; None while it runs within its time."""
        pipe, process = self._pipe, self._process
        assert pipe is not None
        try:
            if pipe.poll():
                spoilt, result = pipe.recv()
                if spoilt:
                    self.close()
                return result
        except (EOFError, ConnectionError):
            pass
        else:
            if process.is_alive():
                return self._hung() if time.monotonic() >= self._deadline else None
        process.join(_GRACE)
        how = _how_it_ended(process.exitcode)
        self.close()
        return Outcome("crashed", message=f"the worker process {how}")

    def _hung(self) -> Outcome:
        self.close(grace=0.0)
        return Outcome("hung", message="it did not end in time, and its worker process was stopped")

    def close(self, grace: float = _GRACE) -> None:
        """End the process."""
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if pipe is not None:
            pipe.close()  # an idle worker ends at that
        if process is not None:
            process.join(grace)
            if process.is_alive():
                process.kill()
                process.join(_GRACE)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(grace=0.0)


@functools.cache
def _context() -> Any:
    """A server that has imported this package, with no CUDA context, and forks workers from itself: a new one costs little."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["peakattn_lab.sweep.measure", "peakattn_lab.inspection"])
    return context


def _serve(pipe: connection.Connection, setup: Setup) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the pipe
    spoilt = False
    try:
        function = setup()
    except Exception as error:
        message = f"the worker cannot start ({failure(error)})"

        def function(job: Any) -> Any:
            raise SpoiltError(message)

    while not spoilt:
        try:
            job = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            result = Outcome("done", function(job))
        except SpoiltError as error:
            spoilt, result = True, Outcome("failed", message=str(error))
        except Exception as error:
            result = Outcome("failed", message=failure(error))
        pipe.send((spoilt, result))


def _how_it_ended(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"was ended by signal {-exitcode} ({signal.Signals(-exitcode).name})"
    return f"ended with exit code {exitcode}"


def run_many(
    jobs: Iterable[Any],
    setup: Setup,
    processes: int | None = None,
    *,
    timeout: float,
    stop: threading.Event | None = None,
) -> Iterator[tuple[Any, Outcome, float]]:
    """(job, outcome, seconds) of all jobs, each as soon as it is there.

    Closing the iterator ends the workers, and so does ``stop``.
    """
    waiting = iter(jobs)
    workers = [Worker(setup) for _ in range(processes or default_processes())]
    busy: dict[Worker, tuple[Any, float]] = {}
    try:
        while True:
            for worker in workers:
                if worker not in busy and (job := next(waiting, None)) is not None:
                    busy[worker] = job, time.monotonic()
                    worker.start(job, timeout)
            if not busy or (stop is not None and stop.is_set()):
                return
            connection.wait([one for worker in busy for one in worker.awaited], timeout=1.0)
            for worker, (job, began) in list(busy.items()):
                outcome = worker.outcome()
                if outcome is not None:
                    del busy[worker]
                    yield job, outcome, time.monotonic() - began
    finally:
        for worker in workers:
            worker.close(grace=0.0)


def default_processes() -> int:
    """One for each CPU that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
