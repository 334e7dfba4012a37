"""Makes processes agree before they run anything together, since a collective would hang otherwise.

`agree` is for where a process may be elsewhere in the program; `least` does so about a number. Where all processes are
known to come, `jzero.core.processes.exchange` takes collectives.

[Note: How processes compare]
The check must not be a collective itself, since it would hang, too. So processes compare through the key-value store of
`jax.distributed`, on the host. All processes make the same calls in the same order. Each comparison has a number. Under
it, a process writes its place in the program, with a digest of each thing that must be the same, or the reason why it
failed. The first process of the mesh reads all entries and writes the verdict, for which the others wait: two messages
of a few hundred bytes per process. Entries also have a number, of which the verdict is the least if all agree. So the
check finds a process that runs an evaluation instead of a training step as fast as one with other settings. If digests
differ, up to three processes with different digests send the texts behind them, and all processes raise the same
message. The others wait for a missing process as long as `check_processes` says, or until it has ended; then they
raise, and tell it so. It may be in a collective that waits for them, where nothing can be raised: a thread in each
process looks for such words every few seconds, and logs them.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from jzero.core.base import compat
from jzero.core.base.compat import DistributedClient
from jzero.core.base.guard import attempt
from jzero.core.base.text import few
from jzero.core.config.settings import check, number
from jzero.core.layout.mesh import AnyMesh
from jzero.core.processes import presence

T = TypeVar("T")

Parts = Mapping[str, str]
"""The facts that processes must agree on, in lines of text, by topic."""

PROGRAM = "the program"
"""The part that follows from all others: a message shows it only if nothing else differs."""

WAIT_S = 300.0
"""How long processes wait for each other, as in `jax.distributed.initialize`."""
MEET_S = 40.0
"""How long they wait for each other where nothing is compiled or computed in between."""
QUIET_S = 10.0
"""How long they wait before they say so."""
LINGER_S = 1.0
"""How long the first process lets the others raise before it does."""
SECONDS = number("True, False or a number of seconds > 0 to wait for other processes", lambda x: x > 0)
MAX_LINES, MAX_COLUMNS = 20, 1000


def check_wait(check_processes: object, default: float = WAIT_S) -> float | None:
    """Returns the seconds to wait for an argument `check_processes`; `None` if processes are not compared."""
    if isinstance(check_processes, bool):
        return default if check_processes else None
    return float(check("check_processes", check_processes, SECONDS))


def are_several(mesh: AnyMesh) -> bool:
    """Whether the devices of a mesh belong to several processes."""
    return jax.process_count() > 1 and isinstance(mesh, Mesh) and len(_group(mesh)) > 1


@dataclasses.dataclass
class Compared:
    """What a process tells the others.

    Attributes:
      facts: Returns the facts that must be the same. Called only with several processes. If it fails, no facts are
        compared.
      number: A number; once all agree, the least of all processes, `None` if several are not compared.
    """

    facts: Callable[[], Parts] = dict
    number: int | None = 0


@contextlib.contextmanager
def agreement(where: str, mesh: AnyMesh, *, wait_s: float | None = WAIT_S) -> Iterator[Compared]:
    """Runs its body in each process of a mesh; raises in all if that fails in one, or what they tell differs.

    See `agree`, which does so for a function.
    """
    compared = Compared()
    several = are_several(mesh)
    if several and wait_s is not None and compat.distributed_client() is None:
        logging.getLogger("jzero").warning("Processes are not compared: call `jax.distributed.initialize` first.")
        wait_s = None
    if not several or wait_s is None:
        yield compared
        compared.number = None if several else compared.number
        return
    assert isinstance(mesh, Mesh)
    comparison = _Comparison(where, _group(mesh), wait_s)
    try:
        yield compared
    except Exception as error:
        comparison.run({}, error)
        raise
    comparison.number = compared.number or 0
    if complaint := comparison.run(attempt(compared.facts) or {}):
        raise ValueError(complaint)
    compared.number = comparison.number


def agree(
    where: str, mesh: AnyMesh, make: Callable[[], T], describe: Callable[[T], Parts], *, wait_s: float | None = WAIT_S
) -> T:
    """Returns the result of `make`, if it is the same in all processes; else raises in all of them.

    See [Note: How processes compare]. Each process of the mesh must call it.

    Args:
      where: The place in the program.
      mesh: The mesh whose processes are compared.
      make: Makes the result. If it fails in one process, the others raise, too.
      describe: Returns the facts about the result that must be the same. Called only with several processes. If it
        fails, no facts are compared.
      wait_s: How many seconds to wait for the others; `None` compares nothing.

    Raises:
      ValueError: Processes differ, are elsewhere, have failed or did not come.
    """
    with agreement(where, mesh, wait_s=wait_s) as compared:
        result = make()
        compared.facts = functools.partial(describe, result)
    return result


def least(
    where: str, mesh: AnyMesh, make: Callable[[], int], describe: Callable[[], Parts], *, wait_s: float | None = WAIT_S
) -> int:
    """Returns the least of what `make` returns in all processes, as `agree` does; if none are compared, 0 or less."""
    with agreement(where, mesh, wait_s=wait_s) as compared:
        compared.number = result = make()
        compared.facts = describe
    return min(result, 0) if compared.number is None else compared.number


def _group(mesh: Mesh) -> tuple[int, ...]:
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


@dataclasses.dataclass
class _History:
    """The comparisons so far, since `jax.distributed` was initialized.

    Attributes:
      client: The connection to the key-value store.
      counts: Number of comparisons of each group of processes.
      last: The place of the latest one.
    """

    client: DistributedClient | None = None
    counts: dict[tuple[int, ...], int] = dataclasses.field(default_factory=dict)
    last: str = "the start"


_history = _History()


@dataclasses.dataclass(frozen=True)
class _Message:
    """The entry of one process: its place, digests of its facts, its number, and why it failed if it did."""

    where: str
    digests: dict[str, str]
    number: int
    failure: str | None = None


class _Comparison:
    """One comparison of a group of processes.

    Attributes:
      number: The number of this process; once all agree, the least of all.
    """

    number = 0

    def __init__(self, where: str, group: tuple[int, ...], wait_s: float) -> None:
        global _history  # noqa: PLW0603  # one per process, like its connection
        client = compat.distributed_client()
        if client is not _history.client:
            _history = _History(client)
            presence.join(client, jax.process_index())
        number = _history.counts[group] = _history.counts.get(group, 0) + 1
        self.before, _history.last = _history.last, where
        self.client, self.group, self.where, self.wait_s = client, group, where, wait_s
        self.me = jax.process_index()
        self.key = f"jzero/{hashlib.sha256(str(group).encode()).hexdigest()[:16]}/{number}"

    def run(self, parts: Parts, error: Exception | None = None) -> str:
        """Returns the complaint, the same text in each process; nothing if all agree."""
        failure = None if error is None else f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_COLUMNS]
        digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in parts.items()}
        mine = _Message(self.where, digests, self.number, failure)
        self._publish(f"entry/{self.me}", dataclasses.asdict(mine))
        deadline = time.monotonic() + (QUIET_S if failure else self.wait_s)
        if self.me == self.group[0]:
            return self._compare_all(mine, parts, deadline)
        if failure:
            return ""
        (first,) = keys = {self.group[0]: "verdict"}
        verdict = self._fetch(keys, deadline + QUIET_S).get(first)  # the first waits as long, and knows more
        if isinstance(verdict, list):
            if self.me in verdict:
                self._publish(f"parts/{self.me}", _pack(parts))
            verdict = self._fetch({first: "complaint"}, time.monotonic() + self.wait_s).get(first)
        if isinstance(verdict, int):
            self.number = verdict
            return ""
        if verdict:
            self._publish(f"heard/{self.me}", True)
        return self._give_up([first]) if verdict is None else verdict

    def _compare_all(self, mine: _Message, parts: Parts, deadline: float) -> str:
        others = self._fetch({i: f"entry/{i}" for i in self.group[1:]}, deadline, until_failure=True)
        entries = {self.me: mine} | {i: _Message(**message) for i, message in sorted(others.items())}
        opinions: dict[str, list[int]] = {}
        for i, message in entries.items():
            opinions.setdefault(json.dumps(message.digests), []).append(i)
        key, complaint = "verdict", ""
        if any(message.failure for message in entries.values()):
            complaint = str(_describe_failed(entries))
        elif any(message.where != self.where for message in entries.values()):
            complaint = str(_describe_elsewhere(entries))
        elif len(entries) < len(self.group):
            complaint = self._give_up([i for i in self.group if i not in entries])
        elif len(opinions) > 1:
            key, complaint = "complaint", self._explain(parts, list(opinions.values())[:3])
        self.number = min(message.number for message in entries.values())
        self._publish(key, complaint or self.number)
        if complaint:
            self._linger([i for i, message in entries.items() if i != self.me and not message.failure])
        return complaint

    def _explain(self, parts: Parts, opinions: list[list[int]]) -> str:
        """Returns the differences between processes with different digests, this one first."""
        asked = [processes[0] for processes in opinions]
        self._publish("verdict", asked)
        messages = self._fetch({i: f"parts/{i}" for i in asked[1:]}, time.monotonic() + self.wait_s)
        parts_of = {self.me: parts} | {i: _unpack(text) for i, text in messages.items()}
        return str(_disagreement([(who, parts_of.get(who[0], {})) for who in opinions]))

    def _linger(self, processes: Sequence[int]) -> None:
        """Waits until the others have read the complaint: if this process ends, the key-value store may end, too."""
        if processes:
            self._fetch({i: f"heard/{i}" for i in processes}, time.monotonic() + QUIET_S)
            time.sleep(LINGER_S)

    def _publish(self, name: str, what: object) -> None:
        presence.put(self.client, f"{self.key}/{name}", json.dumps(what))

    def _fetch(self, keys: Mapping[int, str], deadline: float, *, until_failure: bool = False) -> dict[int, Any]:
        """Returns the entries of processes, as far as they exist; if asked, returns as soon as one has failed."""
        received: dict[int, Any] = {}
        missing, said_so, is_last = list(keys), time.monotonic() + QUIET_S, False
        while True:
            wait_s = 0.0 if is_last else min(1.0, max(deadline - time.monotonic(), 0.0))
            for i in missing:
                text = presence.get(self.client, f"{self.key}/{keys[i]}", wait_s)
                if text is None:
                    wait_s = 0.0
                else:
                    received[i] = json.loads(text)
            missing = [i for i in keys if i not in received]
            if not missing or is_last or (until_failure and any(message["failure"] for message in received.values())):
                return received
            is_last = time.monotonic() >= deadline or bool(presence.ended(self.client, missing))
            if time.monotonic() > said_so:
                said_so = deadline
                logging.getLogger("jzero").warning("Waiting for %s. %s", _names(missing), self._here())

    def _here(self) -> str:
        return f"Process {self.me} is at {self.where}; before that all processes were at {self.before}."

    def _give_up(self, missing: Sequence[int]) -> str:
        """Returns the complaint about processes that did not come, and tells them."""
        complaint = str(self._missing(missing))
        presence.give_up(self.client, missing, complaint)
        return complaint

    def _missing(self, missing: Sequence[int]) -> ValueError:
        gone = presence.ended(self.client, missing)
        how = f"{_names(gone)} ended" if gone else f"{_names(missing)} did not come within {self.wait_s:g} s"
        return ValueError(
            f"The processes are not at the same place of the program: {how}. {self._here()} Every process must make "
            "the same calls of jzero in the same order, none of them under `if jax.process_index() == 0`, with batches "
            "of the same shapes. If one may come later, say how many seconds to wait, such as `check_processes=3600`."
        )


def others_failed(failures: Sequence[str]) -> str:
    """Returns what a process says that stops since others failed."""
    listed = few([x[:MAX_COLUMNS] for x in failures], 3, between="\n")
    return f"Other processes failed, so this one stops, too:\n{listed}"


def _describe_failed(entries: Mapping[int, _Message]) -> ValueError:
    failed = [
        f"  process {i}: {message.failure} (in {message.where})" for i, message in entries.items() if message.failure
    ]
    return ValueError(others_failed(failed))


def _describe_elsewhere(entries: Mapping[int, _Message]) -> ValueError:
    places = [f"  process {i}: {message.where}" for i, message in entries.items()]
    return ValueError(
        "The processes are not at the same place of the program, so they would deadlock:\n"
        + "\n".join(places[:MAX_LINES])
        + "\nEvery process must make the same calls of jzero in the same order."
    )


def _disagreement(groups: Sequence[tuple[list[int], Parts]]) -> ValueError:
    """Returns the differences between processes; processes with equal digests share one text."""
    parts = [own for _, own in groups]
    names = list(dict.fromkeys(name for part in parts for name in part))
    differ = [name for name in names if any(part.get(name) != parts[0].get(name) for part in parts)]
    differ = [name for name in differ if name != PROGRAM] or differ
    lines: list[str] = []
    for name in differ:
        rows = [part.get(name, "").splitlines() for part in parts]
        for (processes, _), row in zip(groups, _own_lines(rows), strict=True):
            limit = MAX_LINES // len(groups)
            lines += [f"  {_names(processes)}: {line.strip()[:MAX_COLUMNS]}" for line in row[:limit]]
            lines += [f"  ... {len(row) - limit} more"] if len(row) > limit else []
    return ValueError(
        f"The processes do not agree about {' and '.join(differ)}, so they would deadlock, or each "
        "train something else:\n"
        + "\n".join(lines)
        + "\nStart every process with the same configuration, model, optimizer, settings and data; "
        "`check_processes=False` goes on regardless."
    )


def _own_lines(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Returns the lines of each text that the others lack, or have less often."""
    counts = [collections.Counter(map(_strip_numbers, row)) for row in rows]
    own: list[list[str]] = []
    for row in rows:
        common = functools.reduce(operator.and_, counts)
        own.append([])
        for line in row:
            common[_strip_numbers(line)] -= 1
            if common[_strip_numbers(line)] < 0:
                own[-1].append(line)
    return own


def _strip_numbers(line: str) -> str:
    """Returns a line of a program without the numbers of its values, which all change if one is added."""
    return re.sub(r"%\w+", "%", line)


def _names(processes: Sequence[int]) -> str:
    return f"process{'es' if len(processes) > 1 else ''} {few(processes, 8)}"


def _pack(parts: Parts) -> str:
    return base64.b85encode(zlib.compress(json.dumps(dict(parts)).encode(), 1)).decode()


def _unpack(text: str) -> dict[str, str]:
    return dict(json.loads(zlib.decompress(base64.b85decode(text))))
