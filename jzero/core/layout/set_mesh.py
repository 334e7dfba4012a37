"""The mesh that a program has set with `jax.set_mesh`, beside that of a state.

[Note: The mesh that is set]
jax's types name a mesh. While a mesh with Explicit axes is set, which `jax.make_mesh` makes by default, jax refuses to
compute with arrays of any other mesh, and `shard_map` takes no other mesh than the one that is set. A program may set
one for its own code, and jzero's arrays are on their state's mesh. So each call of jzero sets that while it runs, even
if jax is tracing a function around the call: the state's mesh decides. Arrays of the program lose the Explicit axes in
their types on their way in. What the program gets whole (losses, metrics, gathered parameters) is handed out with the
types of its own mesh, so that it can compute with that. A state, and its gradients, keep the state's mesh.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jzero.core.base import compat
from jzero.core.base.types import PyTree
from jzero.core.layout.mesh import AnyMesh, explicit_axes, with_explicit_axes

P = ParamSpec("P")
T = TypeVar("T")


def in_own_mesh(function: Callable[P, T]) -> Callable[P, T]:
    """Makes a function set the mesh of the sharded state among its arguments while it runs."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if jax.sharding.get_abstract_mesh().empty:  # the fast path of each call
            return function(*args, **kwargs)
        own = _only([*args, *kwargs.values()])
        # If nothing says which, no mesh is set; one of Auto axes may stay, since jax lets arrays of such meshes meet.
        if not (is_foreign(compat.NO_MESH) if own is None else _departs(own)):
            return function(*args, **kwargs)
        with compat.mesh_set(own):
            return function(*args, **kwargs)

    return call


def public(function: Callable[P, T]) -> Callable[P, T]:
    """The same for a public function, which hands out what is whole; see [Note: The mesh that is set]."""
    own = in_own_mesh(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return for_program(own(*args, **kwargs))

    return call


def set_if_explicit(mesh: AnyMesh) -> contextlib.AbstractContextManager[None]:
    """Sets the mesh that a model sees if it has Explicit axes, see [Note: Meshes in types], else its kind of device."""
    if explicit_axes(mesh):
        return compat.explicit_mesh_set(mesh)
    return compat.device_set((mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh).abstract_device)


def is_foreign(own: AnyMesh) -> bool:
    """Whether the program has set a mesh under which jax refuses to compute with arrays of a state's mesh."""
    return bool(explicit_axes(jax.sharding.get_abstract_mesh())) and _departs(own)


def _only(values: Iterable[object]) -> AnyMesh | None:
    """Returns the mesh of sharded states and meshes among some values; `None` if there is none, or several."""
    found: set[AnyMesh] = set()
    for value in values:
        if isinstance(value, Mesh | AbstractMesh):
            found.add(with_explicit_axes(value))
        for x in value if isinstance(value, tuple) else (value,):  # a model and its optimizer
            plan: Any = getattr(getattr(x, "tx", x), "plan", None)
            if isinstance(mesh := getattr(plan, "mesh", None), Mesh | AbstractMesh):
                # Records have programs of one device, which jax refuses while a mesh is set.
                found.add(compat.NO_MESH if plan.has_records else mesh)
    return found.pop() if len(found) == 1 else None


def _departs(own: AnyMesh) -> bool:
    """Whether another mesh is set. Inside of a `shard_map`, it is the `shard_map`'s own."""
    current = jax.sharding.get_abstract_mesh()
    abstract = own if isinstance(own, AbstractMesh) else own.abstract_mesh
    return not current.empty and not current.manual_axes and abstract != current


def for_program(tree: T) -> T:
    """Returns a tree with the types of the mesh that the program has set, for arrays that are whole on all devices.

    A state, and what holds one, comes back as it is.
    """
    current = jax.sharding.get_abstract_mesh()
    if not explicit_axes(current) or current.manual_axes or _only([tree]) is not None:
        return tree
    concrete = compat.concrete_mesh()

    def convert(x: PyTree) -> PyTree:
        if not isinstance(x, jax.Array) or jax.typeof(x).sharding.mesh in (current, compat.NO_MESH):
            return x
        whole = PartitionSpec(*[None] * x.ndim)
        if isinstance(x, jax.core.Tracer):
            return jax.sharding.reshard(x, NamedSharding(current, whole))
        if x.is_fully_replicated and x.sharding.device_set == set(concrete.devices.flat):
            return jax.device_put(x, NamedSharding(concrete, whole))
        return x

    return jax.tree.map(convert, tree)


def from_program(tree: T) -> T:
    """Returns a tree without the Explicit axes of other meshes than the one that is set."""

    def convert(x: PyTree) -> PyTree:
        if not is_of_other_mesh(x):
            return x
        current, whole = jax.sharding.get_abstract_mesh(), PartitionSpec(*[None] * x.ndim)
        if isinstance(x, jax.core.Tracer):
            to = with_explicit_axes(jax.typeof(x).sharding.mesh) if current.empty else current
            return jax.sharding.reshard(x, NamedSharding(to, whole))
        sharding = x.sharding
        auto = NamedSharding(with_explicit_axes(sharding.mesh), sharding.spec, memory_kind=sharding.memory_kind)
        return jax.device_put(x, auto)  # the same buffers

    return jax.tree.map(convert, tree)


def is_of_other_mesh(x: PyTree) -> bool:
    """Whether the type of an array has Explicit axes of another mesh than the one that is set."""
    if not isinstance(x, jax.Array):
        return False
    mesh, current = jax.typeof(x).sharding.mesh, jax.sharding.get_abstract_mesh()
    return bool(explicit_axes(mesh)) and mesh != current and not current.manual_axes
