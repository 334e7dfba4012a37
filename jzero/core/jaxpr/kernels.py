"""What kernels of Pallas and cuDNN compute: which rows they keep apart, and how many operations they take.

    kernel_flops(eqn, known) -> float | None

A kernel is one operation of a program, whatever it runs inside. That of Pallas runs once for each point of a grid, and
attention leaves out the points of which a mask shows nothing: by conditions on the point's numbers, or on arrays that
say which points to leave out. So the control flow of a kernel runs here, on all points at once: numbers are arrays over
the grid, and whatever depends on data is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr
from jzero.core.jaxpr.interpret import propagate
from jzero.core.jaxpr.primitives import RUNS, Trait, called_jaxpr, primitives_with
from jzero.core.jaxpr.sizes import product_flops

Known: TypeAlias = np.ndarray | None
"""A number for each point of the grid, or an array that all points read; `None` if that is unknown."""
KERNELS = primitives_with(Trait.KERNEL)
OF_CUDNN = {"dot_product_attention_fwd": 2, "dot_product_attention_bwd": 5}
"""Products of one head that attention of cuDNN computes."""


class UnknownWorkError(Exception):
    """The operations of a kernel cannot be told from its program."""


def row_places(eqn: JaxprEqn, row_dims: Sequence[frozenset[int]]) -> list[frozenset[int]] | None:
    """Returns where rows are in each result of a kernel; `None` if it may combine different ones.

    Args:
      eqn: The equation.
      row_dims: For each operand the dimensions along which rows are, none if it has no rows.
    """
    if eqn.primitive.name.removesuffix("_wrapper") in OF_CUDNN:
        return [frozenset({0})] * len(eqn.outvars) if {*row_dims} <= {frozenset({0}), frozenset()} else None
    if eqn.primitive.name != "pallas_call":
        return None
    mapping = eqn.params["grid_mapping"]
    blocks = mapping.block_mappings
    places = {
        _place(block, d) for block, dims in zip(blocks, row_dims[-mapping.num_inputs :], strict=False) for d in dims
    }
    if len(places) != 1 or None in places or any(row_dims[: -mapping.num_inputs]):
        return None
    found = [
        frozenset(d for d in range(len(block.block_shape)) if _place(block, d) in places)
        for block in blocks[mapping.num_inputs :]
    ]
    return found if all(found) else None


def _place(block: Any, d: int) -> int | None:
    """Returns the dimension of the grid along which blocks take one element each of a dimension of an array."""
    index, _ = compat.open_jaxpr(block.index_map_jaxpr)
    size = block.block_shape[d]
    if getattr(size, "block_size", 1 if not isinstance(size, int) else size) != 1:
        return None
    return next((i for i, v in enumerate(index.invars) if v is index.outvars[d]), None)


def kernel_name(eqn: JaxprEqn) -> str:
    """Returns the name of a kernel, which compiled programs have in the names of operations."""
    return str(eqn.params.get("name") or eqn.primitive.name.removesuffix("_wrapper"))


def kernel_flops(eqn: JaxprEqn, known: Sequence[Any] = ()) -> float | None:
    """Returns the operations of a kernel's products; `None` if they are unknown.

    Args:
      eqn: The equation.
      known: The values of its operands that are constants of the program, `None` for the others.
    """
    name = eqn.primitive.name.removesuffix("_wrapper")
    if name in OF_CUDNN:
        return OF_CUDNN[name] * _product_of_cudnn(eqn)
    if name != "pallas_call":
        return None
    cost, mapping = eqn.params["cost_estimate"], eqn.params["grid_mapping"]
    if cost is not None:
        return float(cost.flops)
    refs = list(known[: mapping.num_index_operands]) or [None] * mapping.num_index_operands
    body = eqn.params["jaxpr"]
    try:
        kernel = _Kernel(mapping.grid, tuple(d for d in range(len(mapping.grid)) if d not in mapping.vmapped_dims))
        work, _ = kernel.run(body, [*refs, *[None] * (len(body.invars) - len(refs))])
    except UnknownWorkError:
        return None
    return float(np.mean(work)) * math.prod(mapping.grid)


def _product_of_cudnn(eqn: JaxprEqn) -> float:
    """Returns the operations of one product of queries and keys, `[B, S, H, C]` or `[B, H, S, C]`."""
    params, (q, k) = eqn.params, (compat.type_of(v).shape for v in eqn.invars[:2])
    tokens = 1 if params["layout"] == 0 else 2
    size, seen, window = q[tokens], k[tokens], params["sliding_window_length"]
    visible = float(size * seen)
    if "CAUSAL" in str(params["mask_type"]):
        most = min(window or seen, seen)
        visible = size * most - most * (most - 1) / 2
    return 2.0 * visible * math.prod(q) / size


class _Kernel(NamedTuple):
    """Runs the control flow of a kernel.

    Attributes:
      grid: The number of points along each of its dimensions.
      named: The dimensions that the kernel knows by their numbers; `vmap` adds others.
    """

    grid: tuple[Any, ...]
    named: tuple[int, ...]

    def run(self, jaxpr: AnyJaxpr, inputs: Sequence[Known]) -> tuple[Any, list[Known]]:
        """Returns the operations of each point, and the results."""
        work: Any = 0.0

        def apply(eqn: JaxprEqn, values: list[Known]) -> Sequence[Known]:
            nonlocal work
            more, results = self._equation(eqn, values)
            work = work + more
            return results or [None] * len(eqn.outvars)

        opened, consts = compat.open_jaxpr(jaxpr)
        outputs = propagate(opened, [*consts, *inputs], apply, lambda x: np.asarray(compat.value_of(x)))
        return work, outputs

    def _equation(self, eqn: JaxprEqn, values: list[Known]) -> tuple[Any, Sequence[Known]]:
        """Returns the operations of each point, and the results if they are known."""
        name = eqn.primitive.name
        if name == "program_id":
            return 0.0, [self._numbers(self.named[eqn.params["axis"]])]
        if name in RUNS:
            return self.run(called_jaxpr(eqn), values)
        if name in ("cond", "scan", "while"):
            return {"cond": self._cond, "scan": self._scan, "while": self._while}[name](eqn, values), ()
        if "mma" in name or any(compat.contained_jaxprs(eqn)) or eqn.primitive.name in KERNELS:
            raise UnknownWorkError(name)
        if name == "get":
            return 0.0, [_read(eqn, values)]
        is_number = all(getattr(v.aval, "shape", None) == () for v in (*eqn.invars, *eqn.outvars))
        numbers = [x for x in values if x is not None]
        if is_number and eqn.outvars and len(numbers) == len(values):
            with jax.ensure_compile_time_eval():
                return 0.0, [np.asarray(x) for x in compat.bind(eqn, np.broadcast_arrays(*numbers))]
        return product_flops(eqn), ()

    def _numbers(self, d: int) -> np.ndarray:
        if not isinstance(self.grid[d], int):
            raise UnknownWorkError("the size of a grid must be known")
        return np.arange(self.grid[d], dtype=np.int32).reshape([-1 if i == d else 1 for i in range(len(self.grid))])

    def _cond(self, eqn: JaxprEqn, values: list[Known]) -> Any:
        index, *operands = values
        works = [self.run(branch, operands)[0] for branch in eqn.params["branches"]]
        if index is None:
            return max(works, key=np.mean)
        return sum(np.where(np.clip(index, 0, len(works) - 1) == i, work, 0.0) for i, work in enumerate(works))

    def _scan(self, eqn: JaxprEqn, values: list[Known]) -> Any:
        consts = values[: compat.scan_groups(eqn)[0]]
        body = eqn.params["jaxpr"]
        size = len(compat.open_jaxpr(body)[0].invars)
        return eqn.params["length"] * self.run(body, [*consts, *[None] * (size - len(consts))])[0]

    def _while(self, eqn: JaxprEqn, values: list[Known]) -> Any:
        """Counts the turns of `fori_loop`, whose carry begins with a number that grows by one, and a bound."""
        first = eqn.params["cond_nconsts"]
        consts, carry = values[first : first + eqn.params["body_nconsts"]], values[first + eqn.params["body_nconsts"] :]
        test, body = (compat.open_jaxpr(eqn.params[name])[0] for name in ("cond_jaxpr", "body_jaxpr"))
        work = self.run(body, [*consts, *[None] * len(carry)])[0]
        if not np.any(work):
            return 0.0
        is_count = [x.primitive.name for x in test.eqns] == ["lt"] and test.eqns[0].invars == test.invars[first:][:2]
        if not is_count or carry[0] is None or carry[1] is None or body.outvars[1] is not body.invars[len(consts) + 1]:
            raise UnknownWorkError("the number of turns of a loop must be known")
        return np.maximum(carry[1] - carry[0], 0) * work


def _read(eqn: JaxprEqn, values: list[Known]) -> Known:
    """Returns the elements of a known array that each point reads."""
    array, *rest = values
    (indexer, *others) = jax.tree.unflatten(eqn.params["tree"], rest) or [None]
    indices = getattr(indexer, "indices", None)
    if array is None or others or indices is None or not all(isinstance(i, np.ndarray) for i in indices):
        return None
    return np.asarray(array)[indices]
