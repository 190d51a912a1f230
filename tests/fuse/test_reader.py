"""The reading threads against a kernel made of a socket pair: no privilege, no mount."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fuse.processes import DEADLINE_S
from tests.fuse.treefs import Content

from farside.fuse import DEFERRED, Deferred, EntryOut, Operations, Request, abi
from farside.fuse.device import Device
from farside.fuse.dispatch import Dispatcher
from farside.fuse.reader import Reader

Answer = tuple[int, int, bytes]  # unique, errno, payload


class Wire:
    """The kernel's end. Requests and answers keep their boundaries, as on the real device."""

    def __init__(self, ops: Operations, threads: int = 2) -> None:
        self.kernel, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.kernel.settimeout(DEADLINE_S)
        self.device = Device(ours.detach(), ops)
        self.interrupted: list[Request] = []
        self.gone = threading.Semaphore(0)
        self.threads = threads
        self.readers = [
            Reader(
                self.device,
                ops,
                Dispatcher(ops),
                max_read=1 << 16,
                max_write=1 << 16,
                interrupted=self.interrupted.append,
                gone=self.gone.release,
                name=f"reader-{number}",
            )
            for number in range(threads)
        ]
        for reader in self.readers:
            reader.start()

    def send(self, unique: int, opcode: int, body: bytes = b"", nodeid: int = 1, extra: bytes = b"") -> None:
        length = 40 + len(body) + len(extra)
        header = abi.IN_HEADER.pack(length, opcode, unique, nodeid, 1, 2, 3, len(extra) // 8, 0)
        self.kernel.send(header + body + extra)

    def receive(self) -> Answer:
        raw = self.kernel.recv(1 << 17)
        length, code, unique = abi.OUT_HEADER.unpack_from(raw)
        assert length == len(raw)
        return unique, -code, raw[16:]

    def ask(self, opcode: int, body: bytes = b"", **keywords: object) -> tuple[int, bytes]:
        self.send(8, opcode, body, **keywords)  # type: ignore[arg-type]
        unique, code, payload = self.receive()
        assert unique == 8
        return code, payload

    def close(self) -> None:
        self.kernel.close()
        for reader in self.readers:
            reader.thread.join(DEADLINE_S)
            assert not reader.thread.is_alive()
        for _ in range(self.threads):
            assert self.gone.acquire(timeout=1)


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire(Operations())
    yield wire
    wire.close()


def read_body(offset: int, size: int) -> bytes:
    return abi.READ_IN.pack(1, offset, size, 0, 0, 0, 0)


@pytest.mark.parametrize("opcode", range(abi.OPCODES))
def test_base_class_answers_everything(wire: Wire, opcode: int) -> None:
    if opcode in (abi.Opcode.FORGET, abi.Opcode.BATCH_FORGET, abi.Opcode.INTERRUPT):
        return  # have no answer
    code, payload = wire.ask(opcode, bytes(64))
    if opcode in (abi.Opcode.RELEASE, abi.Opcode.RELEASEDIR, abi.Opcode.DESTROY):
        assert (code, payload) == (0, b"")
    elif opcode == abi.Opcode.IOCTL:
        assert code == errno.ENOTTY
    else:
        assert code == (errno.EROFS if opcode in abi.MODIFYING else errno.ENOSYS)


def test_numbers_beyond_the_table_and_truncated_bodies(wire: Wire) -> None:
    assert wire.ask(4096)[0] == errno.ENOSYS
    assert wire.ask(abi.Opcode.GETATTR, b"\0")[0] == errno.EIO  # struct.error in the handler
    assert wire.ask(abi.Opcode.STATFS)[0] == errno.ENOSYS  # and the thread goes on


def test_extensions_are_cut_off() -> None:
    names: list[bytes] = []

    class Names(Operations):
        def lookup(self, req: Request, parent: int, name: bytes) -> EntryOut:
            names.append(name)
            raise FileNotFoundError(errno.ENOENT, "no")

    wire = Wire(Names())
    assert wire.ask(abi.Opcode.LOOKUP, b"name\0", extra=bytes(16))[0] == errno.ENOENT
    assert names == [b"name"]
    wire.close()


def test_forgets_one_and_many() -> None:
    forgotten: list[tuple[int, int]] = []
    done = threading.Event()

    class Forgetting(Operations):
        def forget(self, nodeid: int, nlookup: int) -> None:
            forgotten.append((nodeid, nlookup))
            if nodeid == 13:
                raise ValueError("a bug must not stop the rest")
            if len(forgotten) == 4:
                done.set()

    wire = Wire(Forgetting(), threads=1)
    wire.send(2, abi.Opcode.FORGET, abi.FORGET_IN.pack(3), nodeid=7)
    many = b"".join(abi.FORGET_ONE.pack(nodeid, nodeid + 1) for nodeid in (12, 13, 14))
    wire.send(4, abi.Opcode.BATCH_FORGET, abi.BATCH_FORGET_IN.pack(3, 0) + many)
    assert done.wait(DEADLINE_S)
    assert forgotten == [(7, 3), (12, 13), (13, 14), (14, 15)]
    wire.close()


def test_interrupts_of_known_and_unknown_requests() -> None:
    asked = threading.Event()
    requests: list[Request] = []

    class Deferring(Operations):
        def statfs(self, req: Request, nodeid: int) -> Deferred:
            requests.append(req)
            asked.set()
            return DEFERRED

    wire = Wire(Deferring(), threads=1)
    wire.send(2, abi.Opcode.STATFS)
    assert asked.wait(DEADLINE_S)
    wire.send(3, abi.Opcode.INTERRUPT, abi.INTERRUPT_IN.pack(2))
    wire.send(9, abi.Opcode.INTERRUPT, abi.INTERRUPT_IN.pack(8))
    assert wire.receive() == (9, errno.EAGAIN, b"")  # tell me again
    assert wire.interrupted == requests
    called: list[str] = []
    requests[0].on_interrupt(lambda: called.append("before"))
    requests[0].interrupt()
    assert wire.receive() == (2, errno.EINTR, b"")
    requests[0].on_interrupt(lambda: called.append("after"))
    assert called == ["before", "after"]
    assert requests[0].answered and not requests[0].reply(b"") and not requests[0].error(errno.EIO)
    wire.close()


def test_exactly_one_of_many_rivals_answers() -> None:
    class Racing(Operations):
        def statfs(self, req: Request, nodeid: int) -> Deferred:
            barrier = threading.Barrier(4)

            def rival(number: int) -> None:
                barrier.wait(DEADLINE_S)
                if req.error(errno.EIO) if number % 2 else req.reply(bytes([number])):
                    winners[req.unique] += 1

            for number in range(4):
                threading.Thread(target=rival, args=(number,), daemon=True).start()
            return DEFERRED

    winners: Counter[int] = Counter()
    wire = Wire(Racing())
    uniques = list(range(2, 102, 2))
    for unique in uniques:
        wire.send(unique, abi.Opcode.STATFS)
    assert sorted(wire.receive()[0] for _ in uniques) == uniques
    wire.send(1000, abi.Opcode.DESTROY)
    assert wire.receive()[0] == 1000  # nothing came in between
    assert set(winners.values()) <= {1}
    wire.close()


def test_late_answers_after_the_end_go_nowhere() -> None:
    requests: list[Request] = []
    asked = threading.Event()

    class Deferring(Operations):
        def statfs(self, req: Request, nodeid: int) -> Deferred:
            requests.append(req)
            asked.set()
            return DEFERRED

    wire = Wire(Deferring())
    wire.send(2, abi.Opcode.STATFS)
    assert asked.wait(DEADLINE_S)
    wire.close()
    number = wire.device.fd
    wire.device.close()
    assert os.readlink(f"/proc/self/fd/{number}") == os.devnull
    assert not requests[0].reply(b"late")
    assert wire.device.closed


content = bytes(range(256)) * 512


class Mixed(Operations):
    """Answers reads in every way there is, chosen by the file handle's place in the plan."""

    def __init__(self) -> None:
        self.kept: list[tuple[Request, bytes]] = []
        self.lock = threading.Lock()

    def read(self, req: Request, nodeid: int, fh: int, offset: int, size: int, buffer: memoryview) -> Content:
        data = content[offset : offset + size]
        if nodeid == 0:
            buffer[: len(data)] = data
            return len(data)
        if nodeid == 1:
            return data
        if nodeid == 2:
            return memoryview(content)[offset : offset + size]
        if nodeid == 3:
            raise OSError(errno.ETIMEDOUT, "no link")
        with self.lock:
            self.kept.append((req, data))
        return DEFERRED

    def statfs(self, req: Request, nodeid: int) -> Deferred:
        """Answers all that was kept, newest first."""
        while True:
            with self.lock:
                if not self.kept:
                    break
                kept, data = self.kept.pop()
            kept.reply(data)
        raise OSError(errno.ENOSYS, "")


reads = st.tuples(st.integers(0, 4), st.integers(0, len(content)), st.integers(0, 1 << 14))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(reads, max_size=30))
def test_every_read_gets_its_own_bytes_once(plan: list[tuple[int, int, int]]) -> None:
    wire = Wire(Mixed())
    expected: dict[int, tuple[int, bytes]] = {}
    seen: dict[int, tuple[int, bytes]] = {}
    outstanding = 0

    def receive() -> None:
        unique, code, payload = wire.receive()
        assert unique not in seen
        seen[unique] = (code, payload)

    for place, (kind, offset, size) in enumerate(plan):
        unique = 2 * place + 2
        wire.send(unique, abi.Opcode.READ, read_body(offset, size), nodeid=kind)
        expected[unique] = (errno.ETIMEDOUT, b"") if kind == 3 else (0, content[offset : offset + size])
        if kind == 4:
            outstanding += 1
        else:
            receive()
    while len(seen) < len(plan):  # a deferred read may be kept only after a STATFS has looked
        wire.send(100_000, abi.Opcode.STATFS)
        while True:
            unique, code, payload = wire.receive()
            if unique == 100_000:
                break
            assert unique not in seen
            seen[unique] = (code, payload)
    assert seen == expected
    wire.close()
