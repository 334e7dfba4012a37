"""The keys of one configuration, checked against the table, each with its verdict."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jzero.deepspeed.key import REQUIRED, USUAL, Block, Key, Verdict
from jzero.deepspeed.keys import KEYS, LOOKED_INTO, PARAMS, STRICT
from jzero.deepspeed.paths import AUTO, OLD_NAMES, canonical
from jzero.deepspeed.report import NOT_SET, KeyVerdict

SAME = 0.85
"""How alike two names of single values are if one is taken for the other."""
AUTO_NOTE = '"auto" is for a trainer to fill in'
SWITCHES = ("fp16.enabled", "bf16.enabled")

DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "float32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "float16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bfloat16"),
}

IN_WORDS = {
    "bool": "true or false",
    "int": "a whole number",
    "number": "a number",
    "string": "a string",
    "dtype": '"fp32", "fp16" or "bf16"',
    "pair": "two numbers",
    "rate": "a number, or a list of numbers",
    "block": "a block of keys",
}


class Settings:
    """A configuration: checked values by path, problems, and a verdict for each key.

    Attributes:
      values: Checked values of the file; integers as `int`, dtypes by jax's name. Without "auto".
      autos: The paths whose value is "auto".
      rows: The verdicts by path, in the order of the file.
      params: The blocks `optimizer.params` and `scheduler.params`, unchecked.
      problems: A sentence for each value that cannot be read.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.autos: set[str] = set()
        self.rows: dict[str, KeyVerdict] = {}
        self.params: dict[str, Block] = {}
        self.problems: list[str] = []

    def __getitem__(self, path: str) -> Any:
        """Returns the value of a key of the table: the file's, or else DeepSpeed's default."""
        return self.values.get(path, KEYS[path].default)

    def judge(self, path: str, verdict: Verdict, note: str) -> None:
        """Changes the verdict on a key, if the file has it."""
        row = self.rows.get(path)
        # An "auto" is undecided only if its key has an effect; a switch always has one.
        is_open = path in self.autos and (verdict != "ignored" or path in SWITCHES)
        if row is not None and not is_open:
            self.rows[path] = KeyVerdict(row.key, row.value, verdict, note)

    def judge_all(self, prefix: str, verdict: Verdict, note: str) -> None:
        """Changes the verdict on every key with this prefix."""
        for path in [path for path in self.rows if path.startswith(prefix)]:
            self.judge(path, verdict, note)

    def judge_auto(self, path: str, here: str) -> None:
        """Marks an "auto" as decided, with its value."""
        row = self.rows[path]
        self._add(path, row.key, row.value, "ignored", f"{AUTO_NOTE}; here: {here}")

    def replace_all(self, prefix: str, note: str) -> None:
        """Marks every key with this prefix as replaced by an argument."""
        for path, row in list(self.rows.items()):
            if path.startswith(prefix):
                self._add(path, row.key, row.value, "ignored", note)

    def imply(self, path: str, verdict: Verdict, note: str) -> None:
        """Adds a row for a key that the file does not have."""
        if path not in self.rows:
            self.rows[path] = KeyVerdict(path, NOT_SET, verdict, note)

    def judge_unmade(self, path: str, block: str, open_names: Iterable[str]) -> None:
        """Notes that no optimizer or schedule is built, since values are missing; unless it is refused."""
        row = self.rows.get(path)
        if row is not None and row.verdict != "refused":
            names = ", ".join(f"`{block}.{name}`" for name in sorted(open_names))
            self.judge(path, row.verdict, f"{row.note}; not built without {names or 'its schedule'}")

    def skip(self, path: str, value: object, note: str) -> None:
        """Adds a row for a key that nothing reads."""
        self._add(path, path, value, "ignored", note)

    def read_key(self, key: Key, path: str, written: str, value: object) -> None:
        """Reads the value of a key, with the verdict of the table."""
        if path in self.rows:
            self.problems.append(f"`{written}` and `{self.rows[path].key}` are the same key: keep one.")
        elif value == AUTO:
            self.autos.add(path)
            default = "not known" if key.default in (None, AUTO, REQUIRED) else f"DeepSpeed's default, {key.default}"
            note = f"{AUTO_NOTE}; here: {default}"
            is_undecided = key.verdict == "honoured"
            verdict: Verdict = "open" if is_undecided and _changes_numbers(path) else "ignored"
            self.rows[path] = KeyVerdict(written, value, verdict, note, is_undecided=is_undecided)
        elif value is None and key.default is None:
            self._add(path, written, value, "ignored", "null, as by default")
        else:
            self._read_value(key, path, written, value)

    def _read_value(self, key: Key, path: str, written: str, value: object) -> None:
        if (problem := _problem(key, value)) is not None:
            self.problems.append(f"`{written}` must be {problem}: got {value!r}.")
            return
        self.values[path] = _plain(key, value)
        if key.verdict == "refused" and not _asks(key, value):
            self._add(path, written, value, "ignored", "off")
        else:
            self._add(path, written, value, key.verdict, _say_current_name(path, written) + key.note)

    def _add(self, path: str, written: str, value: object, verdict: Verdict, note: str) -> None:
        self.rows[path] = KeyVerdict(written, value, verdict, note)

    def unknown(self, written: str, value: object, names: Sequence[str], *, strict: bool) -> None:
        """Reads a key that is not in the table: an error in the blocks where DeepSpeed has one, else a likely typo."""
        cutoff = 0.6 if strict or isinstance(value, Mapping) else SAME
        close = difflib.get_close_matches(written.rpartition(".")[2], names, n=1, cutoff=cutoff)
        hint = f" Did you mean `{close[0]}`?" if close else ""
        if strict:
            self.problems.append(f"`{written}` is not a key that DeepSpeed knows.{hint}")
        else:
            verdict: Verdict = "refused" if close else "ignored"
            self._add(written, written, value, verdict, f"unknown; DeepSpeed reads no such key.{hint}")

    def raise_problems(self) -> None:
        """Raises a `ValueError` that lists everything that cannot be read."""
        if self.problems:
            listed = "\n".join(f"  {problem}" for problem in self.problems)
            raise ValueError(f"The DeepSpeed configuration cannot be read:\n{listed}")


def read_settings(raw: Block) -> Settings:
    """Returns the checked keys of a configuration except those of `PARAMS`; errors are in its `problems`."""
    settings = Settings()
    if "bfloat16" in raw and "bf16" in raw:
        settings.problems.append("`bfloat16` and `bf16` are the same key: keep one.")
    _read_block(settings, raw, "", "")
    return settings


def _read_block(settings: Settings, block: Block, prefix: str, written_prefix: str) -> None:
    for name, value in block.items():
        written = f"{written_prefix}{name}"
        path = canonical(f"{prefix}{name}")
        if path in LOOKED_INTO:
            _read_inside(settings, value, path, written)
        elif path in PARAMS:
            _keep_params(settings, value, path, written)
        elif path in KEYS:
            settings.read_key(KEYS[path], path, written, value)
        else:
            strict = path.partition(".")[0] in STRICT and "." in path
            settings.unknown(written, value, _names(prefix), strict=strict)


def _read_inside(settings: Settings, value: object, path: str, written: str) -> None:
    if path == "zero_optimization" and isinstance(value, bool):  # of DeepSpeed's first releases
        settings.read_key(KEYS["zero_optimization.stage"], "zero_optimization.stage", written, int(value))
    elif value is None or value == {}:
        settings.rows[path] = KeyVerdict(written, value, "ignored", "empty")
    elif isinstance(value, Mapping):
        _read_block(settings, value, f"{path}.", f"{written}.")
    else:
        settings.problems.append(f"`{written}` must be a block of keys: got {value!r}.")


def _keep_params(settings: Settings, value: object, path: str, written: str) -> None:
    if isinstance(value, Mapping):
        settings.params[path] = value
    elif value is not None:
        settings.problems.append(f"`{written}` must be a block of keys: got {value!r}.")


def _names(prefix: str) -> list[str]:
    """Returns the names that a block may have, old ones included."""
    paths = [path for path in (*KEYS, *LOOKED_INTO, *PARAMS, *OLD_NAMES) if path.startswith(prefix)]
    return [path[len(prefix) :] for path in paths if "." not in path[len(prefix) :]]


def _changes_numbers(path: str) -> bool:
    """Whether a run has other numbers with the value that a trainer fills in."""
    return not path.startswith("zero_optimization.") and path.rpartition(".")[2] not in USUAL


def _problem(key: Key, value: Any) -> str | None:
    """Returns the requirement that a value of this key misses, if any."""
    allowed = {
        "bool": isinstance(value, bool),
        "int": _is_number(value) and value == int(value),
        "number": _is_number(value),
        "string": isinstance(value, str),
        "dtype": isinstance(value, str) and value.lower() in DTYPES,
        "pair": isinstance(value, Sequence) and len(value) == 2 and all(map(_is_number, value)),
        "rate": _is_number(value) or (isinstance(value, Sequence) and bool(value) and all(map(_is_number, value))),
        "block": isinstance(value, Mapping),
        "any": True,
    }
    if not allowed[key.kind]:
        return IN_WORDS[key.kind]
    if key.choices and value.lower() not in key.choices:
        return f"one of {key.choices}"
    if key.kind in ("int", "number") and value < key.least:
        return f"at least {key.least}"
    return None


def _plain(key: Key, value: Any) -> object:
    if key.kind == "int":
        return int(value)
    if key.kind == "dtype":
        return DTYPES[value.lower()]
    return value.lower() if key.choices else value


def _say_current_name(path: str, written: str) -> str:
    """Notes the current name of a key; the prefix "stage3_" is ignored."""
    name, as_written = path.rpartition(".")[2], written.rpartition(".")[2]
    return "" if as_written in (name, f"stage3_{name}") else f"now `{name}`: "


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _asks(key: Key, value: Any) -> bool:
    """Whether a value asks for something that is off by default."""
    value = value.lower() if key.choices else value
    return value not in (key.default, *key.off) and not (isinstance(value, Mapping) and not _is_on(value))


def _is_on(block: Block) -> bool:
    """Whether a block is on: by `enabled` at any depth if there is such a key, or else if it holds anything."""
    switches = list(_switches(block))
    return any(switches) if switches else bool(block)


def _switches(block: Block) -> list[bool]:
    if "enabled" in block:
        return [bool(block["enabled"])]
    return [switch for value in block.values() if isinstance(value, Mapping) for switch in _switches(value)]
