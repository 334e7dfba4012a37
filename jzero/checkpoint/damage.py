"""Errors about checkpoints that cannot be read, which name leaf and file, and tell damage from errors that pass.

[Note: What is damage]
A run that takes a good checkpoint for a damaged one loses work, and moves that checkpoint away. So damage needs
evidence: bytes that are wrong by their checksum or format, or not there. An interrupt is raised again, however deep in
the libraries' errors it is. Errors of the file system, of the network and of memory are no evidence. Interrupts may
also leave other errors behind, such as an event loop that stopped, so a manager reads a step a second time before it
goes to an earlier one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import tensorstore as ts
from etils import epath

REMEDY = (
    "Restore an earlier step (`manager.restore(like, step=...)`; without `step` the newest one that can be read is "
    "taken), or copy the checkpoint again from where it came from."
)
TRY_AGAIN = "That is no sign of damage: try again once it works, rather than go on from an earlier step."


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or cannot be read back.

    Example:
      >>> try:
      ...     jzero.restore_checkpoint("no/such/checkpoint", state)
      ... except jzero.CheckpointError as error:
      ...     print(str(error).splitlines()[0])
      There is no checkpoint at no/such/checkpoint.
    """


class DamageError(CheckpointError):
    """The bytes of a checkpoint are wrong, so an earlier one may take its place."""


ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
"""Codes in TensorStore's errors that mean a missing file."""
PASSING = (
    "ABORTED:",
    "CANCELLED:",
    "DEADLINE_EXCEEDED:",
    "PERMISSION_DENIED:",
    "RESOURCE_EXHAUSTED:",
    "UNAUTHENTICATED:",
    "UNAVAILABLE:",
)
"""How TensorStore's errors begin that say nothing about bytes."""


@contextlib.contextmanager
def reading(directory: epath.Path, leaves: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turns the libraries' errors into a `CheckpointError`, except interrupts and those about memory.

    See [Note: What is damage].

    Args:
      directory: The directory to read.
      leaves: Paths of leaves by Orbax's names.

    Raises:
      DamageError: The bytes are wrong.
      CheckpointError: The file system fails.
    """
    handled = sys.exc_info()[1]  # being handled by the caller, so no cause of errors here
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        causes = list(causes_of(error, handled))
        for cause in causes:
            if isinstance(cause, KeyboardInterrupt | SystemExit | MemoryError | jax.errors.JaxRuntimeError):
                raise cause from None
        raise _as_checkpoint_error(directory, causes, leaves or {}) from error


def is_there(path: epath.Path) -> bool:
    """Whether there is a file or directory; raises a `CheckpointError` if the file system does not say."""
    with reading(path):
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def is_passing(error: BaseException) -> bool:
    """Whether an error is one of the file system, the network or a cancelled task, and says nothing about bytes."""
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return False
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        return int(code[1]) not in ABSENT
    passing = (OSError, concurrent.futures.CancelledError, asyncio.CancelledError)
    return isinstance(error, passing) or str(error).startswith(PASSING)


def _as_checkpoint_error(
    directory: epath.Path, causes: Sequence[BaseException], leaves: Mapping[str, str]
) -> CheckpointError:
    """Returns a library's error, and what caused it, as one that names the checkpoint, the file and the leaf."""
    text = "\n".join(str(cause) for cause in causes)
    keys = re.findall(r'Error reading "([^"]+)" in OCDBT', text)
    files = [name for name in re.findall(r'local file "([^"]+)"', text) if not name.endswith("/")][-1:]
    where = f"The checkpoint at {directory} cannot be read"
    if keys:
        name = re.sub(r"/(c(/\d+)*|[\d.]+|zarr\.json|\.zarray)$", "", keys[0])
        where += f": leaf {leaves.get(name, name)!r}"
        files = files or files_of(directory, keys[0])
    if files:
        where += f", file {files[0]}"
    passing = [cause for cause in causes if is_passing(cause)]
    cause = [*causes, *passing][-1]
    reason = f"{type(cause).__name__}: {_first_line(str(cause))}"
    if passing:
        return CheckpointError(f"{where}, since the file system fails ({reason}).\n{TRY_AGAIN}")
    return DamageError(f"{where}: it is damaged ({reason}).\n{REMEDY}")


def files_of(directory: epath.Path, prefix: str) -> list[str]:
    """Returns the files that hold the keys with a prefix, in an Orbax database; an empty list if unknown."""
    try:
        base = ts.KvStore.open(f"file://{directory}/").result()
        manifest = ts.ocdbt.dump(base).result()
        root = manifest["versions"][-1]["root"]["location"]
        files = dict.fromkeys(_value_files(base, root, prefix.encode(), b""))
        return [str(directory / name) for name in files]
    except Exception:  # the database itself is damaged; the original error says more
        return []


def _value_files(base: Any, location: str, key_prefix: bytes, prefix: bytes) -> Iterator[str]:
    for entry in ts.ocdbt.dump(base, location).result()["entries"]:
        key = prefix + entry["key"]
        if "indirect_value" in entry and key.startswith(key_prefix):
            yield _file_name(entry["indirect_value"])
        elif "location" in entry:  # a node below, whose keys share a prefix
            yield from _value_files(base, entry["location"], key_prefix, key[: entry["subtree_common_prefix_length"]])


def _file_name(location: str) -> str:
    """Returns the file of a location such as `"value:ocdbt.process_0/:d/1a2b:0:405"`."""
    return location.partition(":")[2].rsplit(":", 2)[0].replace(":", "")


def causes_of(error: BaseException | None, handled: BaseException | None = None) -> Iterator[BaseException]:
    """Yields an error and what caused it, up to an error that was there before."""
    visited = {id(handled)}  # an error that is raised again may be its own context
    while error is not None and id(error) not in visited:
        yield error
        visited.add(id(error))
        error = error.__cause__ or error.__context__


def _first_line(text: str, limit: int = 400) -> str:
    text = re.sub(r" \[tensorstore_spec=.*", "", text, flags=re.DOTALL).strip()
    line = text.splitlines()[0] if text else "no message"
    return line if len(line) <= limit else f"{line[:limit]} ..."
