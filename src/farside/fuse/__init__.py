"""The FUSE kernel protocol, spoken straight on `/dev/fuse`. Knows nothing of the rest of farside.

See README.md beside this file.
"""

from farside.fuse.mounting import MountOptions, cleanup_stale, is_mounted
from farside.fuse.operations import Operations
from farside.fuse.records import (
    AttrOut,
    DirBuffer,
    EntryOut,
    FuseAttr,
    InitInfo,
    OpenOut,
    StatfsOut,
    negative_entry,
)
from farside.fuse.request import (
    DEFERRED,
    Deferred,
    Request,
    reply_attr,
    reply_data,
    reply_directory,
    reply_entry,
    reply_lseek,
    reply_open,
    reply_statfs,
    reply_xattr,
)
from farside.fuse.session import Session

__all__ = [
    "DEFERRED",
    "AttrOut",
    "Deferred",
    "DirBuffer",
    "EntryOut",
    "FuseAttr",
    "InitInfo",
    "MountOptions",
    "OpenOut",
    "Operations",
    "Request",
    "Session",
    "StatfsOut",
    "cleanup_stale",
    "is_mounted",
    "negative_entry",
    "reply_attr",
    "reply_data",
    "reply_directory",
    "reply_entry",
    "reply_lseek",
    "reply_open",
    "reply_statfs",
    "reply_xattr",
]
