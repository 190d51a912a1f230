"""Files that a job has open, and what their reads set going: readahead, siblings, fill.

The policies are the pure functions of ``farside.prefetch``; here they meet the namespace, the cache and the
fetch scheduler. Everything runs in the loop, except ``OpenFile.wants_attention``.
"""

from __future__ import annotations

from collections import OrderedDict

from farside.prefetch.fill import Fill
from farside.prefetch.readahead import Advice, Readahead
from farside.prefetch.siblings import SMALL, Listing, Sibling, Siblings, next_file
from farside.protocol.attributes import Attr, attr_of
from farside.protocol.messages import CHUNK
from farside.spoke.cachedfile import CachedFile
from farside.spoke.directory import UNKNOWN, join, split
from farside.spoke.flight import Reason
from farside.spoke.sidecar import CacheKey
from farside.spoke.spoke import Spoke

MAX_REMEMBERED = 4096
"""Files whose pattern is remembered after they were closed."""


class OpenFile:
    """One open handle.

    Attributes:
        cached: the chunks of its version.
        size: bytes.
    """

    __slots__ = ("_prefetcher", "_readahead", "cached", "path", "size")

    def __init__(self, prefetcher: Prefetcher, path: bytes, cached: CachedFile, inherited: int) -> None:
        self._prefetcher = prefetcher
        self._readahead = Readahead(cached.size, inherited)
        self.path = path
        self.cached = cached
        self.size = cached.size

    def wants_attention(self, offset: int, size: int) -> bool:
        """[any thread] Whether ``advance`` should be told of a hit."""
        return not self.cached.complete and self._readahead.moves(offset, size)

    def advance(self, offset: int, size: int, hit: bool) -> None:
        """A read took place: fetch ahead what the pattern of the reads calls for."""
        advice = self._readahead.read(offset, size, self._prefetcher.limit)
        self._prefetcher.follow(self, advice, self._readahead.distance, hit)

    async def read(self, offset: int, size: int) -> bytes | bytearray | memoryview:
        """Bytes that were not ready in the cache.

        Raises:
            StaleVersion, RemoteError, HubUnreachable, ChecksumMismatch, ProtocolError, CacheError: see
            ``Fetcher.read``.
        """
        self.advance(offset, size, False)
        return await self._prefetcher.spoke.fetcher.read(self.cached, offset, size)


class Prefetcher:
    """Prefetch for all open files of one spoke."""

    def __init__(self, spoke: Spoke) -> None:
        self.spoke = spoke
        self.siblings = Siblings(self._listing, self._is_here)
        self._fills: OrderedDict[CacheKey, Fill] = OrderedDict()
        self._inherited: OrderedDict[bytes, int] = OrderedDict()

    @property
    def limit(self) -> int:
        """The furthest that is read ahead of one reader, bytes: twice what the link holds."""
        return min(self.spoke.config.read_ahead, 2 * self.spoke.fetcher.window.size)

    def open(self, path: bytes, cached: CachedFile) -> OpenFile:
        """[any thread] A handle on a file."""
        return OpenFile(self, path, cached, self._inherited.get(path, 0))

    def awaits(self, path: bytes) -> bool:
        """[any thread] Whether ``opened`` should be told that this file was opened."""
        return path in self.siblings.markers

    def opened(self, path: bytes) -> None:
        """A reader of small files has got as far as this one: ask for the next batch."""
        self._want_siblings(self.siblings.opened(path))

    def follow(self, file: OpenFile, advice: Advice, distance: int, hit: bool) -> None:
        """Do what the readahead of one file advises."""
        want = self.spoke.fetcher.want
        cached = file.cached
        if cached.size <= SMALL:
            if not hit:
                want(cached, 0, cached.chunks - 1, Reason.READAHEAD)
                if self.limit > 0:
                    room = self.spoke.cache.space.shortage(cached.size) <= 0
                    self._want_siblings(self.siblings.demanded(file.path, room=room))
            return
        if self.limit <= 0:
            return
        for first, last in advice.runs:
            want(cached, first, last, Reason.READAHEAD)
        if advice.next_file:
            self._want_next(file.path, advice.next_file, distance)
        if advice.random and not hit:
            fill = self._fills.get(cached.key)
            if fill is None:
                fill = self._fills[cached.key] = Fill()
                if len(self._fills) > MAX_REMEMBERED:
                    self._fills.popitem(last=False)
            if fill.missed():
                want(cached, 0, cached.chunks - 1, Reason.FILL)

    def _want_siblings(self, siblings: list[Sibling]) -> None:
        for sibling in siblings:
            file = self._cached(sibling.path, attr_of(sibling.value))
            self.spoke.fetcher.want(file, 0, file.chunks - 1, Reason.READAHEAD)

    def _want_next(self, path: bytes, size: int, distance: int) -> None:
        directory, name = split(path)
        found = next_file(self._listing(directory) or [], name)
        if found is None:
            return
        next_name, value = found
        attr = attr_of(value)
        if not attr.size:
            return
        next_path = join(directory, next_name)
        self._inherited[next_path] = distance
        if len(self._inherited) > MAX_REMEMBERED:
            self._inherited.popitem(last=False)
        last = (min(size, attr.size) - 1) // CHUNK
        self.spoke.fetcher.want(self._cached(next_path, attr), 0, last, Reason.READAHEAD)

    def _cached(self, path: bytes, attr: Attr) -> CachedFile:
        return self.spoke.cached_file(path, attr)

    def _listing(self, directory: bytes) -> Listing | None:
        found = self.spoke.namespace.resident(directory)
        return None if found is UNKNOWN else found.snapshot()

    def _is_here(self, path: bytes, value: bytes) -> bool:
        file = self._cached(path, attr_of(value))
        return (file.loaded and file.fully_on_disk) or self.spoke.fetcher.coming(file)
