"""Leaves that are not stored in their natural shape, but behave like arrays of it.

[Note: Padded leaves in your own loop]
A padded (or flattened) leaf is a pytree node that contains the stored array. So `jit`, optax, checkpoints and
everything else that flattens a state see the stored array. Code that uses the leaf itself, `params["kernel"]`,
sees the natural array: `shape`, indexing, operators, methods, and by `__jax_array__` every function of `jax.numpy` and
the layers of Linen and NNX. The natural array is a slice of the stored one; its gradient comes back padded with zeros,
in the same node. If a transformation slices or stacks the stored array (as a scan does), the result has a natural
shape, too, as long as the cut dimension is whole; otherwise an error names the leaf.

Parameters, gradients and optimizer leaves of a state have this one form, so `jax.tree.map` and optax's functions of
several of these trees (`schedule_free_eval_params`, `value_and_grad_from_state`) meet equal nodes at stage 3, and map
over their stored arrays; padding stays zero if zeros give zero. Parameters that are whole (stages 0-2, small ones at
stage 3) are not padded: there the tree of parameters comes first, and the function gets an array and a node, which act
as arrays of one shape. The other order, or gradients of `natural_params` beside stored ones, are trees of different
structure. Jax's error then shows the type of the node, whose text says what to do. The optimizer of an NNX model keeps
stored arrays in its variables: Flax would take a node there for one more level of names.

A node knows its own layout. So whatever takes a node in (a new state over the parameters of a sharded one, a model with
two optimizers) takes it in natural shape; a step refuses one that its plan would have laid out otherwise.

Leaves taken out of the tree (`jax.tree.leaves(state.params)`) are the stored arrays, and `jax.tree.map` maps over
those: trees of their shardings, dtypes and bytes are as they would be without padding, and masks by `x.ndim` are
right, since flattened dimensions leave ones behind. Their sums and norms are right, since padding is zero; their means
are not, nor are masks by `x.shape`: make those of `jax.eval_shape(jzero.natural_params, state)`. Functions of `jax.lax`
take only arrays, such as `jnp.asarray(params["kernel"])`.

Flax's serialization reads and writes natural arrays. Orbax and Equinox's `filter_jit` take trees apart in ways that
nodes of other libraries do not survive: they raise errors that show the type of the node or of its key. Small leaves
are whole rather than padded (`ZeroConfig.padding_threshold`), so most programs meet no such node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jzero.core.base import compat, flax_types
from jzero.core.base.types import DType
from jzero.core.layout.cut import Cut
from jzero.core.layout.stored import InRecords

T = TypeVar("T")

OF_STORAGE = frozenset(
    "addressable_data addressable_shards block_until_ready committed copy_to_host_async delete device devices "
    "global_shards is_deleted is_fully_addressable is_fully_replicated on_device_size_in_bytes sharding".split()
)
"""Attributes that refer to the stored array, not to the natural one."""


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The static part of a node. Layers of equal layout have equal structure, whatever their names."""

    cut: Cut
    path: str = dataclasses.field(compare=False)


class _SaysWhatToDo(type):
    """Errors of jax, Orbax and Equinox about trees that they do not take show the types in them: these say more."""

    def __repr__(cls) -> str:
        return (
            f"{super().__repr__()} (a leaf stored with padding: save states with `jzero.save_checkpoint`, and hand "
            "libraries that do not know such leaves, as Orbax and `eqx.filter_jit`, "
            "`jzero.unshard_train_state(state)`; beside other parts of a state use `state.params` rather than "
            "`jzero.natural_params(state)`, and `jzero.value_and_grad` for gradients; in `jax.tree.map`, put the tree "
            "first that has plain arrays)"
        )


class _Inside(metaclass=_SaysWhatToDo):
    """The key of the array in a node: an empty name, so that leaves keep their names without padding."""

    def __str__(self) -> str:
        return ""


_INSIDE = _Inside()


@jax.tree_util.register_pytree_with_keys_class
class Padded(metaclass=_SaysWhatToDo):
    """A stored leaf that behaves like the array of its natural shape.

    Attributes:
      stored: The stored array, or a placeholder for it.
      cut: How it is stored.
    """

    __array_priority__ = 100  # NumPy leaves operators to this class
    __hash__ = None  # type: ignore[assignment]  # arrays have none

    def __init__(self, stored: Any, path: str, cut: Cut) -> None:
        self.stored = stored
        self.path = path
        self.cut = cut

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[_Inside, object]], _Layout]:
        """Returns the stored array with its key, and the static layout."""
        return ((_INSIDE, self.stored),), _Layout(self.cut, self.path)

    def tree_flatten(self) -> tuple[tuple[object], _Layout]:
        """Returns the stored array, and the static layout."""
        return (self.stored,), _Layout(self.cut, self.path)

    @classmethod
    def tree_unflatten(cls, aux: _Layout, children: tuple[Any]) -> Any:
        """Returns a node around numbers; returns anything else, such as a sharding, as it is."""
        (stored,) = children
        is_number = hasattr(stored, "dtype") or isinstance(stored, float | complex)
        return cls(stored, aux.path, aux.cut) if is_number or compat.is_placeholder(stored) else stored

    @property
    def cut_now(self) -> Cut:
        """The cut of the stored array, which may be a slice of the leaf, or a stack of slices."""
        shape, cut = np.shape(self.stored), self.cut
        while len(shape) < len(cut.stored_shape) and cut.dim > 0:
            cut = cut.drop_leading()
        for size in reversed(shape[: len(shape) - len(cut.stored_shape)]):
            cut = cut.add_leading(size)
        if cut.stored_shape != shape:
            raise ValueError(
                f"{self.path!r} has the shape {self.cut.shape} and is stored padded, as {self.cut.stored_shape}: an "
                f"array of shape {shape} was made of that, padding included. Take parameters from "
                "`jzero.natural_params(state)`, or use `jzero.value_and_grad`."
            )
        return cut

    @property
    def natural(self) -> Any:
        """The array, or its placeholder, in natural shape."""
        x = self.stored
        self.check_alive()
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self.shape, self.dtype)
        if isinstance(x, jax.core.Tracer) and jax.typeof(x).memory_space == jax.memory.Space.Host:
            x = jax.device_put(x, jax.memory.Space.Device)
        return self.cut_now.to_natural(x)

    def check_alive(self) -> None:
        """Raises if a step consumed the stored array; jaxlib 0.10 may crash on such arrays."""
        x = self.stored
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted():
            raise RuntimeError(
                f"{self.path!r} was consumed: an earlier step reused its memory. Go on with the state that the step "
                "returned (`state, metrics = step(state, batch)`)."
            )

    @property
    def at(self) -> _At:
        """Edits as `jax.Array.at` does; the result is a padded leaf like this one."""
        return _At(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its natural shape."""
        return self.cut_now.shape

    @property
    def ndim(self) -> int:
        """Dimensions of its natural shape."""
        return len(self.shape)

    @property
    def dtype(self) -> DType:
        """Its dtype."""
        return self.stored.dtype if self.cut.blocks is None else self.cut.blocks.dtype

    @property
    def size(self) -> int:
        """Elements without padding."""
        return int(np.prod(self.shape))

    def replaced(self, natural: Any) -> Padded:
        """Returns the leaf with the values of an array of its natural shape."""
        new, old = self.cut_now.to_stored(jnp.asarray(natural)), self.stored
        is_placed = isinstance(old, jax.Array) and not isinstance(old, jax.core.Tracer)
        is_traced = isinstance(new, jax.core.Tracer)
        return Padded(jax.device_put(new, old.sharding) if is_placed and not is_traced else new, self.path, self.cut)

    def __setitem__(self, index: object, value: object) -> NoReturn:
        # In place, the edit would show in every other tree that holds this node, where arrays do not change.
        raise TypeError(
            f"{self.path!r} is stored padded, as {self.cut.stored_shape} for {self.cut.shape}, and cannot be assigned "
            "to in place. Edit it with `jzero.update_params`, or replace it by the result of `.at[...].set(...)`."
        )

    def unbox(self) -> jax.Array:
        """Returns the natural array; Flax takes the node for a box around a parameter."""
        return self.natural

    def replace_boxed(self, value: T) -> T:
        """Returns `value`, which was computed from the natural array."""
        return value

    def add_axis(self, index: int, params: object) -> Padded:
        """Returns the node itself, which recognizes a stack by the shape of its array."""
        return self

    def remove_axis(self, index: int, params: object) -> Padded:
        """Returns the node itself, which recognizes a slice by the shape of its array."""
        return self

    def __jax_array__(self) -> jax.Array:
        return self.natural

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return np.asarray(self.natural).__array__(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Padded({self.path!r}, shape={self.cut.shape}, stored as {self.cut.stored_shape})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not (name in OF_STORAGE or hasattr(jax.Array, name)):
            object.__getattribute__(self, name)  # raises
        return getattr(self.stored if name in OF_STORAGE else self.natural, name)


class _At:
    """`x.at[index]`, with its methods."""

    def __init__(self, leaf: Padded, index: object = None) -> None:
        self.leaf, self.index = leaf, index

    def __getitem__(self, index: object) -> _At:
        return _At(self.leaf, index)

    def __getattr__(self, name: str) -> Callable[..., jax.Array | Padded]:
        leaf = self.leaf

        def edit(*args: object, **kwargs: object) -> jax.Array | Padded:
            new = getattr(leaf.natural.at[self.index], name)(*args, **kwargs)
            if new.shape != leaf.shape:  # from `get`
                return new
            return leaf.replaced(new)

        return edit


def _forward(name: str) -> None:
    def method(self: Padded, *args: object) -> object:
        return getattr(self.natural, name)(*(x.natural if isinstance(x, Padded) else x for x in args))

    method.__name__ = name
    setattr(Padded, name, method)


for _name in (
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "divmod",
    "pow",
    "and",
    "or",
    "xor",
    "lshift",
):
    _forward(f"__{_name}__")
    _forward(f"__r{_name}__")
for (
    _name
) in "rshift rrshift neg pos abs invert eq ne lt le gt ge getitem len iter bool float int index complex".split():
    _forward(f"__{_name}__")


def _from_flax(leaf: Padded, value: Any) -> Padded:
    """Returns a leaf with what Flax read: a natural array, or a stored one, which jzero gave to Flax until 0.2."""
    return leaf.replaced(value) if np.shape(value) == leaf.shape else Padded(value, leaf.path, leaf.cut)


flax_types.register_array(Padded, lambda x: x.natural, _from_flax)


def box(x: T, path: str, shape: tuple[int, ...], cut: Cut | None) -> T | Padded:
    """Returns a leaf as a node if it is not stored in its natural shape; anything else as it is."""
    if cut is None or cut.stored_shape == shape or isinstance(x, InRecords):
        return x
    return Padded(x, path, cut) if getattr(x, "shape", None) == cut.stored_shape else x


def unbox(x: object) -> Any:
    """Returns the stored array of a leaf."""
    return x.stored if isinstance(x, Padded) else x


Leaf: TypeAlias = jax.Array | Padded | InRecords | jax.ShapeDtypeStruct
"""A leaf of a state: an array, a padded one as a node, the place of one in records, or the shape of any of these."""


def is_padded(x: object) -> TypeGuard[Padded]:
    """Whether a node is a padded leaf."""
    return isinstance(x, Padded)
