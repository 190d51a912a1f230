"""Numbers and record layouts of the FUSE kernel protocol 7.x (`/dev/fuse`).

Only what this package speaks is here. Every layout is little endian without hidden padding, which is
what the kernel uses on all machines that farside runs on (x86-64, arm64, riscv64).
"""

from __future__ import annotations

import enum
import struct

KERNEL_MAJOR = 7
MINOR_SPOKEN = 45  # newest minor whose INIT reply this package fills in
MINOR_NEEDED = 31  # kernel 5.4: max_pages, cached symlinks and directories, explicit invalidation
MINOR_PASSTHROUGH = 40  # kernel 6.9

ROOT_ID = 1


class Opcode(enum.IntEnum):
    """What the kernel asks for."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    IOCTL = 39
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46
    COPY_FILE_RANGE = 47
    TMPFILE = 51


OPCODES = 64  # the kernel's numbers stay below this; larger ones are answered ENOSYS

MODIFYING = frozenset(
    {
        Opcode.SETATTR,
        Opcode.SYMLINK,
        Opcode.MKNOD,
        Opcode.MKDIR,
        Opcode.UNLINK,
        Opcode.RMDIR,
        Opcode.RENAME,
        Opcode.LINK,
        Opcode.WRITE,
        Opcode.SETXATTR,
        Opcode.REMOVEXATTR,
        Opcode.CREATE,
        Opcode.FALLOCATE,
        Opcode.RENAME2,
        Opcode.COPY_FILE_RANGE,
        Opcode.TMPFILE,
    }
)


class Capability(enum.IntFlag):
    """INIT flags (both 32-bit words joined)."""

    ASYNC_READ = 1 << 0
    EXPORT_SUPPORT = 1 << 4
    BIG_WRITES = 1 << 5
    DO_READDIRPLUS = 1 << 13
    READDIRPLUS_AUTO = 1 << 14
    ASYNC_DIO = 1 << 15
    PARALLEL_DIROPS = 1 << 18
    MAX_PAGES = 1 << 22
    CACHE_SYMLINKS = 1 << 23
    EXPLICIT_INVAL_DATA = 1 << 25
    INIT_EXT = 1 << 30
    DIRECT_IO_ALLOW_MMAP = 1 << 36
    PASSTHROUGH = 1 << 37


# Flags of an OPEN or OPENDIR answer (OpenOut.flags).
FOPEN_DIRECT_IO = 1 << 0
FOPEN_KEEP_CACHE = 1 << 1
FOPEN_NONSEEKABLE = 1 << 2
FOPEN_CACHE_DIR = 1 << 3
FOPEN_NOFLUSH = 1 << 5
FOPEN_PASSTHROUGH = 1 << 7

GETATTR_FH = 1 << 0

NOTIFY_INVAL_INODE = 2
NOTIFY_INVAL_ENTRY = 3

# _IOW(229, n, size)
IOC_BACKING_OPEN = (1 << 30) | (16 << 16) | (229 << 8) | 1
IOC_BACKING_CLOSE = (1 << 30) | (4 << 16) | (229 << 8) | 2

IN_HEADER = struct.Struct("<IIQQIIIHH")  # length opcode unique nodeid uid gid pid extlen padding
OUT_HEADER = struct.Struct("<IiQ")  # length -errno unique (notify: code in place of -errno, unique 0)
INIT_IN = struct.Struct("<IIII")  # major minor max_readahead flags; flags2 follows under INIT_EXT
INIT_OUT = struct.Struct("<IIIIHHIIHHIIH22x")
ATTR = struct.Struct("<QQQqqqIIIIIIIIII")
ENTRY = struct.Struct("<QQQQII")  # nodeid generation entry_s attr_s entry_ns attr_ns; ATTR follows
ENTRY_ATTR = struct.Struct("<QQQQIIQQQqqqIIIIIIIIII")  # both at once
ATTR_OUT = struct.Struct("<QII")  # attr_s attr_ns dummy; ATTR follows
GETATTR_IN = struct.Struct("<IIQ")  # flags dummy fh
OPEN_IN = struct.Struct("<II")  # flags open_flags
OPEN_OUT = struct.Struct("<QIi")  # fh open_flags backing_id
READ_IN = struct.Struct("<QQIIQII")  # fh offset size read_flags lock_owner flags padding
RELEASE_IN = struct.Struct("<QIIQ")  # fh flags release_flags lock_owner
FLUSH_IN = struct.Struct("<QIIQ")  # fh unused padding lock_owner
FSYNC_IN = struct.Struct("<QII")  # fh fsync_flags padding
GETXATTR_IN = struct.Struct("<II")  # size padding; name follows
GETXATTR_OUT = struct.Struct("<II")  # size padding
ACCESS_IN = struct.Struct("<II")  # mask padding
LSEEK_IN = struct.Struct("<QQII")  # fh offset whence padding
LSEEK_OUT = struct.Struct("<Q")
FORGET_IN = struct.Struct("<Q")
BATCH_FORGET_IN = struct.Struct("<II")  # count dummy; FORGET_ONE follow
FORGET_ONE = struct.Struct("<QQ")  # nodeid nlookup
INTERRUPT_IN = struct.Struct("<Q")  # unique of the interrupted request
STATFS_OUT = struct.Struct("<QQQQQIIII24x")
DIRENT = struct.Struct("<QQII")  # ino offset namelen type; name follows, padded to 8 bytes
INVAL_INODE_OUT = struct.Struct("<Qqq")  # nodeid offset length
INVAL_ENTRY_OUT = struct.Struct("<QII")  # parent namelen flags; name and NUL follow
BACKING_MAP = struct.Struct("<iIQ")  # fd flags padding
BACKING_ID = struct.Struct("<I")
