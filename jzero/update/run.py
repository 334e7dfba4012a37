"""Runs a whole update where its arrays lie: on the devices, and for state on the host chunk by chunk.

In: a `WholeUpdate` and its inputs as stored. Out: its results, in natural shape, or as stored for parameters with state
on the host. If all is on the devices and nothing needs whole matrices, the update is called as it was written.
Otherwise its jaxpr is split and evaluated equation by equation: matrix work of one parameter on one device, see
[Note: Matrices on one device each]; other matrix work on all devices, over operands that each of them gathers once;
what is elementwise in a parameter with state on the host in passes over chunks, see [Note: Streaming an update].
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero import _compat
from jzero.arrays.casts import holds, positions_of, round_to
from jzero.arrays.placement import check_leaf_shape, is_on_host, natural_leaf, stored_leaf
from jzero.jaxpr.flat import flattened
from jzero.jaxpr.products import mixes
from jzero.jaxpr.structure import Structures
from jzero.plan.leaves import StateLeaf
from jzero.plan.matrices import Matrices, find_matrices, warn_of_whole
from jzero.plan.plan import ZeroPlan
from jzero.update.chunks import Pass, reduce_pass, run_pass
from jzero.update.gathered import Everywhere
from jzero.update.owned import compute_owned
from jzero.update.split import Kernel, Kind, Split, kernel_of, split
from jzero.update.whole import After, Before, WholeUpdate

__all__ = ["run_update"]

BY_PARAMETER = ("grads", "params", "masters", "positions")
"""The fields of `Before` with an entry per parameter."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Field:
    """An array of a parameter with state on the host.

    Attributes:
      number: The parameter.
      leaf: The layout of the parameter's gradient, in which all its fields are stored.
      array: The array as stored; `None` for the positions of its elements.
    """

    number: int
    leaf: StateLeaf
    array: Any

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """Its natural shape, and its dtype."""
        return jax.ShapeDtypeStruct(self.leaf.shape, jnp.uint32 if self.array is None else self.array.dtype)


def run_update(update: WholeUpdate, stored: Before) -> After:
    """Returns the results of an update; call it inside `jit`.

    Args:
      update: The update.
      stored: Its inputs as stored; gradients also in natural shape.
    """
    plan = update.plan
    far = frozenset(i for i in plan.offloaded if plan.leaves[i].param.shape)  # a number is no array to stream
    given = _placed(plan, stored, far)
    if plan.num_shards == 1 and not far:
        return update(given)
    leaves, treedef = jax.tree.flatten(given)
    seen = treedef.unflatten([x.aval if isinstance(x, _Field) else x for x in leaves])
    # What `update.functions` close over are constants of this jaxpr; of `jit(update).trace` they would be inputs.
    jaxpr, out = jax.make_jaxpr(update, return_shape=True)(seen)
    has_matrices = any(map(mixes, _compat.open_jaxpr(jaxpr)[0].eqns))
    if not far and not has_matrices:  # already traced: call it
        return jax.jit(update)(given)
    run = _Run(plan, flattened(jaxpr, chooses=bool(far)), leaves)
    run.evaluate(_owners(plan, given) if has_matrices and plan.num_shards > 1 else None)
    numbers = jax.tree.unflatten(jax.tree.structure(out), range(len(jax.tree.leaves(out))))
    passed = {k: x for i in sorted(far) for k, x in run.update(i, given, numbers).items()}
    run.warn()
    outs = run.split.jaxpr.outvars
    return jax.tree.map(lambda k: passed[k] if k in passed else run.value(outs[k]), numbers)


def _placed(plan: ZeroPlan, stored: Before, far: frozenset[int]) -> Before:
    """Returns the inputs of an update: arrays in natural shape, and the fields of parameters with state on the host."""

    def place(x: Any, i: int | None, leaf: StateLeaf) -> Any:
        if x is None:
            return None
        check_leaf_shape(x, leaf)
        if i not in far or leaf.shape != plan.leaves[i].param.shape:
            return natural_leaf(x, leaf, plan)
        grad = plan.leaves[i].grad
        x = x if leaf.cut == grad.cut else natural_leaf(x, leaf, plan)
        return _Field(i, grad, x if is_on_host(x) else stored_leaf(x, grad, plan))

    def of_param(i: int, x: Any) -> Any:
        leaf = plan.leaves[i]
        return None if i in plan.keys else place(x, i, leaf.grad if leaf.trained else leaf.param)

    grads = [
        None if g is None else g._replace(reduced=place(g.reduced, i, plan.leaves[i].grad))
        for i, g in enumerate(stored.grads)
    ]
    inner = [place(x, leaf.owner, leaf) for x, leaf in zip(stored.inner, plan.inner_leaves, strict=True)]
    rounds = stored.number is not None
    return stored._replace(
        grads=grads,
        params=[of_param(i, x) for i, x in enumerate(stored.params)],
        masters=[of_param(i, x) for i, x in enumerate(stored.masters)],
        inner=inner,
        positions=[_Field(i, x.grad, None) if rounds and i in far else None for i, x in enumerate(plan.leaves)],
    )


def _owners(plan: ZeroPlan, given: Before) -> list[int | None]:
    """Returns the parameter that each input belongs to."""

    def marked(i: int | None, x: Any) -> Any:
        return jax.tree.map(lambda _: -1 if i is None else i, x)

    marks = marked(None, given)._replace(
        **{name: list(map(marked, range(len(plan.leaves)), getattr(given, name))) for name in BY_PARAMETER},
        inner=[marked(leaf.owner, x) for leaf, x in zip(plan.inner_leaves, given.inner, strict=True)],
    )
    return [None if i < 0 else i for i in jax.tree.leaves(marks)]


class _Run:
    """Evaluates a split update.

    Attributes:
      split: The split.
      env: What is known of its variables: numbers, and arrays in natural shape.
      fields: The variables that are fields.
      given: The results of matrix work on one device each.
      whole: Fields, and what is computed from them element by element, in natural shape on the devices.
      fetched: Paths of the parameters whose state on the host was needed whole.
    """

    def __init__(self, plan: ZeroPlan, flat: Any, leaves: Sequence[Any]) -> None:
        jaxpr, consts = _compat.open_jaxpr(flat)
        pairs = list(zip(jaxpr.invars, leaves, strict=True))
        self.plan = plan
        self.fields: dict[Any, _Field] = {v: x for v, x in pairs if isinstance(x, _Field)}
        self.split: Split = split(jaxpr, {v: x.number for v, x in self.fields.items()})
        self.env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        self.env.update((v, x) for v, x in pairs if v not in self.fields)
        self.given = frozenset[Any]()
        self.whole: dict[Any, jax.Array] = {}
        self.fetched: set[str] = set()
        self.number_of, self.shared = Structures(), dict[int, Any]()
        self.apply = Everywhere(plan)

    def evaluate(self, owners: Sequence[int | None] | None) -> None:
        """Computes all values but those that are elementwise in a field.

        Args:
          owners: For each input the parameter that it belongs to, if matrix work is to run on one device each.
        """
        found = Matrices([], []) if owners is None else find_matrices(self.plan, self.split.jaxpr, owners)
        works = found.works
        if self.plan.matrices.unknown:  # the plan could not warn
            warn_of_whole(found.notes)
        replaced = frozenset[int]().union(*(work.region.eqns for work in works))
        self.given = frozenset(v for work in works for v in work.region.outputs)
        kinds = enumerate(self.split.kinds)
        pending = [i for i, kind in kinds if kind is not Kind.ELEMENT and i not in replaced]
        for level in sorted({work.region.level for work in works}):
            pending = self._evaluate(pending)
            self.env.update(compute_owned(self.plan, [x for x in works if x.region.level == level], self.value))
        pending = self._evaluate(pending)
        assert not pending

    def _evaluate(self, numbers: Sequence[int]) -> list[int]:
        """Evaluates equations; returns those whose operands are not there yet."""
        waiting = []
        for i in numbers:
            eqn = self.split.jaxpr.eqns[i]
            if self.given and not all(map(self._is_known, eqn.invars)):
                waiting.append(i)
                continue
            with _compat.equation_context(eqn):
                is_sum = self.split.kinds[i] is Kind.SUM
                outs = self._sum(eqn) if is_sum else self.apply(eqn, list(map(self.value, eqn.invars)))
            self.env.update(zip(eqn.outvars, outs, strict=True))
        return waiting

    def _is_known(self, atom: Any) -> bool:
        if _compat.is_literal(atom) or atom in self.env or atom in self.fields:
            return True
        if atom in self.given or atom not in self.split.elements:
            return False
        return all(map(self._is_known, self._kernel([atom]).reads))

    def _kernel(self, wanted: Sequence[Any]) -> Kernel:
        return kernel_of(self.split, wanted, self.given)

    def value(self, atom: Any) -> Any:
        """Returns a value on the devices, in natural shape."""
        if _compat.is_literal(atom):
            return _compat.value_of(atom)
        if atom in self.env:
            return self.env[atom]
        if atom not in self.whole:
            if atom in self.fields:
                self.whole[atom] = self._fetch(self.fields[atom])
            else:
                kernel = self._kernel([atom])
                reads = [x.reshape(atom.aval.shape) if jnp.ndim(x) else x for x in map(self.value, kernel.reads)]
                self.whole[atom] = kernel(reads, atom.aval.shape)[0]
        return self.whole[atom]

    def _fetch(self, field: _Field) -> jax.Array:
        if field.array is None:
            return positions_of(field.leaf.shape)
        if is_on_host(field.array):
            if self.plan.config.offload.compute == "host":
                raise ValueError(
                    f"`Offload(compute='host')` updates {field.leaf.path!r} where it lies, element by element, but the "
                    "optimizer needs more of it than elements and their sums (Muon's products, Adafactor's rows). "
                    "Use `compute='device'`, or keep the leaf on the devices (`LeafRule(offload=False)`)."
                )
            self.fetched.add(field.leaf.path)
        return natural_leaf(field.array, field.leaf, self.plan)

    def _sum(self, eqn: Any) -> list[jax.Array]:
        fields = [self.fields[v] for v in self._kernel(eqn.invars).reads if v in self.fields]
        if not any(is_on_host(x.array) for x in fields):
            return _compat.bind(eqn, [self.value(v) for v in eqn.invars])
        found = self._pass(fields[0].number, eqn.invars)
        return [reduce_pass(self.plan, found, eqn.primitive.name, eqn.outvars[0].aval.dtype)]

    def update(self, i: int, given: Before, numbers: After) -> dict[int, jax.Array]:
        """Returns the results of a parameter with state on the host, by their numbers among all results."""
        leaf, outs, result = self.plan.leaves[i], self.split.jaxpr.outvars, numbers.results[i]
        pairs = [(numbers.masters[i], given.masters[i]), *zip(numbers.inner, given.inner, strict=True)]
        pairs += [(result, given.params[i])] if leaf.param.on_host else []
        targets: dict[int, Any] = {
            k: x.array for k, x in pairs if k is not None and isinstance(x, _Field) and x.number == i
        }
        is_near = result is not None and not leaf.param.on_host
        if is_near:  # it overwrites the gradient if that is wide enough
            grad: Any = given.grads[i]
            array, dtype = grad.reduced.array, outs[result].aval.dtype
            targets[result] = array if holds(array.dtype, dtype) and not is_on_host(array) else dtype
        if not targets:
            return {}
        made = run_pass(self.plan, self._pass(i, [outs[k] for k in targets], list(targets.values())))
        new = dict(zip(targets, made, strict=True))
        if is_near:
            new[result] = natural_leaf(round_to(new[result], dtype), leaf.grad, self.plan)
        return new

    def _pass(self, i: int, wanted: Sequence[Any], targets: Sequence[Any] = ()) -> Pass:
        """Returns the pass of what is wanted of a parameter; it overwrites those of the `targets` that are arrays."""
        leaf, kernel = self.plan.leaves[i].grad, self._kernel(wanted)
        fn = self.shared.setdefault(self.number_of(kernel.piece()), jax.jit(kernel.__call__, static_argnums=1))

        def stored(v: Any) -> Any:
            if v in self.fields:
                return self.fields[v].array  # `None` for positions
            x = jnp.asarray(self.value(v))
            return stored_leaf(x.reshape(leaf.shape), leaf, self.plan) if x.ndim else x

        reads = [stored(v) for v in kernel.reads]
        known = {id(x): x for x in (*reads, *targets) if isinstance(x, jax.Array)}
        arrays, numbers = ([x for x in known.values() if bool(x.ndim) == has_dims] for has_dims in (True, False))

        def on_chunks(chunks: Sequence[Any], positions: Any, some: Sequence[Any]) -> list[jax.Array]:
            here = dict(zip(map(id, (*arrays, *numbers)), (*chunks, *some), strict=True))
            return fn([positions() if x is None else here[id(x)] for x in reads], chunks[0].shape)

        place = {id(x): k for k, x in enumerate(arrays)}
        return Pass(leaf, on_chunks, arrays, numbers, [place.get(id(x), x) for x in targets])

    def warn(self) -> None:
        """Warns of state on the host that was needed whole."""
        if self.fetched:
            warnings.warn(
                "The optimizer needs more than single elements, or their sum, of what is on the host, so each step "
                f"brings these leaves to the devices as a whole: {sorted(self.fetched)}. Their memory is needed once "
                "more there; keep them on the devices (`LeafRule(offload=False)`) if that is too much.",
                stacklevel=2,
            )
