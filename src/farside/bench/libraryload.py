"""The training-like load where nothing can be mounted: its workers read through farside's library.

One process holds the library, so that its cache and what it knows last from run to run, as a mount's do. The
argument is a JSON object of options of `farside.client.spoke_config`. It prints `ready`, then answers each
line of its standard input, until that ends:

    {"run": {"ideal": 1900.0}}   one epoch: lines as `farside.bench.load` prints them ("ideal" may be null)
    {"status": {}}               {"status": …} as `Library.status` gives it
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from functools import partial

import click

from farside.bench.dataset import CHECKSUMS, MANIFEST, Manifest, parse_checksums, parse_manifest
from farside.bench.load import Load, batches, emit, progress_printer, result_of, start_threads, train
from farside.client import Library, spoke_config
from farside.errors import FarsideError, UsageError

SWITCH_INTERVAL_S = 0.0005  # as in the mount's process


class LibraryWindows:
    """The shards of a data set in a portal, opened by one worker for itself."""

    def __init__(self, library: Library, manifest: Manifest) -> None:
        self._size = manifest.window_bytes
        self._per_shard = manifest.windows_per_shard
        self._files = [library.open(name) for name in manifest.shards]

    def read_into(self, window: int, buffer: memoryview) -> None:
        shard, place = divmod(window, self._per_shard)
        got = self._files[shard].readinto(buffer, place * self._size)
        if got != self._size:
            raise OSError(f"window {window} ends after {got} bytes")


def run(library: Library, load: Load, ideal: float | None) -> None:
    """Read the data set at the portal's root for one epoch; prints progress and the result.

    Raises FarsideError or OSError if there is no data set, or a read hangs.
    """
    manifest = parse_manifest(_content(library, MANIFEST))
    if manifest is None:
        raise UsageError("there is no token data set in the portal")
    checksums = parse_checksums(_content(library, CHECKSUMS))
    plan = batches(load, manifest)
    workers = start_threads(partial(LibraryWindows, library, manifest), manifest, checksums, load, plan)
    epoch = train(workers, manifest, load, plan, progress_printer(len(plan)))
    emit("result", result_of(epoch, ideal or load.ideal_samples_per_s))


def _content(library: Library, path: str) -> bytes:
    with library.open(path) as file:
        return file.pread(file.size, 0)


@click.command()
@click.argument("options")
def main(options: str) -> None:
    """Read a token data set in a portal as a training job does, without a mount; see the module."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(0))
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        with Library(spoke_config(**json.loads(options))) as library:
            print("ready", flush=True)
            for line in sys.stdin:
                command = json.loads(line)
                if "status" in command:
                    emit("status", library.status())
                else:
                    run(library, Load(), command["run"]["ideal"])
    except (FarsideError, OSError) as error:
        emit("error", {"message": str(error)})
        print(f"farside: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
