"""Traces the loss as a jaxpr over whole parameters and one device's rows of the batch.

    trace_loss(loss_fn, plan, inputs, *, accumulate_steps, times) -> TracedLoss

The jaxpr is over the leaves of parameters, carried state, batch and key. Parameters have their natural shapes and the
compute dtype. With 8 devices and a batch of 32 rows,

    loss_fn = lambda params, batch: ((batch @ params["w"]) ** 2).mean()

is `{ lambda ; a:f32[512,64] b:f32[4,512]. let ... in (c,) }`. The jaxpr names ZeRO's axes where the loss does, and does
not know how parameters are stored.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr
from jzero.core.base.guard import attempt, warn
from jzero.core.base.types import DType, PyTree
from jzero.core.config.keep import Keep
from jzero.core.config.precision import is_key
from jzero.core.engine.kept_blocks import num_blocks
from jzero.core.engine.recompute import AxisEnv, Remat, has_parts_to_recompute
from jzero.core.jaxpr.growth import growth
from jzero.core.jaxpr.lookups import table_reads
from jzero.core.jaxpr.references import check_references
from jzero.core.jaxpr.row_facts import RowFacts
from jzero.core.jaxpr.rows import row_facts
from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.mesh import batch_axes, num_row_shards, row_axes
from jzero.core.layout.padded import is_padded, unbox
from jzero.core.layout.platform import platform_facts
from jzero.core.layout.set_mesh import is_of_other_mesh, set_if_explicit
from jzero.core.plan.plan import ZeroPlan

OTHER_MESH = (
    "The loss closes over an array of another mesh than the state's, one with Explicit axes (`jax.set_mesh` makes "
    "all new arrays so), and jax does not compute with arrays of both. Close over a NumPy array, `np.asarray(x)`, make "
    "the array inside the loss, or pass it in the batch or as a parameter."
)

T = TypeVar("T")


class LossInputs(NamedTuple):
    """The inputs of a loss.

    Attributes:
      params: The parameters as stored.
      carried: Fields of the state that the loss reads and changes, as stored, by name. Each device folds its index into
        the random keys in them.
      batch: The global batch.
      rng: A PRNG key, into which each device folds its index, or `None`.
      loss_scale: The factor of the loss before differentiation, or `None`.
    """

    params: PyTree
    carried: Mapping[str, PyTree]
    batch: PyTree
    rng: jax.Array | None
    loss_scale: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Written:
    """A variable that the loss writes.

    Attributes:
      field: The field of the train state that holds it.
      path: Its path in the field.
      name: Its name in messages, which patterns for `merge` match.
      source: The index of its old value among the inputs of the loss.
      leaf: Its layout; `None` until `choose_merges` knows it.
      merge: How the values of several devices become one, see `jzero.core.engine.merge`; `None` if they are equal.
    """

    field: str
    path: str
    name: str
    source: int
    leaf: StateLeaf | None = None
    merge: str | None = None


@dataclasses.dataclass(frozen=True)
class TracedLoss:
    """A loss as a jaxpr over whole parameters and one device's part of the batch.

    Attributes:
      jaxpr: Its inputs are the leaves of params, carried state, batch and rng, in this order; its outputs are
        the leaves of `out_shape`.
      out_shape: `(loss, aux)` as shapes.
      num_inputs: The number of leaves of params, carried state, batch and rng.
      batch_specs: How each leaf of the batch is split.
      remat: The recomputation, with the default resolved, see `with_remat`.
      written: The variables that the loss writes, whose new values end its results.
      row_facts: How each of its results depends on the rows of the batch.
    """

    jaxpr: AnyJaxpr
    out_shape: PyTree
    num_inputs: tuple[int, int, int, int]
    batch_specs: list[PartitionSpec]
    remat: Remat = "as_written"
    written: tuple[Written, ...] = ()
    row_facts: Sequence[RowFacts] = ()

    @property
    def rows(self) -> set[int]:
        """The numbers of rows of the leaves of the batch: one number, or none if all are scalars."""
        num_params, num_carried, num_batch, _ = self.num_inputs
        invars = compat.open_jaxpr(self.jaxpr)[0].invars[num_params + num_carried :][:num_batch]
        return {shape[0] for v in invars if (shape := compat.type_of(v).shape)}

    @property
    def written_paths(self) -> set[str]:
        """The paths in the plan of the leaves that it writes."""
        return {x.leaf.path for x in self.written if x.leaf is not None}

    def num_blocks(self, plan: ZeroPlan) -> int:
        """Returns how many blocks `Keep` can keep."""
        return num_blocks(self.jaxpr, fuses_products=platform_facts(plan.mesh).fuses_products)

    def with_remat(self, remat: Remat | None, plan: ZeroPlan) -> TracedLoss:
        """Returns the same loss with `remat`; by default "cheap" if parameters are gathered again, else "as_written".

        To be asked of the very jaxpr that is then rewritten, since splitting it into blocks takes time.
        """
        if remat is None and not plan.regathers:
            return dataclasses.replace(self, remat="as_written")
        if isinstance(remat, Keep) and remat.blocks and not self.num_blocks(plan):
            warn(
                f"`Keep(blocks={remat.blocks})` keeps no block: the loss has no repeated blocks or loops to keep, or "
                "they say themselves what to recompute. Drop `blocks`, or undo the loss's own `jax.checkpoint`s."
            )
        if remat not in (None, "cheap") or attempt(has_parts_to_recompute, self.jaxpr):
            return dataclasses.replace(self, remat="cheap" if remat is None else remat)
        if remat is not None and not plan.regathers:  # else it says that parameters do not stay either
            warn(
                "`remat='cheap'` changes nothing: the loss has no scan and no repeated block of equations that does "
                "not say itself what to recompute. Put `jax.checkpoint` around its parts, or drop the option."
            )
        return dataclasses.replace(self, remat="as_written")

    def with_row_facts(self, plan: ZeroPlan) -> TracedLoss:
        """Returns the same loss with its `row_facts`."""
        groups = [i for i, n in enumerate(self.num_inputs) for _ in range(n)]  # params, carried, batch, key
        dtypes = [compat.type_of(v).dtype for v in compat.open_jaxpr(self.jaxpr)[0].invars]
        batch = [i == 2 for i in groups]
        keys = [i == 3 or (i == 1 and is_key(dtype)) for i, dtype in zip(groups, dtypes, strict=True)]
        axes = batch_axes(plan.config)
        split = [axis for axis in axes if plan.mesh.shape[axis] > 1]  # an axis of one device has nothing to reduce
        with set_if_explicit(plan.loss_mesh):
            facts = row_facts(self.jaxpr, batch=batch, keys=keys, axes=split or axes)
        return dataclasses.replace(self, row_facts=facts)

    def with_growth(self, doubled: TracedLoss) -> TracedLoss:
        """Returns the same loss with the growth of its results in `row_facts`, given it over twice as many rows."""
        shapes, others = ([x.shape for x in jax.tree.leaves(traced.out_shape)] for traced in (self, doubled))
        found = attempt(growth, self.jaxpr, doubled.jaxpr)
        if found is None or len(shapes) != len(others):
            return self
        facts = [
            x._replace(growth=power if shape == other else math.nan)
            for x, power, shape, other in zip(self.row_facts, found, shapes, others, strict=True)
        ]
        return dataclasses.replace(self, row_facts=facts)

    def by_field(self, values: Sequence[T]) -> dict[str, dict[str, T]]:
        """Returns values, one for each written variable, by field of the state and path in the field."""
        fields: dict[str, dict[str, T]] = {}
        for x, value in zip(self.written, values, strict=True):
            fields.setdefault(x.field, {})[x.path] = value
        return fields


def axis_env(plan: ZeroPlan) -> AxisEnv:
    """Returns the names and sizes of ZeRO's axes, which the loss may use."""
    return [(name, int(plan.mesh.shape[name])) for name in batch_axes(plan.config)]


def trace_loss(
    loss_fn: Callable[..., PyTree],
    plan: ZeroPlan,
    inputs: LossInputs,
    *,
    accumulate_steps: int = 1,
    times: int = 1,
) -> TracedLoss:
    """Traces `loss_fn` over whole parameters and one device's rows of a micro-batch, or over `times` as many rows."""
    batch, rng = inputs.batch, inputs.rng
    parts = num_row_shards(plan.mesh, plan.config) * accumulate_steps  # B = rows / parts
    # [rows, ...] -> [B, ...]; a scalar is the same for all devices.
    local = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((times * x.shape[0] // parts, *x.shape[1:]) if x.ndim else (), x.dtype), batch
    )
    shapes = [param_shape(leaf.param, leaf.compute_dtype, plan) for leaf in plan.leaves]  # [D, F], whole
    params = plan.view.params.tree(shapes)
    carried = _carried_shapes(plan, inputs.carried)
    key = [] if rng is None else [jax.ShapeDtypeStruct(rng.shape, rng.dtype)]

    def call(params: PyTree, carried: Mapping[str, PyTree], batch: PyTree, key: list[jax.Array]) -> PyTree:
        return loss_fn(params, batch, *key, **carried)

    jaxpr, out_shape = _make_jaxpr(call, plan, (params, carried, local, key))
    check_references(jaxpr, "The loss")
    ordered = compat.ordered_effects(jaxpr)
    if ordered:
        raise ValueError(
            f"The loss has ordered effects ({', '.join(ordered)}), which cannot run on several devices at once. Use "
            "the unordered form, e.g. `jax.debug.print(...)` or `io_callback(..., ordered=False)`."
        )
    specs = [PartitionSpec(row_axes(plan.config)) if x.ndim else PartitionSpec() for x in jax.tree.leaves(batch)]
    sizes = (len(shapes), len(jax.tree.leaves(carried)), len(specs), len(key))
    return TracedLoss(jaxpr, out_shape, sizes, specs)


def param_shape(leaf: StateLeaf, dtype: DType, plan: ZeroPlan) -> jax.ShapeDtypeStruct:
    """Returns the shape of a whole leaf, with the Explicit axes that cut it."""
    spec = compat.with_axes(leaf.base, plan.explicit_axes)
    sharding = NamedSharding(plan.loss_mesh, spec) if any(spec) else None
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)


def _make_jaxpr(fn: Callable[..., PyTree], plan: ZeroPlan, shapes: tuple[PyTree, ...]) -> tuple[ClosedJaxpr, PyTree]:
    """Returns a function's jaxpr, and the shapes of its results."""
    axes = batch_axes(plan.config)
    try:
        with set_if_explicit(plan.loss_mesh):
            jaxpr, out_shape = jax.make_jaxpr(fn, axis_env=axis_env(plan), return_shape=True)(*shapes)
    except NameError as error:
        # jax raises a plain `NameError`: only its text tells it from one in the user's code.
        unbound = re.search(r"unbound axis name:? ['\"]?(\w+)", str(error))
        if unbound is None:
            raise
        raise ValueError(
            f"The loss names an axis {unbound[1]!r}, but ZeRO's are {axes}. Name one of these, or rename ZeRO's axis: "
            f"`ZeroConfig(axis={unbound[1]!r})` on a mesh that has it, `jzero.make_mesh({unbound[1]}=-1)`."
        ) from error
    except (AssertionError, ValueError) as error:
        text = str(error)
        if "should match the aval mesh" in text:
            raise ValueError(OTHER_MESH) from error
        is_cast = "ManualAxisType" in text or "manual_axis_type" in text
        if not any(repr(name) in text for name in axes) or not (is_cast or "shard_map" in text):
            raise
        if "shard_map" in text:
            raise ValueError(
                "The loss calls `jax.shard_map` over one of ZeRO's axes, which jax refuses (its error is above): the "
                f"loss already runs once per device along {axes}, on the local part of the batch. Name other axes in "
                "`axis_names`, or drop the `shard_map` and use collectives over the axis."
            ) from error
        raise ValueError(
            f"The loss casts a value to vary along one of ZeRO's axes, {axes}, with `lax.pcast`: leave that out, since "
            "all values may vary there and the step does not check it."
        ) from error
    if any(map(is_of_other_mesh, compat.open_jaxpr(jaxpr)[1])):
        raise ValueError(OTHER_MESH)
    return jaxpr, out_shape


def carried_leaves(plan: ZeroPlan, carried: Mapping[str, PyTree]) -> list[StateLeaf]:
    """Returns the layout of each leaf of the carried state."""
    return [leaf for name in sorted(carried) for leaf in plan.leaves_of(name)]  # as jax flattens a dictionary


def plan_for(plan: ZeroPlan, traced: TracedLoss, carried: Mapping[str, PyTree]) -> ZeroPlan:
    """Returns the plan for a traced loss, given the carried state: what it writes, and what it only looks up."""
    plan = plan.with_written(traced.written_paths)
    paths = [*(leaf.path for leaf in plan.leaves), *(leaf.path for leaf in carried_leaves(plan, carried))]
    reads = dict(zip(paths, table_reads(traced.jaxpr, len(paths)), strict=True))
    return dataclasses.replace(plan, lookups=plan.traffic.choose_lookups(reads))


def _carried_shapes(plan: ZeroPlan, carried: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Returns the carried state as the loss sees it: every leaf in its natural shape."""
    treedef = jax.tree.structure(jax.tree.map(unbox, dict(carried), is_leaf=is_padded))
    return treedef.unflatten([param_shape(leaf, leaf.seen_dtype, plan) for leaf in carried_leaves(plan, carried)])
