"""The look through the cache directory after a start: rebuilds index and accounting, removes left-overs.

It runs in the keeper's thread in small steps while the cache serves. What has not been looked at is
covered by the ledger's bound; a file that is asked for before the scan comes to it is indexed when its
side-car is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from stat import S_ISREG
from typing import TYPE_CHECKING

from farside.spoke import sidecar
from farside.spoke.cachedir import SEALED
from farside.spoke.eviction import SEGMENT
from farside.spoke.filling import release_unlisted, segment_costs

if TYPE_CHECKING:
    from farside.spoke.cache import ChunkCache

log = logging.getLogger("farside.cache")

STEP = 48
"""Files that are looked at in one step."""


class Scan:
    def __init__(self, cache: ChunkCache) -> None:
        self._cache = cache

    def run(self) -> Iterator[int]:
        """Looks at everything; yields the number of files after each step and sets ``scanned`` at the
        end."""
        cache = self._cache
        seen = 0
        for prefix in cache.directory.prefixes():
            try:
                names = list(cache.directory.listing(prefix).items())
            except OSError as error:
                cache.health.failed("scanning the cache", error)
                continue
            for at in range(0, len(names), STEP):
                with cache.structure:
                    cache.evictor.drain()
                    for digest, kinds in names[at : at + STEP]:
                        self._look(digest, kinds)
                seen += min(STEP, len(names) - at)
                yield seen
        with cache.lock:
            cache.space.unscanned = 0
            cache.scanned = True
        if cache.counters.orphans_removed:
            log.info("cache scanned: %d files, left-overs removed: %d", seen, cache.counters.orphans_removed)

    def _look(self, digest: bytes, kinds: set[str]) -> None:
        """One key. Structure lock held, so that nothing of it comes or goes on disk meanwhile."""
        cache = self._cache
        with cache.lock:
            file = cache.known(digest)
            if digest in cache.sieve or digest in cache.removing or (file is not None and file.loaded):
                return  # indexed already, or being filled just now
        try:
            if "meta.tmp" in kinds:
                cache.directory.remove(digest, temporary_only=True)
                cache.counters.orphans_removed += 1
                if len(kinds) == 1:
                    return
            if not {"data", "meta"} <= kinds:
                cache.directory.remove(digest)
                cache.counters.orphans_removed += 1
                return
            stat = cache.disk.stat(cache.directory.data_path(digest))
            if stat.st_size <= SEGMENT and S_ISREG(stat.st_mode):
                chunks = sidecar.chunks_of(stat.st_size, cache.chunk)
                segments = [(0, stat.st_blocks * 512)]
            else:
                found, _ = sidecar.read(cache.directory, digest)
                if found is None:
                    cache.directory.remove(digest)
                    cache.counters.orphans_removed += 1
                    return
                chunks = len(found.state)
                segments = segment_costs(found, release_unlisted(cache.directory, digest, found, stat))
        except FileNotFoundError:
            return
        except OSError as error:
            cache.health.failed("scanning the cache", error)
            return
        with cache.lock:
            if digest in cache.sieve or digest in cache.removing:
                return
            for segment, size in segments:
                _, charged = cache.charge(digest, chunks, segment, size, parked=digest in cache.pins)
                cache.space.indexed(charged)
            if stat.st_mode & SEALED and chunks * cache.chunk > SEGMENT:
                cache.sealed.add(digest)
