"""Who owns a leaf of the optimizer, whatever it is named."""

import optax
import pytest
from jax.sharding import PartitionSpec as P

from tests.plan_states import OPTIMIZERS, PARAMS, RULES, momentum_that_looks_into_the_parameters, plan_for


def owner_by_name(path):
    """The parameter that an optimizer leaf belongs to. All names here are unlike any of optax's own."""
    names = [name for name in path.split("/") if name in PARAMS]
    assert len(names) <= 1
    return names[0] if names else None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_leaf_is_cut_like_its_parameter(name):
    tx = OPTIMIZERS[name]()
    plan = plan_for(PARAMS, num_shards=8, tx=tx, stage=3, persistence_threshold=0, rules=RULES)
    grads = {leaf.path: leaf.grad for leaf in plan.leaves}
    owned = set()
    for leaf in plan.opt_leaves:
        owner = owner_by_name(leaf.path)
        assert (None if leaf.owner is None else plan.leaves[leaf.owner].path) == owner, leaf.path
        if owner is None:
            assert leaf.cut is None, leaf.path
        elif leaf.shape == PARAMS[owner]:
            owned.add(owner)
            assert leaf.spec == grads[owner].spec, leaf.path
            assert leaf.stored_shape == grads[owner].stored_shape, leaf.path
        else:  # such as adafactor's vectors
            expected = next((d for d, size in enumerate(leaf.shape) if size % 8 == 0 and leaf.size >= 8), None)
            assert leaf.cut is None if expected is None else leaf.cut.dim == expected, leaf.path
            assert leaf.stored_shape == leaf.shape, "never padded"
    assert owned, "some leaves have their parameter's shape"
    assert grads["first"].spec != grads["second"].spec


@pytest.mark.parametrize("by_hand", [False, True])
def test_parameter_named_like_another_or_like_a_field_of_the_optimizer_is_not_confused(by_hand):
    params = {"w": (64, 128), "mu": {"w": (128, 64)}, "nu": {"w": (64, 64), "mu": (96,)}, "count": (64,)}
    tx = optax.chain(momentum_that_looks_into_the_parameters() if by_hand else optax.adam(1e-3))
    plan = plan_for(params, num_shards=8, tx=tx, stage=3, persistence_threshold=0)
    (state,) = plan.opt_state
    assert (state["mu"] if by_hand else state[0].mu) == plan.params
    if not by_hand:
        assert state[0].nu == plan.params
        assert state[0].count == P()


def test_parameters_may_be_one_array():
    plan = plan_for((64, 128), num_shards=8, stage=3, persistence_threshold=0)
    assert plan.params == P(None, "data")
    assert plan.opt_state[0].mu == plan.opt_state[0].nu == P(None, "data")
