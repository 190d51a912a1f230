"""Paths within a portal: components, symlinks, and no way out."""

from __future__ import annotations

import errno
import os
import stat

from farside.protocol.attributes import attr_of, target_of
from farside.spoke.directory import is_directory, join
from farside.spoke.namespace import Namespace

MAX_SYMLINKS = 40


def parts_of(path: bytes) -> list[bytes]:
    """The components of a path; ``.`` and empty ones are left out.

    Raises:
        OSError: EINVAL, there is a NUL in it.
    """
    if b"\0" in path:
        raise OSError(errno.EINVAL, "a path cannot contain NUL")
    return [part for part in path.split(b"/") if part not in (b"", b".")]


async def resolve(names: Namespace, path: bytes, *, follow_last: bool) -> tuple[bytes, bytes]:
    """[loop] The path without symlinks and dots, and the value there. One look-up for each component.

    Args:
        follow_last: whether a symlink that is the last component is followed.

    Raises:
        OSError: ENOENT, ENOTDIR, ELOOP; EXDEV where it leads out of the portal.
        HubUnreachable, RemoteError: see ``Namespace.lookup``.
    """
    trail = [(b"", names.root)]
    todo = parts_of(path)[::-1]
    links = 0
    while todo:
        part = todo.pop()
        at, value = trail[-1]
        if not is_directory(value):
            raise _error(errno.ENOTDIR)
        if part == b"..":
            if len(trail) == 1:
                raise OSError(errno.EXDEV, "the path leads out of the portal")
            trail.pop()
            continue
        found = await names.lookup(at, part)
        if found is None:
            raise _error(errno.ENOENT)
        if stat.S_ISLNK(attr_of(found).mode) and (todo or follow_last):
            links += 1
            if links > MAX_SYMLINKS:
                raise _error(errno.ELOOP)
            target = target_of(found)
            if target.startswith(b"/"):
                raise OSError(errno.EXDEV, "the symlink leads out of the portal")
            todo += parts_of(target)[::-1]
            continue
        trail.append((join(at, part), found))
    return trail[-1]


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
