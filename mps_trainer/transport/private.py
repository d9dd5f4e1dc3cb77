"""Pages of a shared mapping made private in place, so that arrays over them go on showing what they show now."""

from __future__ import annotations

import ctypes
import mmap
import os

_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value


def make_private(address: int, nbytes: int) -> None:
    """Put a private copy of the pages that hold `nbytes` from `address` where they are.

    For other threads of this process that read them it happens at once: the copy is complete before it takes the
    place of the shared pages. Other processes see nothing of it. Stores to these pages no longer reach anybody else.

    Raises OSError when there is no memory for the copy; the pages are then as before.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    size = ctypes.c_size_t(-(-(address + nbytes - start) // mmap.PAGESIZE) * mmap.PAGESIZE)
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    copy = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, ctypes.c_long(0))
    if copy == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    ctypes.memmove(copy, start, size.value)
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
    if libc.mremap(ctypes.c_void_p(copy), size, size, flags, ctypes.c_void_p(start)) == _FAILED:
        number = ctypes.get_errno()
        libc.munmap(ctypes.c_void_p(copy), size)
        raise OSError(number, os.strerror(number))
