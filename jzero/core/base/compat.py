"""Everything that differs between jax versions or is not part of jax's stable API. Nothing else imports `jax._src`.

jaxpr equations and their parameters are not a stable interface: `scan` names its groups of inputs
differently in jax 0.10 and 0.12, and `ClosedJaxpr` merged into `Jaxpr` in between.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import jax
import numpy as np
from jax._src import (
    api_util,  # nor has what a traced function is called in messages
    callback,  # nor have callbacks that get and return NumPy arrays
    config,  # nor have settings for a while
    core,  # nor has the effect of naming a mesh axis, nor making variables and equations
    distributed,  # nor has the key-value store that processes share
    effects,  # which effects are ordered has no public name
    linear_util,  # nor has the function that is traced to a jaxpr
    sharding_impls,  # nor has setting that, nor the sharding that nobody gave
    source_info_util,  # nor has re-entering an equation's name stack and traceback
)
from jax._src import (
    mesh as mesh_lib,  # nor has the mesh of devices that is set while jax traces
)
from jax._src.interpreters import partial_eval  # nor has taking outputs from a jaxpr
from jax.experimental import compute_on as jax_compute_on
from jax.experimental import hijax
from jax.extend import core as jex_core
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from typing_extensions import TypeIs
from jax.typing import ArrayLike

from jzero.core.base.types import AxisNames, DType, Params

Atom: TypeAlias = Var | Literal
Scopes: TypeAlias = tuple[Any, ...]  # those that a name stack holds
AnyJaxpr: TypeAlias = Jaxpr | ClosedJaxpr
J = TypeVar("J", bound=Jaxpr | ClosedJaxpr)

compute_on: Callable[..., Any] = getattr(jax_compute_on, "compute_on2", jax_compute_on.compute_on)
"""`jax.experimental.compute_on.compute_on`, which jax 0.10 calls `compute_on2`."""

_FLAT_TREE: type | None = getattr(sys.modules.get("jax._src.flattree"), "FlatTree", None)
GROUPS_OF_INPUTS: tuple[type, ...] = () if _FLAT_TREE is None else (_FLAT_TREE,)
"""The type that tells the groups of a loop's inputs in jax 0.12, see `scan_groups`; none in jax 0.10."""

HighPrimitive: type[Any] = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive
"""An operation of `jax.experimental.hijax`, such as `jax.numpy.searchsorted`; jax 0.10 calls it `VJPHiPrimitive`."""

CRASHES_ON_DELETED = jax.__version_info__ < (0, 12)
"""Whether a program of several devices that is called with deleted arrays ends the process instead of raising."""


CRASHES_ON_UNSORTED_AXES = jax.__version_info__ >= (0, 12)
"""Whether lowering ends the process where a `shard_map` over one axis is in one over a later axis of the mesh, and a
further axis is in neither."""


@functools.cache
def starves_steps(mesh: jax.sharding.Mesh) -> bool:
    """Whether programs in flight on the devices of a mesh can wait for each other's threads for ever.

    XLA's client for CPUs runs each device's part of a program in a thread of one pool, and a collective holds its
    thread until all others are there. In jax 0.10 two programs may share the pool such that neither gets all of its
    threads.
    """
    local = len(mesh.local_devices)
    if jax.__version_info__ >= (0, 12) or mesh.devices.flat[0].platform != "cpu" or local == 1:
        return False
    said = os.environ.get("PJRT_NPROC") or str(os.cpu_count() or 1)
    if not re.fullmatch(r"\s*\d{1,9}\s*", said):
        raise ValueError(
            f"The environment variable `PJRT_NPROC` must be a number of threads, such as 32: got {said!r}."
        )
    return max(int(said), local) < 2 * local


NO_MESH = mesh_lib.empty_abstract_mesh
"""The mesh that is set where none is."""


@contextlib.contextmanager
def mesh_set(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None) -> Iterator[None]:
    """Sets a mesh, or none, as `jax.set_mesh` does, which refuses while jax traces."""
    concrete = mesh if isinstance(mesh, jax.sharding.Mesh) else mesh_lib.empty_concrete_mesh
    abstract = mesh if isinstance(mesh, jax.sharding.AbstractMesh) else concrete.abstract_mesh
    with (
        sharding_impls._internal_use_concrete_mesh(concrete),
        abstract_mesh_set(abstract),
    ):
        yield


@contextlib.contextmanager
def abstract_mesh_set(mesh: jax.sharding.AbstractMesh) -> Iterator[None]:
    """Sets an abstract mesh of any size, as `jax.sharding.use_abstract_mesh` does for one as large as the last."""
    with jax.sharding.use_abstract_mesh(NO_MESH), jax.sharding.use_abstract_mesh(mesh):
        yield


@contextlib.contextmanager
def explicit_mesh_set(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Iterator[None]:
    """Sets a mesh of Explicit axes, which types name unless there is one device along them."""
    with mesh_set(mesh), config.remove_size_one_mesh_axis_from_type(True):
        yield


def device_set(device: jax.sharding.AbstractDevice | None) -> contextlib.AbstractContextManager[None]:
    """Sets the kind of the devices for which jax traces, but no mesh: kernels ask what to be made for.

    Without it they ask the devices of this machine.
    """
    is_here = device is None or device.device_kind == jax.devices()[0].device_kind
    if is_here or not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return abstract_mesh_set(jax.sharding.AbstractMesh((), (), abstract_device=device))


def concrete_mesh() -> jax.sharding.Mesh:
    """Returns the mesh of devices that is set, also while jax traces; an empty one if there is none."""
    return mesh_lib.get_concrete_mesh()


DistributedClient: TypeAlias = Any  # defined by jaxlib's extension, which differs between versions


def distributed_client() -> DistributedClient | None:
    """Returns this process's connection to the key-value store that all share; `None` where there is none."""
    return distributed.global_state.client


def type_of(atom: Atom) -> jax.core.ShapedArray:
    """Returns the type of a variable or literal, which is an array's."""
    return atom.aval  # type: ignore[return-value]


def result_types(
    primitive: Primitive, types: Sequence[core.AbstractValue], params: Params
) -> Sequence[core.AbstractValue]:
    """Returns the types of an operation's results, given those of its operands."""
    if "call_jaxpr" in params:  # functions with a derivative of their own have no rule for types
        return open_jaxpr(params["call_jaxpr"])[0].out_avals
    results, _ = primitive.abstract_eval(*types, **params)
    return cast("Sequence[core.AbstractValue]", results if primitive.multiple_results else [results])


def is_literal(atom: Atom) -> TypeIs[Literal]:
    """Whether an operand of an equation is a literal."""
    return isinstance(atom, jex_core.Literal)


def value_of(literal: Literal) -> Any:
    """Returns the value of a literal, which has a dtype, without the mesh that it was traced under."""
    value = np.bool_(literal.val) if isinstance(literal.val, bool) else literal.val  # jax gives numbers a dtype
    if isinstance(value, jax.Array) and isinstance(value.sharding, NamedSharding):
        value = np.asarray(value)
    return value.view() if isinstance(value, np.ndarray) else value


def open_jaxpr(jaxpr: AnyJaxpr) -> tuple[Jaxpr, Sequence[Any]]:
    """Returns `(jaxpr, consts)` of an open or closed jaxpr."""
    closed: Any = jaxpr  # in jax 0.12 there is one class
    return (closed.jaxpr, closed.consts) if hasattr(jaxpr, "consts") else (closed, ())


def with_outputs(jaxpr: J, used: Sequence[bool]) -> J:
    """Returns a jaxpr of the same inputs with some of its outputs, without what only the others need."""
    opened, _ = open_jaxpr(jaxpr)
    part, _ = partial_eval.dce_jaxpr(opened, list(used), instantiate=True)
    return cast("J", part if opened is jaxpr else jaxpr.replace(jaxpr=part))


def contained_jaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """Returns the jaxprs among an equation's parameters, opened; none of a kernel, which is one operation."""
    if eqn.primitive.name == "pallas_call":
        return iter(())
    return iter([open_jaxpr(x)[0] for x in _jaxprs_in(eqn)])


def _jaxprs_in(eqn: JaxprEqn) -> list[AnyJaxpr]:
    """Returns what `jax.extend.core.jaxprs_in_params` does, in a tenth of the calls."""
    found: list[AnyJaxpr] = []
    for value in eqn.params.values():
        for x in value if type(value) is tuple else (value,):
            if type(x) is Jaxpr or type(x) is ClosedJaxpr:
                found.append(x)
    return found


def shape_struct_of(kind: core.AbstractValue) -> jax.ShapeDtypeStruct:
    """Returns a type without its mesh, unless that is set, with Explicit axes; varying axes need the current one."""
    assert isinstance(kind, core.ShapedArray)
    of_mesh: dict[str, Any] = {}
    current = jax.sharding.get_abstract_mesh()
    if current._any_axis_explicit and kind.sharding.mesh == current:
        of_mesh = {"sharding": kind.sharding}
    elif kind.manual_axis_type.varying:
        sharding = NamedSharding(current, PartitionSpec())
        of_mesh = {"sharding": sharding, "manual_axis_type": kind.manual_axis_type}
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type, **of_mesh)


def escaped_values(jaxpr: AnyJaxpr, live: Sequence[object] | None = None) -> Iterator[tuple[jax.Array, str]]:
    """Yields the constants of a jaxpr that are values of a trace, unless that goes on around this call.

    Of the jaxprs inside, it yields all constants that are values of a trace, since none can be lowered. Each comes with
    the line in the user's code that uses it, as text; empty if there is none.
    """
    if live is None:
        live = [core.trace_ctx.trace]
        while (parent := getattr(live[-1], "parent_trace", None)) is not None:
            live.append(parent)
    opened, consts = open_jaxpr(jaxpr)
    for var, x in zip(opened.constvars, consts, strict=True):
        if isinstance(x, jax.core.Tracer) and not any(x._trace is trace for trace in live):
            uses = [eqn for eqn in opened.eqns if any(v is var for v in eqn.invars)]
            yield x, line_of(uses[0]) if uses else ""
    for eqn in opened.eqns:
        for inner in _jaxprs_in(eqn):
            yield from escaped_values(inner, live=())


def line_of(eqn: JaxprEqn) -> str:
    """Returns the line in the user's code that made an equation, as text."""
    return source_info_util.summarize(eqn.source_info)


def ordered_effects(jaxpr: AnyJaxpr) -> list[str]:
    """Returns the names of the ordered effects of a jaxpr, such as an ordered `io_callback`."""
    return sorted(str(e) for e in open_jaxpr(jaxpr)[0].effects if effects.ordered_effects.contains(e))


def uses_references(jaxpr: AnyJaxpr) -> bool:
    """Whether a jaxpr reads or writes references (`jax.new_ref`) that were made outside of it."""
    return any(isinstance(effect, effects.JaxprInputEffect) for effect in open_jaxpr(jaxpr)[0].effects)


def pipelined_gathers() -> dict[str, bool | str]:
    """Returns the option that makes XLA for GPUs gather for the next pass of a loop in the one before."""
    if jax.__version_info__ < (0, 12):
        return {"xla_gpu_enable_pipelined_all_gather": True}
    return {"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON"}


def has_side_effects(eqn: JaxprEqn) -> bool:
    """Whether an equation does more than return its outputs. Naming a mesh axis, which jax calls an effect, is not."""
    return any(not isinstance(effect, core.NamedAxisEffect) for effect in eqn.effects)


def can_be_recomputed(eqn: JaxprEqn) -> bool:
    """Whether an operation has the derivative that `jax.checkpoint` asks for: one of `hijax` may have another one."""
    high = [type(x) for x in eqn.params.values() if isinstance(x, HighPrimitive)]
    return all(kind.jvp is not HighPrimitive.jvp for kind in high)


def scan_groups(eqn: JaxprEqn) -> tuple[int, int]:
    """Returns the number of constants and of carried values of a `scan` equation."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def shard_map_axes(eqn: JaxprEqn) -> frozenset[str]:
    """Returns the axes that a `shard_map` equation makes manual."""
    params = eqn.params
    return frozenset(params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"])


def names_of(eqn: JaxprEqn) -> Scopes:
    """Returns the scopes that an equation was traced in, the outermost first."""
    return tuple(eqn.source_info.name_stack.stack)


def is_transposed(eqn: JaxprEqn) -> bool:
    """Whether an equation is one of a backward pass, as far as its scopes say."""
    return any(getattr(scope, "name", None) == "transpose" for scope in names_of(eqn))


def changed(eqn: JaxprEqn, *, inputs: Sequence[Atom], names: Scopes) -> JaxprEqn:
    """Returns an equation with other variables or literals as inputs, in other scopes."""
    name_stack = source_info_util.NameStack(names)
    return eqn.replace(invars=list(inputs), source_info=eqn.source_info.replace(name_stack=name_stack))


@contextlib.contextmanager
def in_names(names: Scopes) -> Iterator[None]:
    """Enters scopes that `names_of` returned."""
    stack = source_info_util.current_name_stack() + source_info_util.NameStack(names)
    with source_info_util.set_name_stack(stack):
        yield


@contextlib.contextmanager
def equation_context(eqn: JaxprEqn) -> Iterator[None]:
    """Re-enters the name stack, the traceback and the settings that an equation was traced under.

    The mesh of the surrounding `shard_map` stays current: the equation was traced outside of it. Not so one with
    Explicit axes, since within `jax.sharding.auto_axes` these are Auto.
    """
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    mesh = jax.sharding.get_abstract_mesh()
    mesh = eqn.ctx.cur_abstract_mesh if mesh._any_axis_explicit else mesh
    with (
        source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack),
        eqn.ctx.manager,
        abstract_mesh_set(mesh),
    ):
        yield


def where_traced(eqn: JaxprEqn) -> contextlib.AbstractContextManager[object]:
    """Enters the settings that an equation was traced under, its mesh included."""
    return eqn.ctx.manager


def has_mesh(atom: Atom) -> bool:
    """Whether the type of a variable or literal of a jaxpr names a mesh."""
    sharding = getattr(atom.aval, "sharding", None)
    return sharding is not None and not sharding.mesh.empty


def type_to_compare(kind: Any) -> Any:
    """Returns a type that names no kind of device, see `device_set`."""
    sharding = getattr(kind, "sharding", None)
    if sharding is None or not sharding.mesh.empty or sharding.mesh is NO_MESH:
        return kind
    if hasattr(kind, "inner_aval"):
        return kind.update(inner_aval=type_to_compare(kind.inner_aval))
    return kind.update(sharding=NamedSharding(NO_MESH, sharding.spec))


def bind(eqn: JaxprEqn, inputs: Sequence[ArrayLike], **changed_params: object) -> list[jax.Array]:
    """Applies an equation's primitive to new inputs and returns its outputs as a list.

    The sharding that some equations hold for their output's type names the mesh that they were traced in. Unless that
    is set, with Explicit axes, it is left out; what the user said (`out_sharding`) becomes a constraint over the axes
    that are not manual.
    """
    own, said, mesh = eqn.params, None, jax.sharding.get_abstract_mesh()
    if eqn.primitive.name not in ("sharding_constraint", "reshard") and not mesh._any_axis_explicit:
        said = sharding_said(eqn)
        own = {name: None if isinstance(x, NamedSharding) else x for name, x in own.items()}
        if eqn.primitive.name == "pallas_call" and eqn.ctx.cur_abstract_mesh != mesh:
            own = _here(eqn.params)
    params = eqn.primitive.get_bind_params({**own, **changed_params})
    if isinstance(params, tuple):  # the form that jax documents: functions first
        functions, params = params
        outputs = eqn.primitive.bind(*functions, *inputs, **params)
    else:
        outputs = eqn.primitive.bind(*inputs, **params)
    outputs = list(outputs) if eqn.primitive.multiple_results else [outputs]
    spec = None if said is None else free_spec(said.spec)
    return outputs if spec is None else [jax.lax.with_sharding_constraint(x, spec) for x in outputs]


def free_spec(spec: PartitionSpec) -> PartitionSpec | None:
    """Returns a spec over the axes that are not manual here; `None` if no such axis has a second device."""
    mesh = jax.sharding.get_abstract_mesh()
    free = [name for name in mesh.axis_names if name not in mesh.manual_axes]
    return with_axes(spec, free) if any(mesh.shape[name] > 1 for name in free) else None


def with_axes(spec: PartitionSpec, names: Collection[str]) -> PartitionSpec:
    """Returns a spec with these axes alone."""

    def entry(said: AxisNames) -> AxisNames:
        kept = tuple(n for n in (said if isinstance(said, tuple) else (said,)) if n is not None and n in names)
        return None if not kept else kept if isinstance(said, tuple) else kept[0]

    return PartitionSpec(*(entry(said) for said in spec))


def sharding_said(eqn: JaxprEqn) -> NamedSharding | None:
    """Returns the sharding that the user gave for the result of an equation: a constraint, or one of Explicit axes."""
    names = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}
    sharding = eqn.params.get(names.get(eqn.primitive.name, "out_sharding"))
    if not isinstance(sharding, NamedSharding):
        return None
    return sharding if eqn.primitive.name == "sharding_constraint" or sharding.mesh._any_axis_explicit else None


def is_placeholder(x: object) -> bool:
    """Whether `x` stands for a leaf of a tree that jax makes only to say how two structures differ."""
    return type(type(x)).__name__ == "LeafMeta"


def when_added(x: jax.Array, then: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Returns a copy of a traced value for which `y + x` returns `then(y + x)`.

    The sum happens in code of the user or of Flax (`params + updates`), where jzero has no other say: an object that is
    no tracer would be converted to an array before the addition, and a constraint on `x` does not bind the sum. Python
    asks the right operand first where its class is derived from the left one's and has an `__radd__` of its own, so the
    class of this copy is one. Each copy has its own, since a tracer has no room for another attribute, such as `then`.
    """
    kind = type(x)

    def radd(self: jax.Array, other: ArrayLike) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):  # whatever the user set for arithmetic
            total = kind.__radd__(self, other)
        return total if total is NotImplemented else then(total)

    added = copy.copy(x)
    added.__class__ = type(kind.__name__, (kind,), {"__slots__": (), "__radd__": radd})
    return added


IrValue: TypeAlias = "mlir.ir.Value[Any]"
IrResults: TypeAlias = "Sequence[IrValue | Sequence[IrValue]]"


def emit_callback(ctx: Any, fn: Callable[[np.ndarray], np.ndarray], x: IrValue) -> IrResults:
    """Lowers a call of a Python function with the NumPy array of each device, in a rule of a primitive."""
    results, _, _ = callback.emit_python_callback(
        ctx,
        lambda x: (fn(x),),
        None,
        [x],
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=True,
        sharding=callback._callback_op_sharding(ctx.module_context.axis_context, None, ctx.avals_out),
    )
    return results


def names_backend(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether a program is lowered for devices of this process, rather than compile-only ones."""
    try:
        ctx.module_context.get_backend()
    except RuntimeError:
        return False
    return True


UNSPECIFIED = sharding_impls.UNSPECIFIED
"""The sharding of a result about which a call says nothing."""


def _here(x: Any) -> Any:
    """Returns what a kernel is made of as if it had been traced here: its types and settings name the mesh."""
    if isinstance(x, tuple) and type(x) is tuple:
        return tuple(map(_here, x))
    if isinstance(x, dict):
        return {name: _here(y) for name, y in x.items()}
    if isinstance(x, NamedSharding):
        return None
    if isinstance(x, core.ShapedArray):
        here = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(*[None] * len(x.shape)))
        return core.ShapedArray(x.shape, x.dtype, x.weak_type, sharding=here, memory_space=x.memory_space)
    if hasattr(x, "inner_aval"):
        return x.update(inner_aval=_here(x.inner_aval))
    if type(x) is ClosedJaxpr and not isinstance(x, Jaxpr):
        return x.replace(jaxpr=_here(x.jaxpr))
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        fields = {f.name: _here(getattr(x, f.name)) for f in dataclasses.fields(x) if f.init}
        return dataclasses.replace(x, **fields)
    return _jaxpr_here(x) if type(x) is Jaxpr else x


def _jaxpr_here(jaxpr: Jaxpr) -> Jaxpr:
    variables: dict[Var, Var] = {}

    def change(atom: Atom) -> Atom:
        if is_literal(atom):
            return literal(value_of(atom), _here(atom.aval))
        return variables.setdefault(atom, variable(_here(atom.aval)))

    eqns = [
        core.new_jaxpr_eqn(
            list(map(change, eqn.invars)),
            list(map(change, eqn.outvars)),
            eqn.primitive,
            _here(eqn.params),
            eqn.effects,
            eqn.source_info,
        )
        for eqn in jaxpr.eqns
    ]
    variables_of = {name: list(map(change, getattr(jaxpr, name))) for name in ("constvars", "invars", "outvars")}
    return jaxpr.replace(eqns=eqns, **variables_of)


# Jaxprs under construction, for `jzero.core.jaxpr.edit`.


def variable(aval: core.AbstractValue) -> Var:
    """Returns a new variable of a type."""
    return core.Var(aval)


def array_type(
    shape: Sequence[int], dtype: DType, memory: core.MemorySpace = jax.memory.Space.Device
) -> core.ShapedArray:
    """Returns the type of an array."""
    canonical = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
    return core.ShapedArray(tuple(shape), canonical, memory_space=memory)


def new_equation(
    primitive: Primitive, inputs: Sequence[Atom], outputs: Sequence[Var], params: Params, scope: JaxprEqn | None
) -> JaxprEqn:
    """Returns an equation, in the scopes and settings of another one."""
    info, ctx = (None, None) if scope is None else (scope.source_info, scope.ctx)
    return core.new_jaxpr_eqn(list(inputs), list(outputs), primitive, params, core.no_effects, info, ctx)


def traced(
    fn: Callable[..., Any], avals: Sequence[core.AbstractValue], axis_env: Sequence[tuple[str, int]] = ()
) -> tuple[Jaxpr, list[Any]]:
    """Returns the open jaxpr, and the constants, of a function of arrays of exactly these types.

    It may name the axes of `axis_env`.
    """

    def flat(*xs: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(fn(*xs))

    debug = api_util.debug_info("jzero", flat, (), {})
    with core.extend_axis_env_nd(axis_env):
        jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(
            linear_util.wrap_init(flat, debug_info=debug), list(avals)
        )
    return jaxpr, list(consts)


def literal(value: ArrayLike, aval: core.AbstractValue) -> Literal:
    """Returns a literal of a type."""
    return core.Literal(value, aval)


def moved(eqn: JaxprEqn, inputs: Sequence[Atom], outputs: Sequence[Var], scope: JaxprEqn | None) -> JaxprEqn:
    """Returns an equation with other inputs and outputs, in the scopes of another one."""
    info = eqn.source_info
    if scope is not None:
        info = scope.source_info.replace(name_stack=scope.source_info.name_stack + info.name_stack)
    return eqn.replace(invars=list(inputs), outvars=list(outputs), source_info=info)


def with_equations(like: J, inputs: Sequence[Var], outputs: Sequence[Atom], eqns: Sequence[JaxprEqn]) -> J:
    """Returns a jaxpr of other equations, inputs and outputs; all else is `like`'s, also what jax adds in future."""
    opened, _ = open_jaxpr(like)
    new_effects = partial_eval.make_jaxpr_effects(opened.constvars, inputs, outputs, eqns)
    new = opened.replace(invars=list(inputs), outvars=list(outputs), eqns=list(eqns), effects=new_effects)
    return cast("J", new if opened is like else like.replace(jaxpr=new))


def source_of(eqn: JaxprEqn) -> str:
    """Returns the line that made an equation, e.g. `train.py:12 (loss_fn)`, outside of installed packages if possible.

    It is empty inside of functions that jax has jitted.
    """
    frames = list(source_info_util.user_frames(eqn.source_info.traceback))
    own = [frame for frame in frames if "site-packages" not in frame.file_name] or frames
    return f"{own[0].file_name}:{own[0].start_line} ({own[0].function_name})" if own else ""
