"""The keys that a configuration can have, the rules about them, and a configuration with its values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, Unpack

from jzero.deepspeed.kinds import ValueKind

Verdict: TypeAlias = Literal["honoured", "compiler", "ignored", "open", "refused"]
Block: TypeAlias = Mapping[str, object]
"""A block of a configuration, or all of it: values by name, some of them blocks."""

AUTO = "auto"
REQUIRED = "required"
"""The default of a key that has none."""
NOT_SET = "(not set)"
"""The value of a key that the file does not have, but whose default in DeepSpeed changes the numbers."""
USUAL = frozenset({"betas", "eps", "weight_decay", "warmup_min_lr", "warmup_type", "gradient_clipping"})
"""For an "auto" of these, trainers fill in DeepSpeed's default unless told otherwise."""


class Ruling(NamedTuple):
    """A verdict, and its reason."""

    verdict: Verdict
    note: str


KeyRule: TypeAlias = Callable[["Parsed", str], Ruling | None]
"""What holds for a key, given by its path, in a configuration; `None` if the rule does not apply."""


def where(holds: Callable[[Parsed], bool], note: str, verdict: Verdict = "ignored") -> KeyRule:
    """Returns the rule that says the same wherever something holds."""
    return lambda c, path: Ruling(verdict, note) if holds(c) else None


def _as_it_is(c: Parsed, path: str) -> Any:
    return c[path]


@dataclasses.dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
      kind: The type of its value.
      default: DeepSpeed's default.
      verdict: The verdict on the value. One that is the default, and so turns nothing on, is never refused.
      note: The field or argument that takes it, why it is ignored, or what to do instead.
      rules: What holds instead in some configurations.
      old_names: Former and alternative names in the same block.
      target: The argument that its value, or the default, becomes, such as "ZeroConfig.stage".
      value: The value of the argument; `None` for none, a dictionary for several.
      implied: The verdict on the key where the file lacks it, if its default changes the numbers.
      decided: The value in place of "auto", in words, if other keys decide it.
    """

    kind: ValueKind
    default: Any
    verdict: Verdict
    note: str
    rules: tuple[KeyRule, ...] = ()
    old_names: tuple[str, ...] = ()
    target: str = ""
    value: Callable[[Parsed, str], Any] = _as_it_is
    implied: KeyRule | None = None
    decided: Callable[[Parsed, str], str | None] | None = None


class KeyOptions(TypedDict, total=False):
    """Attributes of a key that few rows have."""

    value: Callable[[Parsed, str], Any]
    implied: KeyRule
    decided: Callable[[Parsed, str], str | None]


def row(  # noqa: PLR0913  # the columns of a table
    names: str,
    kind: ValueKind,
    default: Any,
    verdict: Verdict,
    note: str,
    *rules: KeyRule,
    old: str = "",
    target: str = "",
    **options: Unpack[KeyOptions],
) -> dict[str, Key]:
    """Returns keys by name; blanks separate names, as they do old ones, of which "stage3_" is a prefix."""
    key = Key(kind, default, verdict, note, rules, target=target, **options)
    olds = {name: tuple(f"{x}{name}" if x[-1] == "_" else x for x in old.split()) for name in names.split()}
    return {name: dataclasses.replace(key, old_names=old_names) for name, old_names in olds.items()}


def field(  # noqa: PLR0913  # the columns of a table
    name: str,
    kind: ValueKind,
    default: Any,
    target: str,
    *rules: KeyRule,
    note: str = "",
    word: str = "",
    old: str = "",
    **options: Unpack[KeyOptions],
) -> dict[str, Key]:
    """Returns a key by name that becomes an argument; with `word`, true becomes this word."""
    if word:
        options["value"] = lambda c, path: word if c[path] else None
    note = f"`{target}={word!r}`{note}" if word else f"`{target}`{note}"
    return row(name, kind, default, "honoured", note, *rules, old=old, target=target, **options)


class Section(NamedTuple):
    """Keys of one block with their paths, and the rules that hold for all keys of this block."""

    block: str
    keys: tuple[tuple[str, Key], ...]
    rules: tuple[KeyRule, ...]


def section(block: str, *rows: Mapping[str, Key], rules: tuple[KeyRule, ...] = ()) -> Section:
    """Returns rows of a block; "" is the configuration itself."""
    keys = ((f"{block}.{name}".lstrip("."), key) for keys in rows for name, key in keys.items())
    return Section(block, tuple(keys), rules)


class Type(NamedTuple):
    """A type of optimizer or schedule.

    Attributes:
      names: Its parameters, with blanks between them.
      make: Makes it of their values.
      note: What it becomes.
      defaults: Defaults of parameters that differ from those of other types.
      scales: Whether, for some values, a schedule scales the rate of the optimizer.
    """

    names: str
    make: Callable[..., Any]
    note: str = ""
    defaults: Mapping[str, object] = MappingProxyType({})
    scales: Callable[[Any], bool] = lambda params: False


def parameter_names(kind: Type | None) -> list[str]:
    """Returns the names of the parameters of a type."""
    return [] if kind is None else kind.names.split()


@dataclasses.dataclass(frozen=True)
class Schema:
    """All that is known.

    Attributes:
      sections: The keys, with the parameters of all optimizers and schedules. Of two sections of a block the first has
        its rules.
      types: The types of optimizers and schedules by block.
    """

    sections: tuple[Section, ...]
    types: Mapping[str, Mapping[str, Type]]

    @functools.cached_property
    def keys(self) -> dict[str, Key]:
        """The keys by path."""
        return {path: key for section in self.sections for path, key in section.keys}

    @functools.cached_property
    def blocks(self) -> dict[str, tuple[KeyRule, ...]]:
        """The blocks whose keys have verdicts of their own, with their rules. Any other block has one verdict."""
        return {section.block: section.rules for section in reversed(self.sections) if section.block}

    @functools.cached_property
    def old_names(self) -> dict[str, str]:
        """The paths of keys by those with their old names."""
        split = [(*path.rpartition(".")[:2], path, key.old_names) for path, key in self.keys.items()]
        return {f"{block}{dot}{old}": path for block, dot, path, names in split for old in names}

    def canonical(self, path: str) -> str:
        """Returns the path of a key by its current name, without the prefixes that are optional."""
        path = "bf16" + path.removeprefix("bfloat16") if path.partition(".")[0] == "bfloat16" else path
        return self.old_names.get(path, path)


@dataclasses.dataclass(frozen=True)
class KeyVerdict:
    """One key of a configuration.

    Attributes:
      key: The names that lead to it, as the file has them, joined by dots.
      value: Its value.
      verdict: "honoured", "compiler" (left to XLA), "ignored" (has no effect here), "open" ("auto", and the numbers of
        a run depend on what a trainer would fill in) or "refused" (jzero lacks it, or computes other numbers).
      note: The field or argument that takes it, why it has no effect, or what to do instead.
      is_undecided: Whether it is "auto", and nothing here decides it.
    """

    key: str
    value: object
    verdict: Verdict
    note: str
    is_undecided: bool = False


class KeyEntry(NamedTuple):
    """A key of the file: the verdict of its row of the schema, and its value, if it has one that can be used."""

    row: KeyVerdict
    has_value: bool = False
    value: Any = None

    @property
    def is_auto(self) -> bool:
        """Whether it is "auto" and not read as a value."""
        return not self.has_value and isinstance(self.row.value, str) and self.row.value == AUTO


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A configuration with its values.

    Attributes:
      keys: All that it can have: those of any configuration, and the parameters of its optimizer and schedule.
      blocks: The rules of blocks.
      types: The types of its optimizer and schedule, by block; `None` if they are unknown.
      entries: What the file has, by path.
      problems: A sentence for each value that cannot be read.
      num_devices: Devices over which the batch is split, if known.
      has_batch_size: Whether an argument gave the rows of a step.
      has_optimizer: Whether an argument replaces optimizer and schedule.
    """

    keys: Mapping[str, Key]
    blocks: Mapping[str, tuple[KeyRule, ...]]
    types: Mapping[str, Type | None]
    entries: Mapping[str, KeyEntry]
    problems: tuple[str, ...]
    num_devices: int | None
    has_batch_size: bool
    has_optimizer: bool

    def __getitem__(self, path: str) -> Any:
        """Returns the value of a key: the file's, or else DeepSpeed's default."""
        return self.entries[path].value if self.sets(path) else self.keys[path].default

    def sets(self, path: str) -> bool:
        """Whether the file has a value for a key; "auto" and null are none."""
        return path in self.entries and self.entries[path].has_value

    def is_auto(self, path: str) -> bool:
        """Whether the file leaves a key to a trainer."""
        return path in self.keys and path in self.entries and self.entries[path].is_auto

    def params(self, block: str) -> SimpleNamespace:
        """Returns the parameters of the optimizer or schedule by name."""
        return SimpleNamespace(**{name: self[f"{block}.params.{name}"] for name in parameter_names(self.types[block])})

    def open_params(self, block: str) -> list[str]:
        """Returns the parameters without a usable value: refused by their rows, or "auto" without a usual value."""
        paths = {f"{block}.params.{name}": name for name in parameter_names(self.types[block])}
        refused = {path for path, entry in self.entries.items() if entry.row.verdict == "refused"}
        return sorted(x for path, x in paths.items() if path in refused or (self.is_auto(path) and x not in USUAL))
