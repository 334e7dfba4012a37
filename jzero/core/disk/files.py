"""Unnamed files: space in a folder on a fast local disk that lives as long as the process.

[Note: Unnamed files]
Optimizer state is worth nothing without its parameters, which die with the process. So its files never get a name: the
kernel frees them however the process ends, jobs that share a folder cannot meet, and nothing is left to lock, to check
or to clean up. A forked child would keep the space taken, so it closes its copies at once. Reads and writes go past the
page cache where the file system can (`O_DIRECT`): it would hold the state a second time, in the memory that the state
has just left. Where it cannot, each record is forced out and dropped from the cache before the next.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import weakref
from typing import NoReturn

import numpy as np

from jzero.core.base.guard import warn

PAGE = 4096
"""Offsets, lengths and addresses are multiples of it: `O_DIRECT` takes no others."""

_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_NO_UNNAMED_FILES = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}  # by file system, or by an old kernel


class DiskError(RuntimeError):
    """The disk that holds optimizer state is too small, fails, or returns wrong bytes.

    The message names the folder, the operation and the reason. Unless it says to restore a checkpoint, the state is as
    it was before the step: save it, or repeat the step.

    Example:
      >>> def train(step, state, batches, save):
      ...     try:
      ...         for batch in batches:
      ...             state, metrics = step(state, batch)
      ...     except jzero.DiskError:
      ...         save(state)  # the step that failed has consumed nothing
      ...         raise
    """


def check_folder(path: str | os.PathLike[str], name: str = "Offload.path") -> str:
    """Returns the absolute path of a folder in which this process may make files; warns if it is in memory.

    Args:
      path: The folder. It must exist.
      name: What the caller calls it, for messages.

    Raises:
      ValueError: It is missing, not a folder, or not writable.
    """
    folder = os.path.abspath(os.fspath(path))
    if why := _refusal(folder):
        raise ValueError(
            f"`{name}` must be a folder in which this process may write: got {folder!r}, but {why}, or choose another "
            "one on a fast local disk."
        )
    kind = file_system(folder)
    if kind in _IN_MEMORY:
        warn(
            f"{folder} is memory, not a disk ({kind}): state there takes as much memory as before. "
            f"Set `{name}` to a folder on a local disk."
        )
    return folder


def _refusal(folder: str) -> str:
    if not os.path.exists(folder):
        return "it does not exist. Make it first"
    if not os.path.isdir(folder):
        return "it is a file. Pass the folder around it"
    return "" if os.access(folder, os.W_OK | os.X_OK) else "its permissions forbid that. Change them"


def file_system(path: str) -> str:
    """Returns the type of the file system that holds a path, e.g. `"ext4"`; `"unknown"` if Linux does not say."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo") as mounts:
            lines = [line.split() for line in mounts]
    except OSError:
        return "unknown"
    # The third field is the device; the type is the first field after a lone hyphen.
    return next((fields[fields.index("-") + 1] for fields in lines if fields[2] == number), "unknown")


def free_bytes(path: str) -> int:
    """Returns how many bytes an ordinary user may still take on the file system of a path."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def page_aligned(num_bytes: int) -> np.ndarray:
    """Returns memory for reads and writes, uint8 `[num_bytes]`, that begins at a page."""
    # Shared memory, mmap's default: private pages that a disk is filling might be copied meanwhile, by a fork.
    return np.frombuffer(mmap.mmap(-1, max(num_bytes, PAGE)), np.uint8, num_bytes)


class UnnamedFile:
    """Space on a disk that this process alone can reach, see [Note: Unnamed files].

    Reads and writes may run in several threads at once. `close`, the end of the last reference, and the end of the
    process free the space.

    Args:
      folder: Where, as `check_folder` returns it.
      num_bytes: The size, all of it taken now.

    Attributes:
      name: The folder, for messages.
      is_direct: Whether reads and writes go past the page cache.
      fallbacks: What the file system cannot do, with its reason; empty on common local ones.

    Raises:
      DiskError: No file can be made there, or none of this size.
    """

    def __init__(self, folder: str, num_bytes: int) -> None:
        self.name, self.num_bytes = folder, num_bytes
        try:
            self._fd, lacks_name = _open(folder)
        except OSError as error:
            raise DiskError(
                f"No file can be made in {folder}: {error.strerror}. Choose another folder on a local disk."
            ) from error
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False  # a thread may still write when another file gets this number
        _OPEN.add(self)
        try:
            os.posix_fallocate(self._fd, 0, max(num_bytes, PAGE))
        except OSError as error:
            self.close()
            raise DiskError(
                f"{folder} cannot hold another {num_bytes:,} bytes: {error.strerror}, and {free_bytes(folder):,} are "
                "free. Free some, raise the quota, or choose another folder."
            ) from error
        lacks_direct = _go_direct(self._fd)
        self.is_direct = not lacks_direct
        self.fallbacks = tuple(filter(None, (lacks_name, lacks_direct)))

    def read(self, buffer: np.ndarray, offset: int) -> None:
        """Fills a buffer, uint8 and page-aligned, with the bytes from an offset on.

        Raises:
          DiskError: The disk fails, or the file was cut.
        """
        done = 0
        self._check(buffer)
        while done < buffer.size:
            try:
                count = os.preadv(self._fd, [buffer[done:].data], offset + done)
            except OSError as error:
                self._fail("Reading", buffer.size, offset, error)
            if count == 0:
                raise DiskError(
                    f"A file in {self.name} was cut: reading {buffer.size:,} bytes at {offset:,} ended after {done:,}. "
                    "Restore a checkpoint."
                )
            done += count
        self._forget(offset, buffer.size)

    def write(self, buffer: np.ndarray, offset: int) -> None:
        """Writes a buffer, uint8 and page-aligned, from an offset on.

        Raises:
          DiskError: The disk fails, or is full.
        """
        done = 0
        self._check(buffer)
        try:
            while done < buffer.size:
                done += os.pwritev(self._fd, [buffer[done:].data], offset + done)
            if not self.is_direct:
                os.fdatasync(self._fd)
        except OSError as error:
            self._fail("Writing", buffer.size, offset, error)
        self._forget(offset, buffer.size)

    def close(self) -> None:
        """Gives the space back. Nothing may be under way."""
        self._close()  # once: the number may be another file's by now
        self._fd = -1
        _OPEN.discard(self)

    def _check(self, buffer: np.ndarray) -> None:
        assert (buffer.ctypes.data | buffer.nbytes) % PAGE == 0, "`O_DIRECT` would refuse it: see `page_aligned`"
        if self._fd < 0:
            raise DiskError(
                f"State in {self.name} is gone: it was closed, or this is a forked child of the process that made it. "
                "Make the state anew, or restore a checkpoint."
            )

    def _fail(self, what: str, num_bytes: int, offset: int, error: OSError) -> NoReturn:
        raise DiskError(
            f"{what} {num_bytes:,} bytes at {offset:,} of a file in {self.name} failed: {error.strerror} "
            f"(errno {error.errno}). The state is as before: save it, or repeat the step."
        ) from error

    def _forget(self, offset: int, num_bytes: int) -> None:
        """Drops bytes from the page cache."""
        if not self.is_direct:
            os.posix_fadvise(self._fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)


def _open(folder: str) -> tuple[int, str]:
    """Returns a new file without a name, and what the file system lacks for one that never had any."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), ""
    except OSError as error:
        if error.errno not in _NO_UNNAMED_FILES:
            raise
        lacks = f"no O_TMPFILE ({error.strerror}): files have a name until they are opened"
    fd, path = tempfile.mkstemp(prefix="jzero-", dir=folder)
    os.unlink(path)
    return fd, lacks


def _go_direct(fd: int) -> str:
    """Makes reads and writes go past the page cache; returns what the file system lacks for that."""
    # Only now: some file systems take space by writing into every block, which `O_DIRECT` does not permit.
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        return f"no O_DIRECT ({error.strerror}): each record is forced out of the page cache"
    return ""


_OPEN: weakref.WeakSet[UnnamedFile] = weakref.WeakSet()


def _close_in_child() -> None:
    for file in list(_OPEN):
        file.close()


os.register_at_fork(after_in_child=_close_in_child)
