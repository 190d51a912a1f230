"""The process that reads for the model test, so that a hang can be killed and a SIGBUS is no accident.

A request is a line of JSON on standard input, ``{"op": NAME, …}``. The answer is a line of JSON with
``began`` and ``ended`` (monotonic s), ``errno`` (0, or why it stopped), and ``size`` (of the bytes that
follow the line). It imports little: many are started.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import signal
import stat
import sys
import time
from typing import Any, BinaryIO

Answer = tuple[dict[str, Any], bytes]
DIRECT_ALIGN = 4096


class Reader:
    """Open handles by slot. Every method is one operation and returns (fields of the answer, bytes)."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.handles: dict[int, int] = {}

    def open(self, path: str, slot: int, direct: bool) -> Answer:
        fd = os.open(self._at(path), os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            size = os.fstat(fd).st_size
        except OSError:
            os.close(fd)
            raise
        self.handles[slot] = fd
        return {"st_size": size}, b""

    def pread(self, slot: int, offset: int, length: int) -> Answer:
        return self._pread(self.handles[slot], offset, length)

    def pread_direct(self, slot: int, offset: int, length: int) -> Answer:
        """The same into memory that direct I/O can use; the caller aligns ``offset`` and ``length``."""
        fd, got, fields = self.handles[slot], 0, {"eof": False, "errno": 0}
        with mmap.mmap(-1, length) as buffer, memoryview(buffer) as view:
            while got < length and not got % DIRECT_ALIGN:
                try:
                    more = os.preadv(fd, [view[got:]], offset + got)
                except OSError as error:
                    return {"eof": False, "errno": error.errno}, bytes(view[:got])
                if not more:
                    break
                got += more
            fields["eof"] = got < length
            return fields, bytes(view[:got])

    def close(self, slot: int) -> Answer:
        os.close(self.handles.pop(slot))
        return {}, b""

    def read(self, path: str, block: int) -> Answer:
        """The whole file, by reads of ``block`` bytes."""
        fd = os.open(self._at(path), os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            parts: list[bytes] = []
            try:
                while data := os.read(fd, block):
                    parts.append(data)
            except OSError as error:
                return {"st_size": size, "eof": False, "errno": error.errno}, b"".join(parts)
            return {"st_size": size, "eof": True}, b"".join(parts)
        finally:
            os.close(fd)

    def map(self, path: str, slices: list[tuple[int, int]], hold_s: float) -> Answer:
        """Slices of a mapping, read in a process of its own, with a pause before the last one.

        ``sizes`` says how much of each there was. A page that cannot be had is SIGBUS, which does not tell
        why: ESTALE stands for it.
        """
        come, go = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.close(come)
                self._map_child(path, slices, hold_s, go)
            finally:
                os._exit(0)
        os.close(go)
        with os.fdopen(come, "rb") as pipe:
            head, body = pipe.readline(), pipe.read()
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGBUS:
            raise RuntimeError(f"the mapping process died of signal {os.WTERMSIG(status)}")
        fields: dict[str, Any] = json.loads(head) if head else {"errno": errno.ESTALE}
        if os.WIFSIGNALED(status):
            fields["errno"] = errno.ESTALE
        sizes: list[int] = []
        whole = 0  # only slices that came whole are judged: a broken one says nothing of where it broke
        for length in fields.pop("lengths", []):
            if whole + length > len(body):
                break
            sizes.append(length)
            whole += length
        return {"sizes": sizes, **fields}, body[:whole]

    def _map_child(self, path: str, slices: list[tuple[int, int]], hold_s: float, pipe: int) -> None:
        try:
            fd = os.open(self._at(path), os.O_RDONLY)
            size = os.fstat(fd).st_size
            mapped = mmap.mmap(fd, size, prot=mmap.PROT_READ) if size else None
            os.close(fd)
        except OSError as error:
            os.write(pipe, json.dumps({"errno": error.errno}).encode() + b"\n")
            return
        cut = [(min(offset, size), min(offset + length, size)) for offset, length in slices]
        lengths = [end - begin for begin, end in cut]
        fields = {"st_size": size, "lengths": lengths, "opened": time.monotonic()}
        with os.fdopen(pipe, "wb") as out:
            out.write(json.dumps(fields).encode() + b"\n")
            out.flush()
            for number, (begin, end) in enumerate(cut):
                if number and number == len(cut) - 1:
                    time.sleep(hold_s)
                out.write(mapped[begin:end] if mapped is not None else b"")
                out.flush()

    def stat(self, path: str) -> Answer:
        info = os.lstat(self._at(path))
        return {"st_size": info.st_size, "mode": info.st_mode, "directory": stat.S_ISDIR(info.st_mode)}, b""

    def list(self, path: str) -> Answer:
        return {"names": os.listdir(self._at(path))}, b""

    def _at(self, path: str) -> str:
        return os.path.join(self.root, path)

    @staticmethod
    def _pread(fd: int, offset: int, length: int) -> Answer:
        parts: list[bytes] = []
        got = 0
        while got < length:
            try:
                data = os.pread(fd, length - got, offset + got)
            except OSError as error:
                return {"eof": False, "errno": error.errno}, b"".join(parts)
            if not data:
                return {"eof": True}, b"".join(parts)
            parts.append(data)
            got += len(data)
        return {"eof": False}, b"".join(parts)


def serve(root: str, requests: BinaryIO, answers: BinaryIO) -> None:
    reader = Reader(root)
    for line in requests:
        request = json.loads(line)
        op = request.pop("op")
        began = time.monotonic()
        fields: dict[str, Any]
        try:
            fields, data = getattr(reader, op)(**request)
        except OSError as error:
            fields, data = {"errno": error.errno}, b""
        head = {"errno": 0, **fields, "began": began, "ended": time.monotonic(), "size": len(data)}
        answers.write(json.dumps(head).encode() + b"\n")
        answers.write(data)
        answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1], sys.stdin.buffer, sys.stdout.buffer)
