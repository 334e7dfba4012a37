"""Errors about damaged checkpoints, which name leaf and file."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import tensorstore as ts
from etils import epath

__all__ = ["REMEDY", "CheckpointError", "files_of", "reading", "wrong_checksums"]

REMEDY = (
    "Restore an earlier step (`manager.restore(like, step=...)`; without `step` the newest one that can be read is "
    "taken), or copy the checkpoint again from where it came from."
)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or cannot be read back.

    Example:
      >>> try:
      ...     jzero.restore_checkpoint("no/such/checkpoint", state)
      ... except jzero.CheckpointError as error:
      ...     print(str(error).splitlines()[0])
      There is no checkpoint at no/such/checkpoint.
    """


@contextlib.contextmanager
def reading(directory: epath.Path, leaves: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turns the libraries' errors into a `CheckpointError`, except those about memory.

    Args:
      directory: The directory to read.
      leaves: Paths of leaves by Orbax's names.
    """
    try:
        yield
    except (CheckpointError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        raise _as_checkpoint_error(directory, error, leaves or {}) from error


def _as_checkpoint_error(directory: epath.Path, error: BaseException, leaves: Mapping[str, str]) -> CheckpointError:
    """Returns a library's error as one that names the checkpoint, the file and the leaf."""
    causes = list(_causes(error))
    text = "\n".join(str(cause) for cause in causes)
    keys = re.findall(r'Error reading "([^"]+)" in OCDBT', text)
    files = [name for name in re.findall(r'local file "([^"]+)"', text) if not name.endswith("/")][-1:]
    where = f"The checkpoint at {directory} cannot be read"
    if keys:
        name = keys[0].rpartition("/")[0]
        where += f": leaf {leaves.get(name, name)!r}"
        files = files or files_of(directory, keys[0])
    if files:
        where += f", file {files[0]}"
    reason = f"{type(causes[-1]).__name__}: {_first_line(str(causes[-1]))}"
    return CheckpointError(f"{where}. It is damaged, or the file system fails ({reason}).\n{REMEDY}")


def wrong_checksums(directory: epath.Path, paths: Sequence[str]) -> CheckpointError:
    """Returns the error about leaves whose checksums differ from those written."""
    lines = []
    for path in paths[:10]:
        files = files_of(directory, path.replace("/", ".") + "/")
        lines.append(f"  {path}" + (f" (in {', '.join(files[:4])})" if files else ""))
    more = [f"  ... {len(paths) - 10} more"] if len(paths) > 10 else []
    return CheckpointError(
        f"The checkpoint at {directory} is damaged: these leaves are not what was written, by their checksums:\n"
        + "\n".join(lines + more)
        + f"\n{REMEDY}"
    )


def files_of(directory: epath.Path, prefix: str) -> list[str]:
    """Returns the files that hold the keys with a prefix, in an Orbax database; an empty list if unknown."""
    try:
        base = ts.KvStore.open(f"file://{directory}/").result()
        manifest = ts.ocdbt.dump(base).result()
        root = manifest["versions"][-1]["root"]["location"]
        found = dict.fromkeys(_value_files(base, root, prefix.encode(), b""))
        return [str(directory / name) for name in found]
    except Exception:  # the database itself is damaged; the original error says more
        return []


def _value_files(base: Any, location: str, wanted: bytes, prefix: bytes) -> Iterator[str]:
    for entry in ts.ocdbt.dump(base, location).result()["entries"]:
        key = prefix + entry["key"]
        if "indirect_value" in entry and key.startswith(wanted):
            yield _file_name(entry["indirect_value"])
        elif "location" in entry:  # a node below, whose keys share a prefix
            yield from _value_files(base, entry["location"], wanted, key[: entry["subtree_common_prefix_length"]])


def _file_name(location: str) -> str:
    """Returns the file of a location such as `"value:ocdbt.process_0/:d/1a2b:0:405"`."""
    return location.partition(":")[2].rsplit(":", 2)[0].replace(":", "")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(text: str, limit: int = 400) -> str:
    text = re.sub(r" \[tensorstore_spec=.*", "", text, flags=re.DOTALL).strip()
    line = text.splitlines()[0] if text else "no message"
    return line if len(line) <= limit else f"{line[:limit]} ..."
