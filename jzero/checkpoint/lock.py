"""Locks that let only one program at a time write to a directory, or to one path."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from typing import IO

import jax
from etils import epath

from jzero.checkpoint.damage import CheckpointError, is_there
from jzero.core.base.guard import warn
from jzero.core.processes.exchange import exchange, succeed_together

LOCK_FILE = "jzero.lock"


_HOLDERS: weakref.WeakValueDictionary[str, DirectoryLock] = weakref.WeakValueDictionary()
"""The locks that this process holds, by directory."""


class DirectoryLock:
    """A lock that the operating system releases when the process ends, however it ends.

    Within one process the holder gives way: a new manager, as notebooks make them, takes over from the old one. The
    package `filelock` takes the same lock of the system, but can neither give way nor say who holds it.

    Args:
      directory: The directory to lock.
      give_way: A weak reference to a method that finishes the holder's work and releases the lock.
    """

    def __init__(self, directory: epath.Path, give_way: Callable[[], Callable[[], None] | None]) -> None:
        self._directory = directory
        self._give_way = give_way
        self._file: IO[str] | None = None

    def take_over(self) -> None:
        """Lets another manager of this program finish, and takes its place. Each process must call it."""
        holder = _HOLDERS.get(str(self._directory))
        give_way = None if holder is None or holder is self else holder._give_way()
        if give_way is not None:
            give_way()
        _HOLDERS[str(self._directory)] = self

    def acquire(self) -> str:
        """Locks the directory. If another program holds it, returns text about that program and the way out."""
        self._file, other = _lock(self._directory / LOCK_FILE)
        return "" if other is None else f"{other} End that one, or choose another directory."

    def release(self) -> None:
        """Releases the lock."""
        file, self._file = self._file, None
        if _HOLDERS.get(str(self._directory)) is self:
            del _HOLDERS[str(self._directory)]
        if file is not None:
            file.close()


@contextlib.contextmanager
def only_writer(path: epath.Path) -> Iterator[None]:
    """Holds a lock on a path, beside which it puts a file until then.

    Raises:
      CheckpointError: Another program holds it.
      OSError: The folder cannot be written to.
    """
    lock_path = path.with_name(f"{path.name}.lock")
    file, other = _lock(lock_path)
    if other is not None:
        raise CheckpointError(f"{path} is not written: {other} Wait for that one, or choose another path.")
    try:
        yield
    finally:
        if file is not None:
            lock_path.unlink(missing_ok=True)  # while it is still ours
            file.close()


def _lock(path: epath.Path) -> tuple[IO[str] | None, str | None]:
    """Returns the locked file (`None` where locks do not exist), or text about the program that holds it."""
    if "://" in os.fspath(path):  # object stores have no locks
        return None, None
    file = open(path, "a+")  # noqa: SIM115  # the caller closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip()
        file.close()
        return None, f"another program writes there ({holder or 'unknown'}), and one at a time may."
    except OSError as error:
        file.close()
        warn(f"{path.parent} knows no locks ({error}): see that one program writes there.")
        return None, None
    if not os.fstat(file.fileno()).st_nlink:  # its holder has removed it meanwhile
        file.close()
        return _lock(path)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file, None


def _release_in_child() -> None:
    """Releases the locks in a forked process, which would hold them after its parent has ended."""
    for lock in list(_HOLDERS.values()):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)


LAG_S = 10.0
"""How long a file that one process wrote may take to appear to another."""


def check_shared(directory: epath.Path) -> None:
    """Raises in all processes unless each sees what the first writes to a directory. Each process must call it."""
    if jax.process_count() == 1:
        return
    is_first = jax.process_index() == 0
    name = exchange(lambda: uuid.uuid4().hex)[0]  # which no file system remembers as absent
    file = directory / f"jzero.{name}"

    def write() -> None:
        if is_first:
            directory.mkdir(parents=True, exist_ok=True)
            file.write_text("")

    succeed_together(write)
    try:
        succeed_together(lambda: _wait_for(file))
    finally:
        if is_first:
            with contextlib.suppress(OSError):
                file.unlink()


def _wait_for(file: epath.Path) -> None:
    deadline = time.monotonic() + LAG_S
    while not is_there(file):
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"Process {jax.process_index()} does not see what process 0 writes to {file.parent}: each writes a "
                "part of a checkpoint, so all must save to the same folder, on a disk that they share."
            )
        time.sleep(0.1)
