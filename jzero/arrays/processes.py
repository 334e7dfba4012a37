"""What processes tell each other, and that they agree before they run anything together: else a collective would hang.

[Note: How processes compare]
What finds out that a collective would hang must not be one, so processes compare through the key-value store of
`jax.distributed`, on the host. All of them make the same calls in the same order. Each comparison has a number, and
under it a process says where in the program it is, with a digest of each thing that must be the same, or why it failed.
The first process of the mesh reads what all say and writes the verdict, which the others wait for: two messages of a
few hundred bytes per process. So a process that is elsewhere, in an evaluation in place of a training step, is found as
fast as one with other settings. Where digests differ, one process of each opinion, three at most, tells what its digest
is of, and all raise the same message. A process that does not come is waited for as long as `check_processes` says, or
until it has ended.
"""

from __future__ import annotations

import atexit
import base64
import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import operator
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh

from jzero import _compat

__all__ = ["PROGRAM", "WAIT_S", "agree", "are_several", "check_wait", "gather_texts"]

T = TypeVar("T")

AnyMesh = Mesh | AbstractMesh

Parts = Mapping[str, str]
"""What processes must agree on, in lines of text, by what it is about."""

PROGRAM = "the program"
"""The part that follows from all others: only where nothing else differs it is shown."""

WAIT_S = 300.0
"""How long processes wait for each other, as in `jax.distributed.initialize`."""
QUIET_S = 10.0
"""After how long they say so."""
LINGER_S = 1.0
"""How long the first process lets the others speak before it raises."""
MAX_LINES, MAX_COLUMNS = 20, 1000


def check_wait(check_processes: Any) -> float | None:
    """Returns how many seconds an argument `check_processes` has processes wait; `None` if they are not compared."""
    if isinstance(check_processes, bool):
        return WAIT_S if check_processes else None
    if isinstance(check_processes, int | float) and check_processes > 0:
        return float(check_processes)
    raise ValueError(
        "`check_processes` must be True, False or a number of seconds > 0 to wait for other processes: got "
        f"{check_processes!r}."
    )


def are_several(mesh: AnyMesh) -> bool:
    """Whether the devices of a mesh belong to several processes."""
    return jax.process_count() > 1 and isinstance(mesh, Mesh) and len(_group(mesh)) > 1


def agree(
    where: str, mesh: AnyMesh, make: Callable[[], T], describe: Callable[[T], Parts], *, wait_s: float | None = WAIT_S
) -> T:
    """Returns what `make` returns, once it is the same in all processes; else raises in all of them.

    See [Note: How processes compare]. Each process of the mesh must call it.

    Args:
      where: Where in the program this is.
      mesh: Whose processes are compared.
      make: Makes it. If it fails in one process, the others are told.
      describe: Says what of it must be the same. Is called where there are several processes.
      wait_s: How many seconds to wait for the others; `None` compares nothing.

    Raises:
      ValueError: They differ, are elsewhere, have failed or did not come.
    """
    if wait_s is None or not are_several(mesh):
        return make()
    if _compat.distributed_client() is None:
        logging.getLogger("jzero").warning("Processes are not compared: call `jax.distributed.initialize` first.")
        return make()
    assert isinstance(mesh, Mesh)
    talk = _Talk(where, _group(mesh), wait_s)
    try:
        made = make()
        parts = describe(made)
    except Exception as error:
        talk.fail(error)
        raise
    complaint = talk.compare(parts)
    if complaint:
        raise ValueError(complaint)
    return made


def gather_texts(text: str) -> list[str]:
    """Returns the text of each process; each must call it."""
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.array(len(data), np.int32))).reshape(-1)
    buffer = np.zeros(int(sizes.max()), np.uint8)
    buffer[: len(data)] = data
    rows = np.asarray(multihost_utils.process_allgather(buffer)).reshape(len(sizes), -1)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def _group(mesh: Mesh) -> tuple[int, ...]:
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


@dataclasses.dataclass
class _History:
    """What was compared so far, since `jax.distributed` was initialized.

    Attributes:
      client: The connection to the key-value store.
      counts: Number of comparisons of each group of processes.
      last: Where the latest one was.
    """

    client: Any = None
    counts: dict[tuple[int, ...], int] = dataclasses.field(default_factory=dict)
    last: str = "the start"


_history = _History()


@dataclasses.dataclass(frozen=True)
class _Word:
    """What one process says: where it is, digests of what it has, and why it failed if it did."""

    where: str
    digests: dict[str, str]
    failure: str | None = None


class _Talk:
    """One comparison of a group of processes."""

    def __init__(self, where: str, group: tuple[int, ...], wait_s: float) -> None:
        global _history  # noqa: PLW0603  # one per process, like the connection that it is about
        client = _compat.distributed_client()
        if client is not _history.client:
            _history = _History(client)
            atexit.register(_say_ended, client, jax.process_index())
        number = _history.counts[group] = _history.counts.get(group, 0) + 1
        self.before, _history.last = _history.last, where
        self.client, self.group, self.where, self.wait_s = client, group, where, wait_s
        self.me = jax.process_index()
        self.key = f"jzero/{hashlib.sha256(str(group).encode()).hexdigest()[:16]}/{number}"

    def fail(self, error: Exception) -> None:
        """Tells the others that this process failed."""
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        mine = _Word(self.where, {}, text[:MAX_COLUMNS])
        self._say(f"word/{self.me}", dataclasses.asdict(mine))
        if self.me == self.group[0]:
            self._say("verdict", str(_failed({self.me: mine})))
            words = self._hear({i: f"word/{i}" for i in self.group[1:]}, time.monotonic() + QUIET_S)
            self._linger([i for i, word in words.items() if not word["failure"]])

    def compare(self, parts: Parts) -> str:
        """Returns what is wrong, the same text in every process; nothing if all is well."""
        mine = _Word(self.where, {name: hashlib.sha256(text.encode()).hexdigest() for name, text in parts.items()})
        self._say(f"word/{self.me}", dataclasses.asdict(mine))
        deadline = time.monotonic() + self.wait_s
        if self.me == self.group[0]:
            return self._judge(mine, parts, deadline)
        (first,) = keys = {self.group[0]: "verdict"}
        verdict = self._hear(keys, deadline + QUIET_S).get(first)  # it waits as long, and knows more
        if isinstance(verdict, list):
            if self.me in verdict:
                self._say(f"parts/{self.me}", _packed(parts))
            verdict = self._hear({first: "complaint"}, time.monotonic() + self.wait_s).get(first)
        if verdict:
            self._say(f"heard/{self.me}", True)
        return str(self._missing([first])) if verdict is None else verdict

    def _judge(self, mine: _Word, parts: Parts, deadline: float) -> str:
        heard = self._hear({i: f"word/{i}" for i in self.group[1:]}, deadline, until_failure=True)
        words = {self.me: mine} | {i: _Word(**word) for i, word in sorted(heard.items())}
        opinions: dict[str, list[int]] = {}
        for i, word in words.items():
            opinions.setdefault(json.dumps(word.digests), []).append(i)
        key, complaint = "verdict", ""
        if any(word.failure for word in words.values()):
            complaint = str(_failed(words))
        elif any(word.where != self.where for word in words.values()):
            complaint = str(_elsewhere(words))
        elif len(words) < len(self.group):
            complaint = str(self._missing([i for i in self.group if i not in words]))
        elif len(opinions) > 1:
            key, complaint = "complaint", self._explained(parts, list(opinions.values())[:3])
        self._say(key, complaint)
        if complaint:
            self._linger([i for i, word in words.items() if i != self.me and not word.failure])
        return complaint

    def _explained(self, parts: Parts, opinions: list[list[int]]) -> str:
        """Returns what processes of different opinions, this one first, differ in."""
        asked = [processes[0] for processes in opinions]
        self._say("verdict", asked)
        told = self._hear({i: f"parts/{i}" for i in asked[1:]}, time.monotonic() + self.wait_s)
        known = {self.me: parts} | {i: _unpacked(text) for i, text in told.items()}
        return str(_disagreement([(who, known.get(who[0], {})) for who in opinions]))

    def _linger(self, processes: Sequence[int]) -> None:
        """Waits until others have heard what is wrong: where this one ends, the key-value store may, and all die."""
        if processes:
            self._hear({i: f"heard/{i}" for i in processes}, time.monotonic() + QUIET_S)
            time.sleep(LINGER_S)

    def _say(self, name: str, what: Any) -> None:
        _compat.store(self.client, f"{self.key}/{name}", json.dumps(what))

    def _hear(self, keys: Mapping[int, str], deadline: float, *, until_failure: bool = False) -> dict[int, Any]:
        """Returns what processes say, as far as they do; comes back as soon as one of them has failed if told so."""
        heard: dict[int, Any] = {}
        missing, said_so, is_last = list(keys), time.monotonic() + QUIET_S, False
        while True:
            wait_s = 0.0 if is_last else min(1.0, max(deadline - time.monotonic(), 0.0))
            for i in missing:
                text = _compat.stored(self.client, f"{self.key}/{keys[i]}", wait_s)
                if text is None:
                    wait_s = 0.0
                else:
                    heard[i] = json.loads(text)
            missing = [i for i in keys if i not in heard]
            if not missing or is_last or (until_failure and any(word["failure"] for word in heard.values())):
                return heard
            is_last = time.monotonic() >= deadline or bool(self._gone(missing))
            if time.monotonic() > said_so:
                said_so = deadline
                logging.getLogger("jzero").warning("Waiting for %s. %s", _names(missing), self._here())

    def _gone(self, processes: Sequence[int]) -> list[int]:
        return [i for i in processes if _compat.stored(self.client, _ended(i)) is not None]

    def _here(self) -> str:
        return f"Process {self.me} is at {self.where}; before that all processes were at {self.before}."

    def _missing(self, missing: Sequence[int]) -> ValueError:
        gone = self._gone(missing)
        how = f"{_names(gone)} ended" if gone else f"{_names(missing)} did not come within {self.wait_s:g} s"
        return ValueError(
            f"The processes are not at the same place of the program: {how}. {self._here()} Every process must make "
            "the same calls of jzero in the same order, with batches of the same shapes. If one may come later, say "
            "how many seconds to wait, such as `check_processes=3600`."
        )


def _ended(process: int) -> str:
    return f"jzero/ended/{process}"


def _say_ended(client: Any, process: int) -> None:
    if client is _compat.distributed_client():  # else it was closed
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            _compat.store(client, _ended(process), "")


def _failed(words: Mapping[int, _Word]) -> ValueError:
    failed = [f"  process {i}: {word.failure} (in {word.where})" for i, word in words.items() if word.failure]
    return ValueError("Other processes failed, so this one does not go on either:\n" + "\n".join(failed[:3]))


def _elsewhere(words: Mapping[int, _Word]) -> ValueError:
    places = [f"  process {i}: {word.where}" for i, word in words.items()]
    return ValueError(
        "The processes are not at the same place of the program, so they would wait for each other for ever:\n"
        + "\n".join(places[:MAX_LINES])
        + "\nEvery process must make the same calls of jzero in the same order."
    )


def _disagreement(told: Sequence[tuple[list[int], Parts]]) -> ValueError:
    """Returns what processes differ in; those of the same opinion come with what one of them tells."""
    parts = [own for _, own in told]
    names = list(dict.fromkeys(name for part in parts for name in part))
    differ = [name for name in names if any(part.get(name) != parts[0].get(name) for part in parts)]
    differ = [name for name in differ if name != PROGRAM] or differ
    lines: list[str] = []
    for name in differ:
        rows = [part.get(name, "").splitlines() for part in parts]
        for (processes, _), row in zip(told, _own_lines(rows), strict=True):
            limit = MAX_LINES // len(told)
            lines += [f"  {_names(processes)}: {line.strip()[:MAX_COLUMNS]}" for line in row[:limit]]
            lines += [f"  ... {len(row) - limit} more"] if len(row) > limit else []
    return ValueError(
        f"The processes do not agree about {' and '.join(differ)}, so they would wait for each other for ever, or each "
        "train something else:\n"
        + "\n".join(lines)
        + "\nStart every process with the same configuration, model, optimizer, settings and data; "
        "`check_processes=False` goes on regardless."
    )


def _own_lines(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Returns the lines of each text that the others do not have, or not as often."""
    counts = [collections.Counter(map(_unnumbered, row)) for row in rows]
    own: list[list[str]] = []
    for row in rows:
        common = functools.reduce(operator.and_, counts)
        own.append([])
        for line in row:
            common[_unnumbered(line)] -= 1
            if common[_unnumbered(line)] < 0:
                own[-1].append(line)
    return own


def _unnumbered(line: str) -> str:
    """Returns a line of a program without the numbers of its values, which all change where one is added."""
    return re.sub(r"%\w+", "%", line)


def _names(processes: Sequence[int]) -> str:
    more = f" and {len(processes) - 8} more" if len(processes) > 8 else ""
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes[:8]))}{more}"


def _packed(parts: Parts) -> str:
    return base64.b85encode(zlib.compress(json.dumps(dict(parts)).encode(), 1)).decode()


def _unpacked(text: str) -> dict[str, str]:
    return dict(json.loads(zlib.decompress(base64.b85decode(text))))
