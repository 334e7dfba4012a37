"""What a plan says of the matrix work of an optimizer's update: who computes which matrix, and what to warn of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence

from jax.extend.core import ClosedJaxpr

from jzero.core.base import compat
from jzero.core.base.guard import warn
from jzero.core.jaxpr.flat import flattened
from jzero.core.jaxpr.sizes import mixes
from jzero.core.plan.assignment import MatrixKind, MatrixWork, WholeMatrix
from jzero.core.plan.matrices import Matrices, find_matrices, schedule_of
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.trainable import OptimizerUpdate

LARGE = 2**20
"""Elements of a matrix from which on a warning tells that every device computes it."""

_HOW_TO_TELL = (
    "`optax.contrib.muon` takes just the parameters of two dimensions for matrices, unless "
    "`muon_weight_dimension_numbers=` says which ones are, and along which dimensions."
)


def with_matrices(plan: ZeroPlan, update: OptimizerUpdate) -> ZeroPlan:
    """Returns a plan with the matrix work of an update."""
    if plan.num_shards == 1:
        return plan
    some = update.jaxpr_of(_first_of_each_kind(plan))
    if some is not None and not _has_matrices(some):
        return plan
    jaxpr = update.jaxpr
    if jaxpr is None:
        why = "known when the step is traced, since the optimizer's update needs further arguments"
        return dataclasses.replace(plan, matrices=MatrixWork(unknown=why))
    if not _has_matrices(jaxpr):
        return plan
    numbers = range(len(plan.leaves))
    owners = [*numbers, *(leaf.owner for leaf in plan.inner_leaves), *numbers]
    matrices = find_matrices(plan, compat.open_jaxpr(flattened(jaxpr))[0], owners)
    return dataclasses.replace(plan, matrices=_described(plan, matrices))


def _has_matrices(jaxpr: ClosedJaxpr) -> bool:
    return any(map(mixes, compat.open_jaxpr(jaxpr)[0].eqns))


def _first_of_each_kind(plan: ZeroPlan) -> list[int]:
    """Returns one index for all parameters of one shape and dtype of which the optimizer keeps the same state.

    Trained parameters without state are kinds of their own: only the trace of all tells what becomes of them. If a mask
    makes an optimizer without state multiply just some of a kind, the step finds that, and warns in the plan's place.
    """
    kinds: dict[Hashable, int] = {}
    for i, (leaf, state) in enumerate(zip(plan.leaves, plan.opt_leaves_of, strict=True)):
        kept = tuple((x.path.removesuffix(leaf.path), x.shape, x.dtype) for _, x in state)
        kinds.setdefault((leaf.param.shape, leaf.update_dtype, kept or (i if leaf.trained else None)), i)
    return list(kinds.values())


def _described(plan: ZeroPlan, matrices: Matrices) -> MatrixWork:
    kinds: list[MatrixKind] = []
    busiest = 0.0
    for level in sorted({work.region.level for work in matrices.works}):
        at_once = [work for work in matrices.works if work.region.level == level]
        groups, schedule = schedule_of(at_once, plan.num_shards)
        busiest += max(schedule.loads)
        for group in groups:
            paths = tuple(plan.leaves[w.region.owner].path for w in group)
            shape = plan.leaves[group[0].region.owner].param.shape
            shape = tuple(n for d, n in enumerate(shape) if d not in group[0].inputs[0].dims)
            kinds.append(MatrixKind(shape, sum(w.count for w in group), group[0].cost, paths))
    return MatrixWork(tuple(kinds), tuple(matrices.notes), busiest)


def warn_of_whole(matrices: Sequence[WholeMatrix]) -> None:
    """Warns of large matrices that every device computes."""
    large = [f"  {x}" for x in matrices if math.prod(x.shape) >= LARGE]
    if large:
        warn(
            "Every device computes the optimizer's matrix work of these parameters, so it takes as long as on one "
            "device:\n" + "\n".join(large)
        )


def warn_of_matrices(plan: ZeroPlan) -> None:
    """Warns of large matrices that every device computes, and of stacks that the optimizer seems to mistake."""
    work = plan.matrices
    warn_of_whole(work.whole)
    paths = {path for kind in work.kinds for path in kind.paths} | {path for x in work.whole for path in x.paths}
    trained = [leaf for leaf in plan.leaves if leaf.trained]
    stacks = [leaf.path for leaf in trained if leaf.scan_dim is not None and len(leaf.param.shape) == 2]
    mistaken = [path for path in stacks if path in paths]
    if mistaken:
        warn(
            f"The optimizer multiplies {mistaken} as matrices, but they look like stacks of vectors, one per layer. "
            f"{_HOW_TO_TELL} If they are matrices, set `LeafRule(scan_dim=-1)` for them."
        )
    all_of_two = {leaf.path for leaf in trained if len(leaf.param.shape) == 2}
    missed = [leaf.path for leaf in trained if leaf.scan_dim is not None and len(leaf.param.shape) == 3]
    if all_of_two and paths == all_of_two and missed:
        warn(
            f"The optimizer multiplies every parameter of two dimensions, but none of {missed}, which look like stacks "
            f"of matrices, one per layer. {_HOW_TO_TELL}"
        )
