"""A real tmpfs of a chosen size on /dev/shm, seen by one child process and its children alone."""

import ctypes
import os
from pathlib import Path

import pytest
from channel_peers import Child

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
FILL = "/dev/shm/fill"


def in_small_shm(options, body):
    """Run `body()` in a child whose /dev/shm is a tmpfs mounted with `options`. Fails as it fails, also by a signal.

    Skips the test where the kernel allows neither root nor a user namespace to mount.
    """

    def child(report):
        try:
            _mount(options)
        except OSError as error:
            report(f"cannot mount a tmpfs on /dev/shm: {error}")
            return
        body()
        report("done")

    process = Child(child)
    status = process.wait()
    assert status == 0, "SIGBUS" if status == -7 else f"status {status}, see above"
    if process.said != ["done"]:
        pytest.skip(process.said[0])


def _mount(options):
    libc = ctypes.CDLL(None, use_errno=True)

    def call(done):
        if done != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    if os.geteuid() == 0:
        call(libc.unshare(_CLONE_NEWNS))
    else:
        uid, gid = os.geteuid(), os.getegid()
        call(libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS))
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path(f"/proc/self/{name}").write_bytes(text.encode())
    call(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    call(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, options.encode()))


def free_pages():
    room = os.statvfs("/dev/shm")
    return room.f_bavail * room.f_frsize // 4096


def leave_free(pages):
    """Fill /dev/shm but for `pages` pages."""
    fd = os.open(FILL, os.O_CREAT | os.O_RDWR, 0o600)
    now = os.fstat(fd).st_blocks * 512 // 4096
    want = now + free_pages() - pages
    if want > now:
        os.posix_fallocate(fd, 0, want * 4096)
    else:
        os.ftruncate(fd, want * 4096)
    os.close(fd)
    assert free_pages() == pages
