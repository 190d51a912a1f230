"""A token data set: shards of fixed-size windows of token ids, with a manifest and a checksum per window."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

TOKEN = np.dtype("<u4")
VOCABULARY = 128_256
WINDOW_TOKENS = 4096  # 16 KiB
MANIFEST = "manifest.json"
CHECKSUMS = "windows.crc32"
_MAX_SHARD = 256 * 2**20
_BLOCK = 2**24  # bytes made at a time

Checksums = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Manifest:
    """What lies in a data set: shard names, windows in each shard, bytes in each window."""

    shards: tuple[str, ...]
    windows_per_shard: int
    window_bytes: int
    seed: int

    @property
    def windows(self) -> int:
        return len(self.shards) * self.windows_per_shard

    @property
    def bytes(self) -> int:
        return self.windows * self.window_bytes


def plan(size: int, seed: int = 1) -> Manifest:
    """The data set of about `size` bytes: at least four shards, none over 256 MiB."""
    window = WINDOW_TOKENS * TOKEN.itemsize
    shards = max(4, -(-size // _MAX_SHARD))
    per_shard = max(1, round(size / shards / window))
    return Manifest(tuple(f"shard_{i:05d}.bin" for i in range(shards)), per_shard, window, seed)


def make(root: Path, manifest: Manifest, progress: Callable[[int], None] = lambda _bytes: None) -> None:
    """Write the data set into the directory `root`; `progress` hears of the bytes of each block written.

    The manifest is written last, so a directory with one is whole. Raises OSError if the disk refuses.
    """
    root.mkdir(parents=True, exist_ok=True)
    (root / MANIFEST).unlink(missing_ok=True)
    checksums = np.zeros(manifest.windows, dtype=np.uint32)
    tokens = manifest.window_bytes // TOKEN.itemsize
    step = max(1, _BLOCK // manifest.window_bytes)
    for number, name in enumerate(manifest.shards):
        random = np.random.default_rng([manifest.seed, number])
        with open(root / name, "wb") as file:
            for first in range(0, manifest.windows_per_shard, step):
                count = min(step, manifest.windows_per_shard - first)
                block = memoryview(zipf_tokens(random, count * tokens).tobytes())
                file.write(block)
                at = number * manifest.windows_per_shard + first
                size = manifest.window_bytes
                checksums[at : at + count] = [zlib.crc32(block[i * size :][:size]) for i in range(count)]
                progress(len(block))
            file.flush()
            os.fsync(file.fileno())
    checksums.astype("<u4").tofile(root / CHECKSUMS)
    (root / MANIFEST).write_text(json.dumps(asdict(manifest)))


def zipf_tokens(random: np.random.Generator, count: int) -> npt.NDArray[np.uint32]:
    """Token ids with P(id) ~ 1/(id + 1): ids of a byte-pair vocabulary are roughly in order of frequency."""
    uniform = random.random(count, dtype=np.float32)
    ids = np.exp(uniform * np.float32(np.log(VOCABULARY + 1))) - 1
    tokens: npt.NDArray[np.uint32] = np.minimum(ids, VOCABULARY - 1).astype(TOKEN)
    return tokens


def load_manifest(root: Path) -> Manifest | None:
    """The manifest of the data set in `root`, or None where there is no whole one."""
    try:
        return parse_manifest((root / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None


def parse_manifest(data: bytes) -> Manifest | None:
    """A manifest from the bytes of its file, or None if they are none."""
    try:
        values = json.loads(data)
        return Manifest(
            tuple(values["shards"]), values["windows_per_shard"], values["window_bytes"], values["seed"]
        )
    except (ValueError, KeyError, TypeError):
        return None


def load_checksums(root: Path) -> Checksums:
    """CRC-32 of every window, in order."""
    return parse_checksums((root / CHECKSUMS).read_bytes())


def parse_checksums(data: bytes) -> Checksums:
    """CRC-32 of every window, from the bytes of their file."""
    return np.frombuffer(data, dtype="<u4").astype(np.uint32)
