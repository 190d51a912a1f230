"""Helper processes of a run: started with a deadline, and never left behind."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from farside.errors import FarsideError


class Child:
    """A process that prints a line beginning with a given word once it is ready.

    It gets SIGTERM when the starting thread ends, however that ends, where `setpriv` is there; and its
    standard input closes then, which helpers watch with `--until-eof`. ^C at the terminal does not reach
    it, so that things are taken down in order. Its standard error goes to `log`.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.command = list(command)
        self.log = log
        follow = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [*follow, *self.command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                bufsize=0,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def lines(self, tick: float) -> Iterator[str | None]:
        """Its lines until it closes its standard output; None whenever `tick` seconds pass without one."""
        stdout = self._process.stdout
        assert stdout is not None
        seen = b""
        while True:
            if not _readable(stdout, tick):
                yield None
                continue
            data = os.read(stdout.fileno(), 1 << 16)
            if not data:
                return
            *lines, seen = (seen + data).split(b"\n")
            yield from (line.decode() for line in lines)

    def send(self, line: str) -> None:
        """Write one line to its standard input. Raises FarsideError if it does not read any more."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(line.encode() + b"\n")
        except BrokenPipeError:
            raise FarsideError(f"`{' '.join(self.command)}` has ended: {tail(self.log)}") from None

    def wait_ready(self, word: str, timeout: float = 20.0) -> str:
        """The first line that begins with `word`; raises FarsideError if it does not come in time."""
        stdout = self._process.stdout
        assert stdout is not None
        deadline, seen = time.monotonic() + timeout, b""
        while True:
            *lines, _ = seen.split(b"\n")
            for line in lines:
                if line.startswith(word.encode()):
                    return line.decode()
            left = deadline - time.monotonic()
            data = os.read(stdout.fileno(), 4096) if left > 0 and _readable(stdout, left) else b""
            if not data:
                self.close()
                raise FarsideError(
                    f"`{' '.join(self.command)}` did not get ready: {tail(self.log) or 'it said nothing'}"
                )
            seen += data

    def close(self, timeout: float = 10.0) -> None:
        """End it: SIGTERM, and SIGKILL after `timeout` seconds. Safe to call again."""
        if self.running:
            self._process.terminate()
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()


def tail(log: Path, lines: int = 12) -> str:
    """The last lines of a log, or "" where there is none."""
    try:
        return "\n".join(log.read_text(errors="replace").strip().splitlines()[-lines:])
    except OSError:
        return ""


def _readable(stream: IO[bytes], timeout: float) -> bool:
    return bool(select.select([stream], [], [], timeout)[0])
