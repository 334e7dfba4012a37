"""Which tensors of a file make which parameters: names, cuts, orders of dimensions. Arithmetic, without arrays."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping as MappingOf
from typing import Any

GROUP = re.compile(r"\(([^()]*)\)")
SECTION = 3
"""Numbers of a section: dimension, start, size."""


@dataclasses.dataclass(frozen=True)
class From:
    r"""A tensor of a file, as the source of a parameter: first a `section` of it, then `permute`, then `shape`.

    Attributes:
      name: Its name in the file. `\1` stands for the first group of the mapping's key. Each `*` stands for the numbers
        from 0, and for a leading dimension of the parameter: layers of a scanned model, experts.
      permute: The order of its dimensions in the parameter, as for `numpy.transpose`; `(1, 0)` transposes.
      shape: The shape of the result, if that is another one: heads split from features, say. Without dimensions that
        a `*` adds.
      section: Which part of the tensor: a dimension of it, the first index, the number of indices. All by default.
      axis: In a tuple of sources: the dimension of the result along which they lie one after another.

    Example:
      >>> jzero.From("model.layers.*.self_attn.q_proj.weight", permute=(1, 0)).permute
      (1, 0)
    """

    name: str
    permute: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    section: tuple[int, int, int] | None = None
    axis: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"`From.name` must be the name of a tensor: got {self.name!r}.")
        for field in ("permute", "shape", "section"):
            value = getattr(self, field)
            if value is None:
                continue
            if not isinstance(value, tuple | list) or not all(type(x) is int and x >= 0 for x in value):
                raise ValueError(f"`From.{field}` of {self.name!r} must be a tuple of whole numbers: got {value!r}.")
            object.__setattr__(self, field, tuple(value))
        if self.permute is not None and sorted(self.permute) != list(range(len(self.permute))):
            raise ValueError(f"`From.permute` of {self.name!r} must hold each dimension once: got {self.permute}.")
        if self.section is not None and len(self.section) != SECTION:
            raise ValueError(
                f"`From.section` of {self.name!r} must be a dimension, a start and a size: got {self.section}."
            )
        if type(self.axis) is not int or self.axis < 0:
            raise ValueError(f"`From.axis` of {self.name!r} must be a dimension, from 0: got {self.axis!r}.")

    @property
    def num_stacked(self) -> int:
        """How many leading dimensions of the parameter its stars run over."""
        return self.name.count("*")

    def at(self, index: tuple[int, ...]) -> str:
        """Returns the name with numbers for its first stars."""
        numbers = iter(index)
        return "".join(str(next(numbers, "*")) if part == "*" else part for part in re.split(r"(\*)", self.name))


Sources = tuple[From, ...]


@dataclasses.dataclass(frozen=True)
class Mapping:
    r"""How the tensors of a file make the parameters of a state, and how those make a file again.

    It holds no functions, so the way back follows from it: `export_params` writes with the mapping that `load_params`
    read with.

    Attributes:
      sources: By regular expressions over whole paths of parameters, such as `r"layers/(\d+)/q/kernel"`: a `From`, or
        several that make one parameter together. The first expression that matches counts.
      ignore: Regular expressions over whole names of tensors that no parameter needs.
      same: Names of tensors that may repeat another one, with the name of that one: a tied head.

    Example:
      >>> mapping = jzero.Mapping({"w": jzero.From("linear.weight", permute=(1, 0))})
      >>> _ = jzero.export_params(state, f"{tmp}/mapped", mapping=mapping)
      >>> loaded = jzero.load_params(state, f"{tmp}/mapped", mapping=mapping)
      >>> bool((jzero.get_full_param(loaded, "w") == jzero.get_full_param(state, "w")).all())
      True
    """

    sources: MappingOf[str, From | Sources]
    ignore: tuple[str, ...] = ()
    same: MappingOf[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.sources, MappingOf) or not self.sources:
            raise ValueError(f"`Mapping` must map paths of parameters to `From`s, at least one: got {self.sources!r}.")
        if isinstance(self.ignore, str):
            raise ValueError(f"`Mapping.ignore` must be a tuple of expressions: got the text {self.ignore!r}.")
        for key in (*self.sources, *self.ignore):
            try:
                re.compile(key)
            except (re.error, TypeError) as error:
                raise ValueError(f"`Mapping` key {key!r} is not a regular expression: {error}.") from error
        for key, value in self.sources.items():
            _check_sources(key, value if isinstance(value, tuple) else (value,))

    def of(self, path: str) -> Sources:
        """Returns the sources of a parameter, with the groups of its key put in; none if no key matches its path."""
        for key, value in self.sources.items():
            if (hit := re.fullmatch(key, path)) is not None:
                sources = value if isinstance(value, tuple) else (value,)
                return tuple(dataclasses.replace(x, name=hit.expand(x.name)) for x in sources)
        return ()

    def ignores(self, name: str) -> bool:
        """Whether no parameter needs a tensor."""
        return any(re.fullmatch(key, name) for key in self.ignore)

    @classmethod
    def from_sources(cls, table: MappingOf[str, tuple[str, Any]], *, ignore: tuple[str, ...] = ()) -> Mapping:
        r"""Returns the mapping of a table from names in files, as other libraries have it.

        Args:
          table: By regular expressions over names in files, whose groups are numbers, the path of a parameter with
            `\1` for the first group, its keys joined by dots or slashes, and `(permute, shape)`, either `None`, or
            `None` for both.
          ignore: As for `Mapping`.

        Example:
          >>> table = {r"h\.([0-9]+)\.proj\.weight": (r"layers.\1.kernel", ((1, 0), None))}
          >>> jzero.Mapping.from_sources(table).of("layers/7/kernel")[0].name
          'h.7.proj.weight'
        """
        sources: dict[str, From] = {}
        for pattern, (path, how) in table.items():
            groups = GROUP.findall(pattern)
            order = [int(number) for number in re.findall(r"\\(\d+)", path)]
            if sorted(order) != list(range(1, len(groups) + 1)):
                raise ValueError(f"{path!r} must hold each group of {pattern!r} once, as \\1 and so on.")
            key = "".join(
                f"({groups[int(part) - 1]})" if i % 2 else re.escape(part.replace(".", "/"))
                for i, part in enumerate(re.split(r"\\(\d+)", path))
            )
            between = [re.sub(r"\\(.)", r"\1", part) for part in GROUP.split(pattern)[::2]]
            places = [f"\\{order.index(i + 1) + 1}" for i in range(len(groups))]
            name = "".join(itertools.chain.from_iterable(itertools.zip_longest(between, places, fillvalue="")))
            permute, shape = how or (None, None)
            sources[key] = From(name, permute, shape)
        return cls(sources, ignore)


def _check_sources(key: str, sources: Sources) -> None:
    """Raises unless the sources of one key can make a parameter together."""
    if not sources or not all(isinstance(x, From) for x in sources):
        raise TypeError(f"`Mapping` key {key!r} must have a `From` or a tuple of them: got {sources!r}.")
    if len({(x.num_stacked, x.axis) for x in sources}) > 1:
        raise ValueError(
            f"`Mapping` key {key!r} has sources with different numbers of stars or different `axis`: "
            f"{[(x.name, x.axis) for x in sources]}. They must lie along one dimension of the same stack."
        )
    num_groups = re.compile(key).groups
    for source in sources:
        if any(int(number) > num_groups for number in re.findall(r"\\(\d+)", source.name)):
            raise ValueError(f"`Mapping` key {key!r} has fewer groups than {source.name!r} takes.")
