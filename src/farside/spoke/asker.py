"""Questions about single names, gathered into batches: one round trip for many."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple, Protocol

from farside.errors import FarsideError, ProtocolError
from farside.protocol.attributes import VALUE_MIN
from farside.protocol.messages import ListDirReply, TreeDone, TreePart
from farside.spoke.changes import Ask, ChangeLog

MAX_BATCH = 1_000
"""Paths in one Stat."""

GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""What the hub answers for a path that does not exist (any more), or leads through something else."""


class Remote(Protocol):
    """The hub as the namespace sees it.

    All calls raise HubUnreachable when the link is down and RemoteError when the hub answers an errno.
    """

    @property
    def up(self) -> bool: ...

    async def list_dir(self, path: bytes, digest: bytes, after: bytes) -> tuple[ListDirReply, bytes]:
        """One page of a directory: the reply and the listing."""

    async def stat(self, paths: Sequence[bytes]) -> list[tuple[int, bytes]]:
        """(errno, value) of each path, in order."""

    def list_tree(
        self, path: bytes, known: dict[bytes, bytes], limit: int
    ) -> AsyncIterator[tuple[TreePart | TreeDone, bytes]]:
        """A subtree, breadth first; ``known`` holds the digests that the spoke has."""


class Answer(NamedTuple):
    """What the hub said of a path; ``ask`` says as of when.

    ``fresh``: the path was not invalidated until the answer came, when the log's ``marks`` was that.
    """

    ask: Ask
    errno: int
    value: bytes
    fresh: bool
    marks: int


class _Question:
    __slots__ = ("ask", "future", "path")

    def __init__(self, path: bytes, future: asyncio.Future[Answer]) -> None:
        self.path = path
        self.future = future
        self.ask: Ask | None = None


class Asker:
    """Gathers the questions of one turn of the event loop into as few Stats as possible.

    ``apply(path, answer)`` is called once for each answer, before those who wait for it go on.
    """

    def __init__(
        self,
        remote: Remote,
        log: ChangeLog,
        apply: Callable[[bytes, Answer], None],
    ) -> None:
        self._remote = remote
        self._log = log
        self._apply = apply
        self._questions: dict[bytes, _Question] = {}
        self._queue: list[_Question] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.batches = 0

    def ask(self, path: bytes) -> asyncio.Future[Answer]:
        """The hub's word on ``path``, as of now or later. Shared: shield or ``asyncio.wait`` it."""
        question = self._questions.get(path)
        if question is not None and (question.ask is None or not self._log.outdated(question.ask, path)):
            return question.future
        loop = asyncio.get_running_loop()
        question = _Question(path, loop.create_future())
        self._questions[path] = question
        if not self._queue:
            loop.call_soon(self._send)
        self._queue.append(question)
        return question.future

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _send(self) -> None:
        queue, self._queue = self._queue, []
        for at in range(0, len(queue), MAX_BATCH):
            batch = queue[at : at + MAX_BATCH]
            ask = self._log.begin()
            for question in batch:
                question.ask = ask
            task = asyncio.get_running_loop().create_task(self._run(ask, batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, ask: Ask, batch: list[_Question]) -> None:
        self.batches += 1
        try:
            results = await self._remote.stat([q.path for q in batch])
            if len(results) != len(batch) or any(not e and len(v) < VALUE_MIN for e, v in results):
                raise ProtocolError("the hub's answer to Stat does not fit the question")
            for question, (code, value) in zip(batch, results, strict=True):
                fresh = not self._log.outdated(ask, question.path)
                answer = Answer(ask, code, bytes(value), fresh, self._log.marks)
                self._apply(question.path, answer)
                self._done(question)
                if not question.future.done():
                    question.future.set_result(answer)
        except FarsideError as error:
            self._fail(batch, error)
        except asyncio.CancelledError:
            for question in batch:
                question.future.cancel()
            raise
        except Exception as error:
            self._fail(batch, error)
            raise
        finally:
            for question in batch:
                self._done(question)
            self._log.end(ask)

    def _fail(self, batch: list[_Question], error: Exception) -> None:
        for question in batch:
            if not question.future.done():
                question.future.set_exception(error)
                question.future.exception()  # nobody may be waiting any more

    def _done(self, question: _Question) -> None:
        if self._questions.get(question.path) is question:
            del self._questions[question.path]
