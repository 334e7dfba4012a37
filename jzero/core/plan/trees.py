"""One view of a state: its trees as lists of leaves, and back. Nothing else takes a state apart.

A state is trees wherever others see it: users, jax (arguments and results of programs), optax and checkpoints. In these
trees padded leaves are nodes. In between (engine, update, records, transfers) it is lists: parameters, gradients and
masters in the order of `plan.leaves`, the optimizer's state in that of `plan.opt_leaves`, a whole state in that of
`plan.view.leaves`. Lists hold stored arrays; a number that names a parameter is its place in `plan.leaves`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import jax
from jax.tree_util import PyTreeDef

from jzero.core.base.types import Optimizer, PyTree, TrainStateLike
from jzero.core.layout.leaves import LeafPlan, StateLeaf
from jzero.core.layout.padded import Padded, is_padded
from jzero.core.layout.stored import InRecords
from jzero.core.plan.state_fields import other_fields

S = TypeVar("S", bound=TrainStateLike)


class _Leaf(Protocol):
    def box(self, x: Any) -> Any: ...

    def unbox(self, x: object) -> Any: ...


L_co = TypeVar("L_co", bound=_Leaf, covariant=True)


@dataclasses.dataclass(frozen=True)
class TreeView(Generic[L_co]):
    """A tree of a state, whose padded leaves are nodes, and the list of its leaves.

    Attributes:
      treedef: The structure of the tree; a padded leaf counts as one.
      leaves: The layout of each leaf.
    """

    treedef: PyTreeDef
    leaves: Sequence[L_co]

    def nodes(self, tree: PyTree) -> list[Any]:
        """Returns the leaves of a tree; padded ones as nodes, which know their own layout."""
        return self.treedef.flatten_up_to(tree)

    def flat(self, tree: PyTree) -> list[Any]:
        """Returns the leaves of a tree; for padded ones, the stored arrays."""
        return [leaf.unbox(x) for leaf, x in zip(self.leaves, self.nodes(tree), strict=True)]

    def stored(self, arrays: Iterable[object]) -> PyTree:
        """Returns the tree for a state, of stored arrays, see [Note: Padded leaves in your own loop]."""
        return self.treedef.unflatten([leaf.box(x) for leaf, x in zip(self.leaves, arrays, strict=True)])

    def tree(self, values: Iterable[object]) -> PyTree:
        """Returns the tree of any values."""
        return self.treedef.unflatten(values)


@dataclasses.dataclass(frozen=True)
class StateView:
    """A train state as one list of leaves: parameters, optimizer state, further fields.

    Attributes:
      params: The parameters, gradients or masters.
      leaves: The layout of each leaf of the state.
    """

    params: TreeView[LeafPlan]
    opt_state: TreeView[StateLeaf]
    leaves: tuple[StateLeaf, ...]

    def nodes(self, state: TrainStateLike) -> list[Any]:
        """Returns the leaves of a state; padded ones as nodes, which know their own layout."""
        others = jax.tree.leaves(other_fields(state), is_leaf=is_padded)
        return [*self.params.nodes(state.params), *self.opt_state.nodes(state.opt_state), *others]

    def flat(self, state: TrainStateLike) -> list[Any]:
        """Returns the leaves of a state; for padded ones, the stored arrays."""
        return [leaf.unbox(x) for leaf, x in zip(self.leaves, self.nodes(state), strict=True)]

    def rebuilt(self, state: S, leaves: Iterable[object], *, tx: Optimizer | None = None) -> S:
        """Returns a state with other leaves, in the order of `flat`, and with `tx` if given."""
        boxed = iter([leaf.box(x) for leaf, x in zip(self.leaves, leaves, strict=True)])
        params, opt_state = (tree.tree([next(boxed) for _ in tree.leaves]) for tree in (self.params, self.opt_state))
        fields = jax.tree.structure(other_fields(state), is_leaf=is_padded).unflatten(boxed)
        return state.replace(params=params, opt_state=opt_state, **fields, **({} if tx is None else {"tx": tx}))

    def map(self, fn: Callable[[jax.Array, StateLeaf], object], state: S) -> S:
        """Returns a state with `fn(array, layout)` for every stored array; what is in records stays."""
        pairs = zip(self.flat(state), self.leaves, strict=True)
        return self.rebuilt(state, [x if isinstance(x, InRecords) else fn(x, leaf) for x, leaf in pairs])

    def stored_grads(self, arrays: Iterable[object]) -> PyTree:
        """Returns the tree of gradients for user code: padded ones, and those of padded parameters, as nodes."""

        def node(leaf: LeafPlan, x: object) -> object:
            cut = None if leaf.trained else leaf.param.padded_cut
            return leaf.grad.box(x) if cut is None else Padded(x, leaf.path, cut)

        return self.params.tree([node(leaf, x) for leaf, x in zip(self.params.leaves, arrays, strict=True)])
