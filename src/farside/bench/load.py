"""A training-like load: it reads a token data set as a training job does and times how long the "GPU" waits.

Workers read the windows of shuffled batches by `pread` or `mmap`, never more than a few batches ahead of the
trainer, which "computes" for a fixed time per batch. Every window's checksum is verified. Workers are
processes; where the data are read through the library, which is not to be forked, they are threads.

Run as a program it prints JSON lines: `{"progress": …}` some times a second, then one `{"result": …}`::

    python -m farside.bench.load /mnt/c4 --io mmap
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import queue
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier, Semaphore
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import click
import numpy as np
import numpy.typing as npt

from farside.bench.dataset import Checksums, Manifest, load_checksums, load_manifest
from farside.bench.figures import Floats, Trace, describe, percentile
from farside.errors import FarsideError, UsageError

Io = Literal["pread", "mmap"]
Order = Literal["shuffle", "shards"]
Indices = npt.NDArray[np.int64]

_READY_S = 0.0005  # a batch that came faster than this was waiting for the trainer
_PROGRESS_S = 0.25
_LOOK_S = 1.0  # how often a waiting trainer looks whether its worker is alive


@dataclass(frozen=True)
class Load:
    """What is read, and how. `compute_s` per batch; `prefetch` in batches per worker; a batch that is not
    there after `stall_s` ends the run."""

    io: Io = "pread"
    order: Order = "shuffle"
    batch: int = 48
    workers: int = 4
    prefetch: int = 2
    compute_s: float = 0.025
    seed: int = 1
    stall_s: float = 120.0

    @property
    def ideal_samples_per_s(self) -> float:
        return self.batch / self.compute_s


@dataclass(frozen=True)
class WorkerReport:
    """What a worker says of one batch: latencies in ms, windows with wrong bytes, the first errors."""

    reads_ms: Floats
    wrong: int
    errors: tuple[str, ...]


@dataclass(frozen=True)
class Epoch:
    """The outcome of one epoch. `wrong`: windows whose bytes did not match their checksum."""

    trace: Trace
    batches_planned: int
    wrong: int
    errors: tuple[str, ...]


def batches(load: Load, manifest: Manifest) -> list[Indices]:
    """The windows of each batch, in the trainer's order; worker `i % workers` reads batch `i`.

    "shuffle" permutes all windows; with "shards" each worker reads whole shards from start to end.
    """
    random = np.random.default_rng(load.seed)
    if load.order == "shuffle":
        order = random.permutation(manifest.windows)
        whole = len(order) // load.batch * load.batch
        return list(order[:whole].reshape(-1, load.batch))
    shards = random.permutation(len(manifest.shards))
    queues: list[list[Indices]] = []
    for worker in range(load.workers):
        mine = shards[worker :: load.workers, None] * manifest.windows_per_shard
        windows = (mine + np.arange(manifest.windows_per_shard)).reshape(-1)
        whole = len(windows) // load.batch * load.batch
        queues.append(list(windows[:whole].reshape(-1, load.batch)))
    rounds = min(len(own) for own in queues)
    return [queues[worker][i] for i in range(rounds) for worker in range(load.workers)]


class Windows(Protocol):
    """The windows of a data set, opened by one worker for itself."""

    def read_into(self, window: int, buffer: memoryview) -> None:
        """Fill `buffer` (one window long) with a window's bytes. Raises OSError or FarsideError."""


class WindowFiles:
    """The shards of a data set, opened by one worker for itself. Raises OSError as the file system does."""

    def __init__(self, root: Path, manifest: Manifest, io: Io) -> None:
        self._size = manifest.window_bytes
        self._per_shard = manifest.windows_per_shard
        self._fds = [os.open(root / name, os.O_RDONLY) for name in manifest.shards]
        self._maps = [mmap.mmap(fd, 0, prot=mmap.PROT_READ) for fd in self._fds] if io == "mmap" else []

    def read_into(self, window: int, buffer: memoryview) -> None:
        """Fill `buffer` (one window long) with a window's bytes."""
        shard, place = divmod(window, self._per_shard)
        offset = place * self._size
        if self._maps:
            buffer[:] = self._maps[shard][offset : offset + self._size]
            return
        got = 0
        while got < self._size:
            count = os.preadv(self._fds[shard], [buffer[got:]], offset + got)
            if count == 0:
                raise OSError(f"window {window} ends after {got} bytes")
            got += count


@dataclass
class Worker:
    """One that reads: what it may still begin, what it has done."""

    runs: ForkProcess | threading.Thread
    permits: Semaphore | threading.Semaphore
    reports: Queue[WorkerReport] | queue.Queue[WorkerReport]


def _work(
    open_windows: Callable[[], Windows],
    window_bytes: int,
    checksums: Checksums,
    load: Load,
    todo: list[Indices],
    started: Barrier | threading.Barrier,
    permits: Semaphore | threading.Semaphore,
    reports: Queue[WorkerReport] | queue.Queue[WorkerReport],
) -> None:
    """A worker: reads its batches in order into its slots."""
    slots = memoryview(mmap.mmap(-1, (load.prefetch + 1) * load.batch * window_bytes))
    started.wait()
    opened: Windows | None = None
    size = window_bytes
    for number, windows in enumerate(todo):
        permits.acquire()
        base = number % (load.prefetch + 1) * load.batch * size
        reads_ms, wrong, errors = np.zeros(len(windows)), 0, list[str]()
        for i, window in enumerate(windows):
            buffer = slots[base + i * size : base + (i + 1) * size]
            began = time.perf_counter()
            try:
                opened = opened or open_windows()
                opened.read_into(int(window), buffer)
            except (OSError, FarsideError) as error:
                errors.append(f"{type(error).__name__}: {error}")
                continue
            finally:
                reads_ms[i] = (time.perf_counter() - began) * 1e3
            wrong += zlib.crc32(buffer) != checksums[window]
        reports.put(WorkerReport(reads_ms, int(wrong), tuple(errors[:3])))


@contextmanager
def _processes(root: Path, manifest: Manifest, load: Load, plan: list[Indices]) -> Iterator[list[Worker]]:
    """Worker processes that have started but opened nothing yet; killed at the end."""
    context = multiprocessing.get_context("fork")
    checksums = load_checksums(root)
    open_windows = partial(WindowFiles, root, manifest, load.io)
    started = context.Barrier(load.workers + 1)
    workers: list[Worker] = []
    processes: list[ForkProcess] = []
    try:
        for number in range(load.workers):
            permits, reports = context.Semaphore(load.prefetch), context.Queue()
            todo = plan[number :: load.workers]
            process = context.Process(
                target=_work,
                args=(open_windows, manifest.window_bytes, checksums, load, todo, started, permits, reports),
                daemon=True,
            )
            process.start()
            processes.append(process)
            workers.append(Worker(process, permits, reports))
        started.wait(60)
        yield workers
    finally:
        for process in processes:  # one may hang in a read on a dead mount: nobody waits for it
            process.kill()


def start_threads(
    open_windows: Callable[[], Windows],
    manifest: Manifest,
    checksums: Checksums,
    load: Load,
    plan: list[Indices],
) -> list[Worker]:
    """Worker threads that have started but opened nothing yet. They end when all of `plan` is read."""
    started = threading.Barrier(load.workers + 1)
    workers: list[Worker] = []
    for number in range(load.workers):
        permits, reports = threading.Semaphore(load.prefetch), queue.Queue[WorkerReport]()
        todo = plan[number :: load.workers]
        thread = threading.Thread(
            target=_work,
            args=(open_windows, manifest.window_bytes, checksums, load, todo, started, permits, reports),
            daemon=True,
        )
        thread.start()
        workers.append(Worker(thread, permits, reports))
    started.wait(60)
    return workers


def _next_report(worker: Worker, stall_s: float) -> WorkerReport:
    deadline = time.monotonic() + stall_s
    while True:
        try:
            return worker.reports.get(timeout=_LOOK_S)
        except queue.Empty:
            if not worker.runs.is_alive() and worker.reports.empty():
                raise FarsideError(f"a worker died: {_why(worker)}") from None
            if time.monotonic() > deadline:
                raise FarsideError(f"no batch came for {stall_s:g} s: a read hangs") from None


def _why(worker: Worker) -> str:
    if isinstance(worker.runs, threading.Thread):
        return "an unexpected error, see its log"
    code = worker.runs.exitcode
    return "a read of its mapping failed (SIGBUS)" if code == -7 else f"exit code {code}"


def run(root: Path, load: Load, progress: Callable[[Trace], None] = lambda _trace: None) -> Epoch:
    """Read the data set in `root` for one epoch. Call it from a process without threads: it forks.

    Raises FarsideError if there is no data set, a worker dies, or a read hangs.
    """
    manifest = load_manifest(root)
    if manifest is None:
        raise UsageError("there is no token data set here", path=str(root))
    plan = batches(load, manifest)
    with _processes(root, manifest, load, plan) as workers:
        return train(workers, manifest, load, plan, progress)


def train(
    workers: list[Worker],
    manifest: Manifest,
    load: Load,
    plan: list[Indices],
    progress: Callable[[Trace], None] = lambda _trace: None,
) -> Epoch:
    """Consume one epoch, batch by batch, as the workers of `plan` deliver it.

    Raises FarsideError if a worker dies or a read hangs.
    """
    trace = Trace(load.batch, manifest.window_bytes)
    wrong, errors = 0, list[str]()
    last = free_at = time.perf_counter()  # free_at: when the GPU is idle again
    for number in range(len(plan)):
        worker = workers[number % load.workers]
        began = time.perf_counter()
        report = _next_report(worker, load.stall_s)
        there = time.perf_counter()
        worker.permits.release()
        progress(trace)  # in the GPU's shadow
        # Data that lay ready count as taken when the GPU fell idle, so that late wake-ups of this
        # process are not charged to the file system.
        free_at = (free_at if there - began < _READY_S else there) + load.compute_s
        time.sleep(max(0.0, free_at - time.perf_counter()))
        now = time.perf_counter()
        trace.wait.append(there - began)
        trace.compute.append(now - there)
        trace.step.append(now - last)
        trace.reads_ms.append(report.reads_ms)
        wrong += report.wrong
        errors += report.errors
        last = now
    return Epoch(trace, len(plan), wrong, tuple(errors))


def result_of(epoch: Epoch, ideal_samples_per_s: float) -> dict[str, Any]:
    """What a run reports in the end."""
    return {
        **describe(epoch.trace, ideal_samples_per_s),
        "batches_planned": epoch.batches_planned,
        "wrong_windows": epoch.wrong,
        "errors": len(epoch.errors),
        "first_errors": epoch.errors[:5],
    }


def emit(kind: str, value: dict[str, Any]) -> None:
    """One JSON line on standard output."""
    print(json.dumps({kind: value}), flush=True)


def progress_printer(total: int) -> Callable[[Trace], None]:
    """What `train` calls so that progress is printed some times a second; `total` batches are planned."""
    due = time.monotonic()

    def show(trace: Trace) -> None:
        nonlocal due
        now = time.monotonic()
        if now < due or not len(trace):
            return
        due = now + _PROGRESS_S
        recent = slice(-20, None)
        seconds = sum(trace.step[recent])
        reads = np.concatenate(trace.reads_ms[recent])
        value = {
            "batches": len(trace),
            "of": total,
            "samples_per_s": round(len(trace.step[recent]) * trace.batch / seconds, 1),
            "utilisation": round(1 - sum(trace.wait[recent]) / seconds, 3),
            "read_ms_p50": percentile(reads, 50),
        }
        emit("progress", value)

    return show


@click.command(context_settings={"max_content_width": 110})
@click.argument("root", type=click.Path(path_type=Path))
@click.option("--io", type=click.Choice(get_args(Io)), default="pread", show_default=True)
@click.option("--order", type=click.Choice(get_args(Order)), default="shuffle", show_default=True)
@click.option("--compute-ms", type=click.FloatRange(min=0.1), default=25.0, show_default=True)
@click.option("--workers", type=click.IntRange(1, 256), default=4, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--stall-s", type=click.FloatRange(min=1), default=120.0, show_default=True)
@click.option("--ideal", type=float, help="Samples/s that count as steady [what the compute time allows].")
def main(
    root: Path,
    io: Io,
    order: Order,
    compute_ms: float,
    workers: int,
    seed: int,
    stall_s: float,
    ideal: float | None,
) -> None:
    """Read the token data set in ROOT as a training job does; prints JSON lines."""
    load = Load(io, order, workers=workers, compute_s=compute_ms / 1e3, seed=seed, stall_s=stall_s)
    try:
        manifest = load_manifest(root)
        total = len(batches(load, manifest)) if manifest else 0
        epoch = run(root, load, progress_printer(total))
    except (FarsideError, OSError) as error:
        emit("error", {"message": str(error)})
        _leave(1)
    emit("result", result_of(epoch, ideal or load.ideal_samples_per_s))
    _leave(0)


def _leave(status: int) -> None:
    """Exit without waiting for workers that may hang in a read on a dead mount."""
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
