"""`Keep` against a plan and a loss: what it keeps, and what it cannot keep."""

from __future__ import annotations

import math
import re

from jzero.config.keep import Keep
from jzero.engine.gradients import MicroBatches, bytes_of_kept_blocks
from jzero.engine.recompute import Remat, num_blocks
from jzero.engine.trace import TracedLoss
from jzero.jaxpr.sizes import array_bytes
from jzero.plan.kept import Kept
from jzero.plan.plan import ZeroPlan


def check_keep(remat: Remat | None, plan: ZeroPlan) -> None:
    """Raises if `remat` is a `Keep` that names no parameter of the plan, or one that cannot stay."""
    if not isinstance(remat, Keep) or not remat.params:
        return
    memory = plan.config.offload.params
    if memory in ("host", "disk"):
        raise ValueError(
            f"`Keep(params={remat.params!s:.100})` keeps parameters whole on the devices, and "
            f"`Offload(params={memory!r})` keeps them elsewhere to save memory: drop one of the two."
        )
    paths = [leaf.path for leaf in plan.leaves] + [x.path for x in plan.other_leaves if x.is_param]
    named = {"all", *map(re.escape, paths)}  # as `fill_memory` writes them: nothing to search
    patterns = [remat.params] if isinstance(remat.params, str) else remat.params
    unused = [x for x in patterns if x not in named and not any(map(re.compile(x).fullmatch, paths))]
    if unused:
        raise ValueError(
            f"`Keep(params=...)` has patterns that match no parameter: {unused}. A pattern is a regular expression "
            f"over a whole path, such as {re.escape(paths[0])!r}."
        )


def kept_by(keep: Keep, traced: TracedLoss, plan: ZeroPlan, micro: MicroBatches) -> Kept:
    """Returns what a step keeps on one device between its passes."""
    params = [(leaf.param, leaf.compute_dtype) for leaf in plan.leaves]
    params += [(x, x.compute_dtype) for x in plan.other_leaves if x.compute_dtype is not None]
    cut = [(leaf, dtype) for leaf, dtype in params if leaf.cut is not None]
    stay = [(leaf, dtype) for leaf, dtype in cut if keep.keeps(leaf.path) or not plan.regathers]
    total = num_blocks(traced.jaxpr)
    return Kept(
        params=frozenset(leaf.path for leaf, _ in stay),
        of_params=len(cut),
        param_bytes=sum(array_bytes(math.prod(leaf.shape), dtype) for leaf, dtype in stay),
        blocks=min(keep.blocks, total),
        of_blocks=total,
        block_bytes=bytes_of_kept_blocks(traced, plan, micro) if keep.blocks and total else 0,
    )
