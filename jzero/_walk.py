"""The walk: evaluates the jaxpr of a loss with lazy parameters, each made whole where it is used.

[Note: Gathering again in the backward pass]
Left alone, differentiation keeps every gathered parameter that the backward pass will want, and stage 3
would hold the whole model. With `regather`, an equation that uses a lazy parameter becomes a function
with a gradient of its own, which keeps the *shard*, gathers again and applies the equation's own gradient
rule. Nothing else is recomputed and no other residual changes. Outside loops a barrier with the incoming gradient
keeps the compiler from merging the second gather with the first. A loop body needs no such fence: it is its own
program. Equations that hold jaxprs which cannot be walked (`cond`, `while`, `custom_vjp` …) get `jax.checkpoint` with a
policy that refuses gathers alone. Inside a `remat`, of the loss or of `make_train_step`, plain gathers are used: the
body is evaluated again anyway, and its policy is asked about everything but gathers and changes of layout.

[Note: Branches and loops]
Devices may take different branches of a `cond`, or different numbers of turns of a `while`; a collective inside
would hang. Parameters are made whole before such an equation.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jzero import _compat
from jzero._ahead import chosen_ahead, scan_ahead
from jzero._blocks import parts_of
from jzero._lazy import Bundle, Lazy, constrained, defer, is_free, is_lazy, make_whole, on_shard
from jzero._own_derivatives import with_own_derivative
from jzero._regions import Fence, regathered, settled
from jzero._remat import REMAT, recomputes
from jzero._sharing import Common, Structures
from jzero._uses import Blocks, Uses

__all__ = ["Walk", "grouped", "is_sliceable", "only_indexed"]

Equation = Any
Jaxpr = Any

LAYOUT_ONLY = frozenset(
    "all_gather convert_element_type reshape transpose squeeze broadcast_in_dim slice expand_dims pvary pcast".split()
)
"""Operations whose results a user's remat policy is not asked about: gathers, and what changes layout or type alone,
which is how a gathered parameter would slip through. They are done again, on activations too: they cost little."""

FEWEST = 16
"""Equations of a layer that is traced once for all that do the same; of fewer a call takes as long."""


class Meshes(NamedTuple):
    """What equations say about meshes.

    Attributes:
      named: One names axes, in a constraint or a `shard_map`: all around it has to be walked.
      carried: One has a mesh in a type, or asks for that in which it was traced: all around it is walked if it can be,
        see [Note: Meshes in types].
    """

    named: bool
    carried: bool


NO_MESHES = Meshes(named=False, carried=False)


@dataclasses.dataclass(frozen=True)
class Walk:
    """How to walk; a static value.

    Attributes:
      axes: The mesh axes that are manual: ZeRO's and the replicas'.
      regather: Whether gathered parameters are dropped after use and gathered again for the backward
        pass, see [Note: Gathering again in the backward pass].
      in_loop: Whether this is the body of a loop.
      sealing: Whether this is inside of a `jax.checkpoint` of jzero's own, which must not undo those of the loss.
      fence: How a second gather outside of loops is kept apart, see [Note: Light fences].
      prefetch_bytes: The most that is gathered ahead, see [Note: Gathering one layer ahead] and [Note: Gathering ahead
        outside of loops]; `None`: it is left to the compiler.
      pipelines: Whether loops gather ahead though it is left to the compiler: that for GPUs does not do it.
      waits: Whether the backward pass of a loop, or of a recomputed block that gathers nothing again, begins when what
        comes after it has reduced its gradients, see [Note: Holding gathers back].
      loops_ahead: Whether loops may do so: a policy of the loss around them would be asked about what they carry.
      shares: Whether layers that do the same are looked for, see [Note: Repeated blocks].
      uses: What has used parameters in the current sequence of equations, if that is bounded.
      blocks: The recomputed blocks of that sequence, see [Note: Holding gathers back].
      cache: What has been found out about the jaxprs of this trace; lives as long as the trace.
    """

    axes: frozenset[str]
    regather: bool
    in_loop: bool = False
    sealing: bool = False
    fence: Fence = "whole"
    prefetch_bytes: int | None = None
    pipelines: bool = False
    waits: bool = False
    loops_ahead: bool = True
    shares: bool = True
    uses: Uses | None = dataclasses.field(default=None, compare=False, repr=False)
    blocks: Blocks | None = dataclasses.field(default=None, compare=False, repr=False)
    cache: dict[Any, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def __call__(self, jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
        """Evaluates `jaxpr`; inputs and outputs are arrays or lazy values."""
        uses = None if self.prefetch_bytes is None or self.in_loop else Uses(self.prefetch_bytes)
        blocks = None if self.in_loop or self.fence == "light" else Blocks(self.prefetch_bytes or 0)
        walk = dataclasses.replace(self, uses=uses, blocks=blocks)
        if uses is not None:
            return uses.end(_compat.evaluate(jaxpr, inputs, walk._apply))
        if self.shares and len(_compat.open_jaxpr(jaxpr)[0].eqns) >= 2 * FEWEST:
            return walk._in_parts(jaxpr, inputs)
        return _compat.evaluate(jaxpr, inputs, walk._apply)

    def _in_parts(self, jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
        """Evaluates a jaxpr whose layers, where they do the same, become calls of one function."""
        jaxpr, consts = _compat.open_jaxpr(jaxpr)
        parts = parts_of(jaxpr)
        layers = {i: Common.of(x) for i, x in enumerate(parts) if x.is_block and _is_shared(x.eqns)}
        numbers = {i: self._structure(x) for i, x in layers.items()}
        times = collections.Counter(numbers.values())
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
        for i, part in enumerate(parts):
            values = [env[v] for v in part.invars]
            if i in layers and times[numbers[i]] > 1:
                outputs = self._layer(layers[i], values)
            else:
                outputs = _compat.evaluate(part, values, self._apply)
            env |= zip(part.outvars, outputs, strict=True)
        return [_compat.value_of(v) if _compat.is_literal(v) else env[v] for v in jaxpr.outvars]

    def _layer(self, common: Common, inputs: list[Any]) -> list[Any]:
        inner = dataclasses.replace(self, shares=False, uses=None, blocks=None)
        key = ("layer", inner, self._structure(common))
        if key not in self.cache:

            def layer(inputs: Bundle) -> Bundle:
                return Bundle.of(inner(common, inputs.values()))

            self.cache[key] = jax.jit(layer)
        with _compat.in_names(common.names):
            return self._call(self.cache[key], [*inputs, *common.numbers])

    def _call(self, fn: Callable[[Bundle], Bundle], inputs: list[Any]) -> list[Any]:
        """Calls a function of lazy values in which nothing waits for what is outside."""
        if self.blocks is not None:
            inputs = self.blocks.waited_for(inputs, free=not self.regather)
        return fn(Bundle.of(inputs)).values()

    def _structure(self, common: Common) -> int:
        """Returns the number that all have in this trace that do the same."""
        return int(self.cache.setdefault(Structures, Structures())(common))

    def _apply(self, eqn: Equation, inputs: list[Any]) -> list[Any]:
        lazy = any(map(is_lazy, inputs))
        if eqn.primitive.name == "sharding_constraint":
            return [self._constrain(inputs[0], eqn.params["sharding"])]
        if eqn.primitive.name == "reshard":  # jax puts it where a mesh is set; no axis has to be named that way
            return [inputs[0]]
        if lazy:
            kept = on_shard(eqn, inputs) or defer(eqn, inputs)
            if kept is not None:
                return [kept]
        if self.uses is None or all(is_free(x) for x in inputs):
            return self._evaluate(eqn, inputs)
        # A scan gathers in its turns, and bounds that itself.
        is_scan = eqn.primitive.name == "scan"
        waiting = self.uses.add([] if is_scan else inputs)
        outputs = self._evaluate(eqn, inputs if is_scan else waiting)
        self.uses.finish(outputs)
        return outputs

    def _evaluate(self, eqn: Equation, inputs: list[Any]) -> list[Any]:
        """Applies an equation that needs its inputs whole, or looks into them itself."""
        lazy, meshes = any(map(is_lazy, inputs)), self._meshes_in(eqn)
        is_of_mesh = meshes.carried or _names_mesh(eqn)
        if lazy or is_of_mesh or (self.sealing and recomputes(eqn)):
            rule = _RULES.get(eqn.primitive.name)
            if rule is not None:
                return rule(self, eqn, inputs)
        if meshes.named:
            raise ValueError(
                f"The loss holds a sharding constraint or `shard_map` inside a `{eqn.primitive.name}`, which jzero "
                "cannot look into. Move it out of that function."
            )
        if not lazy:
            return _compat.bind(eqn, inputs)
        return self._use(functools.partial(_compat.bind, eqn), inputs, opaque=_is_opaque(eqn))

    def _use(self, fn: Callable[[list[Any]], list[Any]], inputs: list[Any], *, opaque: bool) -> list[Any]:
        """Calls `fn` on whole values."""
        bundle = Bundle.of(inputs)
        leaves, bundled = list(bundle.leaves), bundle.of_leaves()

        def call(leaves: list[Any]) -> list[Any]:
            return fn(bundled(leaves).whole())

        if not self.regather or all(is_free(x) for x in leaves):
            if self.blocks is not None and not self.regather:
                leaves = self.blocks.waited_for(leaves, free=True)
            return call(leaves)
        if opaque:
            return list(self._checkpointed(call)(leaves))
        fence = None if self.in_loop else self.fence
        return regathered(call, leaves, fence=fence, uses=self.uses, blocks=self.blocks)

    def _checkpointed(self, fn: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], Any]:
        """`fn` with everything kept for the backward pass but gathered parameters."""
        policy = self._without_gathers(lambda *_, **__: True)
        return jax.checkpoint(fn, prevent_cse=not self.in_loop, policy=policy)

    def _without_gathers(self, policy: Callable[..., Any]) -> Callable[..., Any]:
        """`policy`, not asked about ZeRO's gathers and what only changes their layout: these are done again."""
        axes = self.axes  # jax keeps policies, and the walk holds what is traced

        def refusing(primitive: Any, *args: Any, **params: Any) -> Any:
            if primitive.name in LAYOUT_ONLY and axes.issuperset(params.get("axis_name", ())):
                return False
            return policy(primitive, *args, **params)

        return refusing

    # Equations that hold jaxprs.

    def _jit(self, eqn: Equation, inputs: list[Any]) -> list[Any]:
        """A call stays a call: one function per jaxpr, which `jax.jit` caches by the layout of its inputs."""
        jaxpr = eqn.params["jaxpr"]
        inner = dataclasses.replace(self, uses=None, blocks=None)
        key = ("jit", inner, id(jaxpr), eqn.params["in_shardings"], eqn.params["out_shardings"])
        if key not in self.cache:

            def call(inputs: Bundle) -> Bundle:
                constrained = map(inner._constrain, inputs.values(), eqn.params["in_shardings"])
                outputs = inner(jaxpr, list(constrained))
                return Bundle.of(list(map(inner._constrain, outputs, eqn.params["out_shardings"])))

            call.__name__ = eqn.params.get("name", "jit")
            self.cache[key] = jax.jit(call)
        return self._call(self.cache[key], inputs)

    def _remat(self, eqn: Equation, inputs: list[Any]) -> list[Any]:
        policy = self._without_gathers(eqn.params["policy"]) if eqn.params["policy"] is not None else None
        given = eqn.params["prevent_cse"]
        prevent_cse = given if isinstance(given, bool) else any(given)
        inner = dataclasses.replace(
            self, regather=False, sealing=False, loops_ahead=policy is None, shares=False, uses=None, blocks=None
        )
        common = Common.of(_compat.open_jaxpr(eqn.params["jaxpr"])[0])
        bundle = Bundle.of([*inputs, *common.numbers])
        key = ("remat", inner, self._structure(common), prevent_cse, id(eqn.params["policy"]))
        if key not in self.cache:

            def block(inputs: Bundle) -> list[Any]:
                # Outputs must be whole: a lazy one would carry the shard past the checkpoint.
                return [make_whole(y) for y in inner(common, inputs.values())]

            checkpointed = jax.checkpoint(block, prevent_cse=prevent_cse, policy=policy)
            self.cache[key] = checkpointed if self.in_loop else jax.jit(checkpointed)
        recomputed, leaves, bundled = self.cache[key], list(bundle.leaves), bundle.of_leaves()

        def body(leaves: list[Any]) -> list[Any]:
            return list(recomputed(bundled(leaves)))

        with _compat.in_names(common.names):
            if self.regather and not self.in_loop and not all(map(is_free, leaves)):
                return settled(body, leaves, held=True, uses=self.uses, blocks=self.blocks)
            if self.sealing:
                return settled(body, leaves)
            if self.blocks is None or self.regather or not self.waits:
                return body(leaves)
            return self.blocks.add_late(body(self.blocks.waited_for(leaves, free=True)))

    def _scan(self, eqn: Equation, inputs: list[Any]) -> list[Any]:
        num_consts, num_carry = _compat.scan_groups(eqn)
        jaxpr, _ = _compat.open_jaxpr(eqn.params["jaxpr"])
        consts, init, xs = grouped(inputs, num_consts, num_carry)
        xs = [_sliceable(x) for x in xs]
        const_vars, carry_vars, _ = grouped(jaxpr.invars, num_consts, num_carry)
        # Carried values that the body hands on unchanged are constants of the loop.
        fixed = [is_lazy(x) and v is o for x, v, o in zip(init, carry_vars, jaxpr.outvars, strict=False)]
        lazily = [is_lazy(x) and only_indexed(jaxpr, v) for x, v in zip(consts, const_vars, strict=True)]
        outside = Bundle.of([None if lazy else x for x, lazy in zip(consts, lazily, strict=True)] + init)
        hoisted, bundled = list(outside.leaves), outside.of_leaves()
        regathers = self.regather and not all(is_free(x) for x in hoisted)
        inner = dataclasses.replace(
            self, in_loop=True, sealing=self.sealing or regathers, shares=False, uses=None, blocks=None
        )

        ahead = self._ahead(eqn, xs, num_consts + num_carry)
        if ahead and regathers:
            ahead = {}
            if self.prefetch_bytes:
                warnings.warn(
                    "A scan in the loss uses a partitioned parameter of the outside whole in each turn, and is "
                    "recomputed with its gather. `prefetch_bytes` has no effect on it. Scan the parameter, too, or "
                    "keep it whole: `ZeroConfig(rules={'path/of/the/parameter': LeafRule(persistent=True)})`.",
                    stacklevel=2,
                )

        def loop(leaves: list[Any]) -> list[Any]:
            """The loop, given what the constants and carried values are made of that are gathered before it."""
            before = bundled(leaves).whole()
            constants = [x if lazy else w for x, w, lazy in zip(consts, before[:num_consts], lazily, strict=True)]
            carry0 = before[num_consts:]

            def body(closed: Any, carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
                constants, unchanged = closed
                carried = [unchanged.get(i, c) for i, c in enumerate(carry)]
                sliced = [y.land() if isinstance(y, Lazy) else y for y in row]
                outputs = [make_whole(y) for y in inner(eqn.params["jaxpr"], [*constants, *carried, *sliced])]
                new = [c if f else o for c, o, f in zip(carry, outputs[:num_carry], fixed, strict=True)]
                return new, outputs[num_carry:]

            closed = (constants, {i: w for i, (w, f) in enumerate(zip(carry0, fixed, strict=True)) if f})
            start = [jnp.zeros(()) if f else c for c, f in zip(carry0, fixed, strict=True)]
            options = {k: eqn.params[k] for k in ("length", "reverse", "unroll")}
            if ahead:
                end, ys = scan_ahead(body, closed, start, xs, ahead, **options)
            else:
                end, ys = lax.scan(lambda c, x: body(closed, c, _first_dropped(x)), start, xs, **options)
            return [*(w if f else c for c, w, f in zip(end, carry0, fixed, strict=True)), *ys]

        results = list(self._checkpointed(loop)(hoisted) if regathers else loop(hoisted))
        if self.blocks is None or not self.waits:
            return results
        return self.blocks.add_loop(results, num_carry)

    def _ahead(self, eqn: Equation, xs: list[Any], first: int) -> dict[int, Lazy]:
        """What of the scanned values is gathered one turn ahead. A `jax.checkpoint` around would undo it."""
        is_undone = self.sealing or not self.loops_ahead
        is_asked = self.pipelines and not is_undone if self.prefetch_bytes is None else self.prefetch_bytes > 0
        if not is_asked or eqn.params["length"] < 2:
            return {}
        jaxpr, _ = _compat.open_jaxpr(eqn.params["jaxpr"])
        found = chosen_ahead(jaxpr, jaxpr.invars[first:], xs, self.prefetch_bytes, eqn.params["length"])
        if not found or not is_undone:
            return found
        where, instead = "a loop that is computed again with its gathers", "Move it out."
        if not self.sealing:
            where = "a `jax.checkpoint` with a policy, which would be asked about what the scan carries"
            instead = (
                "Checkpoint the layer that is scanned, not the scan, or leave the policy out; jzero itself puts one "
                "around outer scans unless told `remat='as_written'`."
            )
        warnings.warn(
            f"A scan in the loss stands inside of {where}: `prefetch_bytes` has no effect on it. {instead}",
            stacklevel=2,
        )
        return {}

    def _cond(self, eqn: Equation, inputs: list[Any]) -> list[Any]:
        if eqn.params.get("branches_platforms"):  # each is for some platforms, and may not work on others
            return self._retraced(eqn, inputs)

        def switch(xs: list[Any]) -> list[Any]:
            index, *operands = xs
            walk = dataclasses.replace(self, sealing=self.sealing or self.regather)
            branches = [functools.partial(walk._branch, branch) for branch in eqn.params["branches"]]
            return lax.switch(index, branches, *operands)

        return self._use(switch, inputs, opaque=True)

    def _branch(self, jaxpr: Any, *operands: Any) -> list[Any]:
        return [make_whole(y) for y in self(jaxpr, operands)]

    def _with_own_derivative(self, eqn: Equation, inputs: list[Any]) -> list[Any]:
        if not self._meshes_in(eqn).carried:
            return self._use(functools.partial(_compat.bind, eqn), inputs, opaque=True)

        # What it recomputes is not sealed: tangents could not be transposed through that.
        walk = dataclasses.replace(self, sealing=False)

        def evaluate(jaxpr: Any, xs: Sequence[Any]) -> list[Any]:
            # Made anew: the cache knows jaxprs by their identity, so this one has to live as long.
            self.cache["kept", id(jaxpr)] = jaxpr
            return walk._branch(jaxpr, *xs)

        fn = with_own_derivative(eqn, evaluate)
        return self._use(lambda xs: fn(*xs), inputs, opaque=True)

    def _retraced(self, eqn: Equation, inputs: list[Any]) -> list[Any]:
        """An equation whose jaxprs only jax can put together: they are traced anew, on the mesh of the step."""
        if not self._meshes_in(eqn).carried:
            return self._use(functools.partial(_compat.bind, eqn), inputs, opaque=True)
        walk = dataclasses.replace(self, sealing=False)

        def bind(xs: list[Any]) -> list[Any]:
            anew = _compat.jaxprs_retraced(eqn, lambda jaxpr: functools.partial(walk._branch, jaxpr))
            return _compat.bind(eqn, xs, **anew)

        return self._use(bind, inputs, opaque=True)

    # What names the mesh.

    def is_of_mesh(self, jaxpr: Any) -> bool:
        """Whether a jaxpr names a mesh, has one in a type, or asks for that in which it was traced."""
        return self._meshes_of(_compat.open_jaxpr(jaxpr)[0]).carried

    def _meshes_in(self, eqn: Equation) -> Meshes:
        """What the jaxprs that an equation holds say about meshes."""
        held = [self._meshes_of(jaxpr) for jaxpr in _compat.contained_jaxprs(eqn)]
        return Meshes(any(x.named for x in held), any(x.carried for x in held)) if held else NO_MESHES

    def _meshes_of(self, jaxpr: Jaxpr) -> Meshes:
        if id(jaxpr) not in self.cache:
            inside = [self._meshes_in(eqn) for eqn in jaxpr.eqns]
            named = any(map(_names_mesh, jaxpr.eqns)) or any(x.named for x in inside)
            atoms = itertools.chain(jaxpr.constvars, jaxpr.invars, *((*e.invars, *e.outvars) for e in jaxpr.eqns))
            # Its lowering asks the mesh in which it was traced for axes that are not manual.
            asks = any(eqn.primitive.name == "axis_index" for eqn in jaxpr.eqns)
            carried = asks or any(x.carried for x in inside) or any(map(_compat.has_mesh, atoms))
            self.cache[id(jaxpr)] = Meshes(named, named or carried)
        return cast("Meshes", self.cache[id(jaxpr)])

    def _constrain(self, x: Any, sharding: Any) -> Any:
        """A sharding constraint without ZeRO's axes: inside, they are this device's own."""
        if not isinstance(sharding, NamedSharding):
            return x
        spec = _drop_axes(sharding.spec, self.axes)
        mesh = jax.sharding.get_abstract_mesh()
        if all(name in self.axes or mesh.shape[name] == 1 for name in mesh.axis_names):
            return x
        return constrained(x, spec) if is_lazy(x) else lax.with_sharding_constraint(x, spec)

    def _shard_map(self, eqn: Equation, inputs: list[Any]) -> list[Any]:
        """The loss's own `shard_map`, on the mesh of the step."""
        axes = _compat.shard_map_axes(eqn)
        if axes & self.axes:
            raise ValueError(
                f"The loss calls `jax.shard_map` over {sorted(axes)}, but {sorted(axes & self.axes)} is ZeRO's own: "
                "the loss already runs once per device along it, on the local part of the batch. Name other axes in "
                "`axis_names`, or drop the `shard_map` and use collectives over the axis directly."
            )
        names = jax.sharding.get_abstract_mesh().axis_names
        beside = [name for name in names if name not in self.axes | axes]
        is_unsorted = max(map(names.index, self.axes)) > min(map(names.index, axes), default=len(names))
        if beside and is_unsorted and _compat.CRASHES_ON_UNSORTED_AXES:
            raise ValueError(
                f"The loss calls `jax.shard_map` over {sorted(axes)}, which the mesh {names} has before ZeRO's axes, "
                f"{sorted(self.axes)}, and {beside} beside them: jax {jax.__version__} would end the process. Make a "
                "mesh with ZeRO's axes first, e.g. `jzero.make_mesh(data=…, model=…)`."
            )
        walk = dataclasses.replace(self, sealing=self.sealing or self.regather, shares=False)
        fn = jax.shard_map(
            lambda *xs: tuple(walk._branch(eqn.params["jaxpr"], *xs)),
            in_specs=tuple(eqn.params["in_specs"]),
            out_specs=tuple(eqn.params["out_specs"]),
            axis_names=set(axes),
            check_vma=eqn.params["check_vma"],
        )
        return self._use(lambda xs: list(fn(*xs)), inputs, opaque=True)


_RULES: dict[str, Callable[[Walk, Equation, list[Any]], list[Any]]] = {
    "cond": Walk._cond,
    "jit": Walk._jit,
    "pjit": Walk._jit,
    "checkpoint": Walk._remat,
    "remat2": Walk._remat,
    "scan": Walk._scan,
    "while": Walk._retraced,
    "custom_jvp_call": Walk._with_own_derivative,
    "custom_vjp_call": Walk._with_own_derivative,
    "composite": Walk._retraced,
    "custom_linear_solve": Walk._retraced,
    "custom_vmap_call": Walk._retraced,
    "reduce": Walk._retraced,
    "shard_map": Walk._shard_map,
}


def _names_mesh(eqn: Equation) -> bool:
    """Whether an equation itself names axes of the mesh."""
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    name = eqn.primitive.name
    return name in ("sharding_constraint", "shard_map") or any(isinstance(s, NamedSharding) for s in shardings)


def _is_shared(eqns: Sequence[Equation]) -> bool:
    """Whether equations are worth a call. Recomputed ones are calls already."""
    return len(eqns) >= FEWEST and not any(recomputes(eqn) or _compat.has_side_effects(eqn) for eqn in eqns)


def grouped(values: Sequence[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Splits values into the first so many, the second so many, and the rest."""
    return list(values[:first]), list(values[first : first + second]), list(values[first + second :])


def is_sliceable(x: Any) -> bool:
    """Whether a scan can slice a lazy value's shard."""
    return isinstance(x, Lazy) and x.cut.dim > 0


def _sliceable(x: Any) -> Any:
    """Returns `x` if a scan can slice its shard, else the whole value, with a warning."""
    if not is_lazy(x) or is_sliceable(x):
        return x
    if not is_free(x):
        why = "is cut on dimension 0" if isinstance(x, Lazy) else "is computed from parameters as a whole"
        warnings.warn(
            f"A stack of shape {x.shape} {why}, and a scan in the loss runs over it: every device gathers the whole "
            "stack before the loop. Compute on single layers inside the loop, and say which dimension is scanned: "
            '`ZeroConfig(rules={"path/of/the/stack/.*": LeafRule(scan_dim=0)})`.',
            stacklevel=2,
        )
    return make_whole(x)


def _first_dropped(row: list[Any]) -> list[Any]:
    return [x.drop_leading() if isinstance(x, Lazy) else x for x in row]


def only_indexed(jaxpr: Jaxpr, var: Any) -> bool:
    """Whether the loop body reads constant `var` one slice at a time."""
    uses = [eqn for eqn in jaxpr.eqns if any(v is var for v in eqn.invars)]
    return bool(uses) and all(_indexes(eqn, var) for eqn in uses) and var not in jaxpr.outvars


def _indexes(eqn: Equation, var: Any) -> bool:
    """Whether an equation reads `var` by slices alone."""
    if eqn.primitive.name not in REMAT | {"jit", "pjit"}:
        return eqn.primitive.name == "dynamic_slice"
    body = next(_compat.contained_jaxprs(eqn))
    return all(only_indexed(body, v) for x, v in zip(eqn.invars, body.invars, strict=True) if x is var)


def _is_opaque(eqn: Equation) -> bool:
    """Whether an equation holds jaxprs or effects, so that running it twice is not cheap or not allowed."""
    return bool(eqn.effects) or next(iter(_compat.contained_jaxprs(eqn)), None) is not None


def _drop_axes(spec: PartitionSpec, axes: frozenset[str]) -> PartitionSpec:
    def entry(names: Any) -> Any:
        kept = tuple(n for n in (names if isinstance(names, tuple) else (names,)) if n not in axes and n is not None)
        return None if not kept else kept if isinstance(names, tuple) else kept[0]

    return PartitionSpec(*(entry(names) for names in spec))
