"""What a file system implements. Knows nothing of how requests arrive."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from farside.fuse.records import AttrOut, DirBuffer, EntryOut, InitInfo, OpenOut, StatfsOut
from farside.fuse.request import Deferred, Request

if TYPE_CHECKING:
    from farside.fuse.session import Session


def _not_implemented() -> OSError:
    return OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


class Operations:
    """Base class of a file system.

    Each method is called in a FUSE thread, several at the same time. It returns its result, raises an
    OSError (any exception with an ``errno`` will do; others are logged and answered EIO), or returns
    ``DEFERRED`` and has the request answered later with the ``reply_*`` functions of
    ``farside.fuse.request``. What is not overridden is answered ENOSYS, upon which the kernel mostly does
    without: open and opendir then succeed without asking, flush, fsync and access count as done.

    Balance: every EntryOut with a node id that is returned, passed to ``reply_entry`` or added with
    ``DirBuffer.add_plus`` is given back by ``forget`` exactly once in total, and every OpenOut by one
    ``release`` or ``releasedir``, also when the answer never reached the kernel. Only what the kernel
    still holds when the mount goes away comes back by nobody; free everything in ``destroy``.
    """

    def init(self, session: Session, info: InitInfo) -> None:
        """The mount is there; no other request has been read yet. Called by ``Session.mount``."""

    def destroy(self) -> None:
        """The mount is gone. Called once, in a FUSE thread; other handlers may still be running."""

    def lookup(self, req: Request, parent: int, name: bytes) -> EntryOut | Deferred:
        """Find ``name`` in ``parent``; ENOENT or, to have it remembered, ``negative_entry(ttl)``.

        For NFS exports the kernel may ask for ``.`` and ``..`` of a node it has forgotten: ESTALE when
        the number is no longer known.
        """
        raise _not_implemented()

    def forget(self, nodeid: int, nlookup: int) -> None:
        """The kernel gives back ``nlookup`` lookups of ``nodeid``; at 0 the node may go."""

    def getattr(self, req: Request, nodeid: int, fh: int | None) -> AttrOut | Deferred:
        """Attributes; ``fh`` when the kernel asks through an open file."""
        raise _not_implemented()

    def readlink(self, req: Request, nodeid: int) -> bytes | Deferred:
        """Target of a symlink."""
        raise _not_implemented()

    def open(self, req: Request, nodeid: int, flags: int) -> OpenOut | Deferred:
        """Open a file; ``flags`` as in open(2). ESTALE makes the kernel look the path up anew and try
        once more: the way to say "this node is an old version"."""
        raise _not_implemented()

    def read(
        self, req: Request, nodeid: int, fh: int, offset: int, size: int, buffer: memoryview
    ) -> int | bytes | bytearray | memoryview | Deferred:
        """Read up to ``size`` bytes at ``offset``; fewer only at the end of the file.

        Returns either the bytes or, faster, the number of bytes put at the start of ``buffer``, which
        has room for ``size`` and belongs to the thread: it must not be touched after returning.
        """
        raise _not_implemented()

    def release(self, req: Request, nodeid: int, fh: int) -> Deferred | None:
        """The last user of an open file is gone. The answer is of no interest to anybody."""
        return None

    def flush(self, req: Request, nodeid: int, fh: int) -> Deferred | None:
        """One close(2) of a file."""
        raise _not_implemented()

    def fsync(self, req: Request, nodeid: int, fh: int, datasync: bool) -> Deferred | None:
        """fsync(2), fdatasync(2), of a file or directory."""
        raise _not_implemented()

    def opendir(self, req: Request, nodeid: int, flags: int) -> OpenOut | Deferred:
        """Open a directory for reading."""
        raise _not_implemented()

    def readdir(
        self, req: Request, nodeid: int, fh: int, offset: int, size: int
    ) -> DirBuffer | bytes | Deferred:
        """Entries behind ``offset`` (0: from the start), at most ``size`` bytes; empty at the end."""
        raise _not_implemented()

    def readdirplus(
        self, req: Request, nodeid: int, fh: int, offset: int, size: int
    ) -> DirBuffer | bytes | Deferred:
        """As readdir, each entry with attributes (``DirBuffer.add_plus``). The kernel only asks for it when
        the class overrides this."""
        raise _not_implemented()

    def releasedir(self, req: Request, nodeid: int, fh: int) -> Deferred | None:
        """The last user of an open directory is gone."""
        return None

    def statfs(self, req: Request, nodeid: int) -> StatfsOut | Deferred:
        """Sizes of the file system."""
        raise _not_implemented()

    def getxattr(self, req: Request, nodeid: int, name: bytes, size: int) -> bytes | Deferred:
        """The whole value (ENODATA when there is none); ``size`` only matters to ``reply_xattr``."""
        raise _not_implemented()

    def listxattr(self, req: Request, nodeid: int, size: int) -> bytes | Deferred:
        """All names, each followed by a NUL."""
        raise _not_implemented()

    def access(self, req: Request, nodeid: int, mask: int) -> Deferred | None:
        """access(2); not asked under ``default_permissions``."""
        raise _not_implemented()

    def lseek(self, req: Request, nodeid: int, fh: int, offset: int, whence: int) -> int | Deferred:
        """SEEK_DATA and SEEK_HOLE; ENXIO behind the end. ENOSYS: the kernel takes all for data."""
        raise _not_implemented()

    def modify(self, req: Request, nodeid: int, opcode: int, body: memoryview) -> bytes | Deferred:
        """Everything that would change something (``abi.MODIFYING``), in one place.

        ``body`` is the request behind its header and is valid until this returns.
        """
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
