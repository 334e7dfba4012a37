"""Each matrix of an update on one device: the numbers of optax on one device, and what devices exchange for them."""

import functools
import json
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jzero
from jzero.core.base import compat
from jzero.core.jaxpr.equations import equations_of
from jzero.core.plan import planned_matrices
from tests import matrix_models as models
from tests.drawn import to_jax
from tests.shared import sharded
from tests.tiers import slow

STEPS = 3
CLOSE = 1e-12
"""Of the largest element of a leaf, in float64. Sums in another order differ by some 1e-16; Adam, as it divides small
numbers, and five iterations of Newton-Schulz make that up to 3e-13. In float32 it is 3e-6, wherever matrices are."""


@pytest.fixture(autouse=True)
def _in_float64():
    with jax.enable_x64(True):
        yield


OPTIMIZERS = {
    "muon": models.muon,
    "muon_adaptive": lambda: models.muon(adaptive=True, preconditioning="aol"),
    "soap": models.soap,
    "galore": lambda: optax.contrib.galore(1e-2, rank=4, update_proj_gap=2),
}


@functools.cache
def updated_alone(kind, name):
    return models.update_alone(models.few_params(kind), OPTIMIZERS[name](), STEPS)


def check(state, reference, within=CLOSE):
    params, opt_state = models.deviation(state, reference)
    assert params <= within
    assert opt_state <= within


@pytest.mark.filterwarnings("ignore:The optimizer multiplies")  # SOAP here takes every stack of vectors
@pytest.mark.parametrize(
    ("kind", "name", "config", "sizes"),
    [
        ("stack5", "soap", {}, {"data": 8}),
        ("unrolled", "galore", {}, {"data": 8}),  # its decomposition is of one matrix each, so of no stack
        ("stack8", "muon", {}, {"data": 3}),  # gradients are given: float32 would round their mean over three
        slow("unrolled", "muon", {"persistence_threshold": 520}, {"data": 5}),
        slow("stack8", "muon", {"replica_axis": "replica", "node_axis": "node"}, {"replica": 2, "node": 2, "data": 2}),
        slow("stack11", "muon_adaptive", {"context_axis": "context"}, {"data": 2, "context": 3}),
    ],
)
def test_updates_are_those_of_optax_on_one_device(kind, name, config, sizes):
    mesh = jzero.make_mesh(devices=jax.devices()[: math.prod(sizes.values())], **sizes)
    params = models.few_params(kind)
    state, _ = models.update(params, OPTIMIZERS[name](), STEPS, mesh=mesh, **{"stage": 3, **config})
    check(state, updated_alone(kind, name))
    if "persistence_threshold" in config:
        assert [leaf.param.cut is None for leaf in jzero.plan_of(state).leaves] == [True, True, True, True, False]


@pytest.mark.filterwarnings("ignore:The optimizer multiplies")
def test_each_matrix_gets_what_belongs_to_its_parameter_and_its_layer():
    params = models.few_params("stack11") | {"experts": models.few_params("experts")["stack"]}
    state, _ = models.update(params, models.weighted_products(), STEPS, stage=3)
    check(state, models.update_alone(params, models.weighted_products(), STEPS))
    work = jzero.plan_of(state).matrices
    assert not work.whole
    assert max(kind.num for kind in work.kinds) >= 2


@pytest.mark.filterwarnings("ignore:The optimizer multiplies")
def test_masters_of_16_bit_parameters_are_updated_in_32_bits():
    with jax.enable_x64(False):
        params, tx = models.few_params("stack5"), models.weighted_products()
        reference = models.update_alone(params, tx, STEPS, "bfloat16")
        state, _ = models.update(params, tx, STEPS, "bfloat16", stage=1, precision="bf16")
        check(state, reference, 4e-6)


@pytest.mark.slow
def test_leaves_that_other_axes_cut_are_updated_like_on_one_device():
    mesh = jzero.make_mesh(data=4, model=2)
    params = models.few_params("unrolled")
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    first, second = params["layers"]
    layers = [{**first, "a": place(first["a"], None, "model")}, {**second, "a": place(second["a"], "model", None)}]
    state, _ = models.update({**params, "layers": layers}, models.muon(), STEPS, mesh=mesh, stage=3)
    check(state, updated_alone("unrolled", "muon"))
    assert [(x.paths, x.reason) for x in jzero.plan_of(state).matrices.whole] == [
        ((f"layers/{i}/a",), "other mesh axes shard it") for i in range(2)
    ]


def test_one_product_of_several_parameters_runs_on_all_devices():
    params, tx = models.params("unrolled", 16, 32, 0.3), models.shampoo_one_for_all()
    reference = models.update_alone(params, tx, STEPS)
    state, _ = models.update(params, tx, STEPS, stage=3)
    check(state, reference)
    work = jzero.plan_of(state).matrices
    assert not work.kinds
    assert {x.reason for x in work.whole} == {"one product takes several parameters"}
    assert ("layers/0/a", "layers/0/b") in {x.paths for x in work.whole}


def exchanged(jaxpr):
    """Returns the elements that a device has in all exchanges of a program."""
    found = [eqn for eqn in equations_of(jaxpr) if eqn.primitive.name == "all_to_all"]
    return sum(math.prod(v.aval.shape) for eqn in found for v in eqn.invars)


def first_uses(jaxpr, name):
    """Yields what first uses each result of the equations of a name, where it has its natural shape."""
    for eqn in jaxpr.eqns:
        for found in compat.contained_jaxprs(eqn):
            yield from first_uses(found, name)
        for v in eqn.outvars if eqn.primitive.name == name else ():
            user = next(x for x in jaxpr.eqns if v in x.invars)
            while user.primitive.name in ("reshape", "slice"):
                user = next(x for x in jaxpr.eqns if user.outvars[0] in x.invars)
            yield user


def test_results_are_laid_out_like_their_leaves_at_once():
    """Else the compiler may have whole matrices on every device."""
    params = models.few_params("unrolled")
    state = sharded(params, models.muon())
    update = jax.make_jaxpr(lambda state, grads: state.apply_gradients(grads=grads))
    uses = list(first_uses(compat.open_jaxpr(update(state, models.grads(params, 0)))[0], "shard_map"))
    assert [x.primitive.name for x in uses] == 3 * ["sharding_constraint"]
    planned = {leaf.param.shape: leaf.param.sharding for leaf in jzero.plan_of(state).leaves}
    assert [x.params["sharding"] for x in uses] == [planned[x.outvars[0].aval.shape] for x in uses]


def squares(plan):
    """Returns the optimizer leaves that are square matrices, or stacks of them."""
    return [leaf for leaf in plan.inner_leaves if len(leaf.shape) > 1 and leaf.shape[-1] == leaf.shape[-2]]


@pytest.mark.parametrize("num", [8, 16])
def test_bases_of_a_stack_stay_where_its_slices_are_computed(num):
    """What is shaped like the parameter travels: gradient and two moments in, update and second moment out."""
    params = {"stack": models.params(f"stack{num}")["stack"]}
    del params["stack"]["s"]
    state = sharded(params, models.soap())
    plan = jzero.plan_of(state)
    bases = squares(plan)
    assert len(bases) == 8
    assert all(leaf.cut is not None and leaf.cut.dim == 0 for leaf in bases)
    program = jax.make_jaxpr(state.tx.update)(models.grads(params, 0), state.opt_state, state.params)
    elements = sum(leaf.param.size for leaf in plan.leaves)
    assert exchanged(program) == 5 * elements / plan.num_shards


@pytest.mark.parametrize(("tx", "stays"), [(models.soap, True), (models.muon, False)])
def test_slices_go_to_devices_that_have_time_unless_their_bases_are_on_another(tx, stays):
    params = {"stack": jnp.ones((8, 24, 32)), "b0": jnp.ones((48, 40)), "b1": jnp.ones((48, 40))}
    work = jzero.plan_of(sharded(params, tx())).matrices
    costs = {kind.num: kind.flops for kind in work.kinds}
    assert 0.2 < costs[8] / costs[2] < 0.5
    assert work.busiest == costs[2] + (costs[8] if stays else 0)


def test_state_that_several_parameters_move_belongs_to_none():
    """Such as a history of the norms of all gradients."""

    def update(updates, state, params=None):
        total = optax.tree.norm(updates)
        mixed = updates["a"][:8, 0] + updates["b"][:8, 0]
        own = state["own"] + updates["a"].sum(1)
        return updates, {"history": jnp.append(state["history"][1:], total), "mixed": mixed, "own": own}

    init = lambda params: {"history": jnp.zeros(16), "mixed": jnp.zeros(8), "own": jnp.zeros(16)}
    params = {"a": jnp.ones((16, 24)), "b": jnp.ones((32, 24))}
    plan = jzero.plan_of(sharded(params, optax.GradientTransformation(init, update)))
    assert {leaf.path: leaf.owner for leaf in plan.inner_leaves} == {"history": None, "mixed": None, "own": 0}


def test_the_plan_tells_that_matrices_are_known_in_the_step():
    def update(updates, state, params=None, *, value):
        return jax.tree.map(lambda g: value * g @ g.T @ g, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    plan = jzero.plan_of(sharded({"w": jnp.ones((16, 24))}, tx))
    assert "matrix work over data (N=8): known when the step is traced" in str(plan)
    assert json.loads(plan.to_json())["matrices"]["unknown"].startswith("known when the step is traced")


@pytest.mark.parametrize("large", [64, 2**20])
def test_what_only_the_trace_knows_to_be_whole_causes_a_warning(monkeypatch, large):
    """The plan could not be made from an update that asks for the loss, so the step itself tells."""
    monkeypatch.setattr(planned_matrices, "LARGE", large)

    def update(updates, state, params=None, *, value):
        return {"a": value * updates["a"] @ updates["b"], "b": updates["b"]}, state

    tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    state = sharded({"a": jnp.ones((16, 16)), "b": jnp.ones((16, 16))}, tx)
    grads = models.grads(state.params, 0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        state.tx.update(grads, state.opt_state, state.params, value=jnp.float32(2))
    assert any("a, b (16, 16): one product takes several parameters" in str(x.message) for x in told) == (large == 64)


def test_an_update_without_matrix_work_is_traced_for_one_parameter_of_each_kind():
    adamw, seen = optax.adamw(1e-3), []

    def update(updates, state, params=None):
        seen.append(len(jax.tree.leaves(updates)))
        return adamw.update(updates, state, params)

    tx = optax.GradientTransformation(adamw.init, update)
    sharded({f"w{i}": jnp.ones((16, 8 * (1 + i % 2))) for i in range(6)}, tx)
    assert seen == [2]


@pytest.mark.parametrize("muon", ["a", "b"])
def test_matrix_work_is_found_though_another_parameter_of_that_shape_has_none(muon):
    labels = {name: "muon" if name == muon else "adam" for name in "ab"}
    tx = optax.partition({"adam": optax.adam(1e-3), "muon": models.muon()}, labels)
    plan = jzero.plan_of(sharded({"a": jnp.ones((16, 16)), "b": jnp.ones((16, 16))}, tx))
    assert [kind.paths for kind in plan.matrices.kinds] == [(muon,)]


def test_stacks_of_vectors_that_are_multiplied_cause_a_warning():
    stack = models.params("stack8")["stack"]
    with pytest.warns(UserWarning, match=r"multiplies \['stack/s'\]"):
        sharded({"stack": stack}, models.soap())
    sharded({"stack": stack}, models.soap(), rules={"stack/s": jzero.LeafRule(scan_dim=-1)})


def test_stacks_of_matrices_that_muon_leaves_to_adam_cause_a_warning():
    params = models.params("stack8")
    del params["stack"]["s"]
    with pytest.warns(UserWarning, match=r"none of \['stack/a', 'stack/b'\]"):
        sharded(params, optax.contrib.muon(1e-3))
    sharded(params, models.muon())  # told which matrices they are


def test_a_large_matrix_on_every_device_causes_a_warning():
    params = {"a": jnp.zeros((1024, 1024)), "b": jnp.zeros((1024, 8))}

    def update(updates, state, params=None):
        return {"a": updates["b"] @ updates["b"].T @ updates["a"], "b": updates["b"]}, state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    with pytest.warns(UserWarning, match=r"a, b \(1024, 1024\): one product") as caught:
        sharded(params, tx)
    assert caught[0].filename == sharded.__code__.co_filename


def without_state(update):
    return optax.GradientTransformation(
        lambda params: optax.EmptyState(), lambda updates, state, params=None: (update(updates), state)
    )


def test_matrices_that_wait_for_others_are_computed_after_them():
    def update(g):
        first = g["a"] @ g["a"].T @ g["a"]
        weight = jnp.linalg.norm(first) / (1 + jnp.linalg.norm(g["b"]))
        return {"a": first, "b": ((g["b"] @ g["b"].T) * weight) @ g["b"]}

    draw = np.random.default_rng(0).normal
    params = {"a": to_jax(0.1 * draw(size=(16, 24))), "b": to_jax(0.1 * draw(size=(40, 7)))}
    state, _ = models.update(params, without_state(update), STEPS, stage=3)
    check(state, models.update_alone(params, without_state(update), STEPS))
    kinds = jzero.plan_of(state).matrices.kinds
    assert [kind.paths for kind in kinds] == [("a",), ("b",)]
    assert jzero.plan_of(state).matrices.busiest == sum(kind.flops for kind in kinds)  # not at once


def test_cpus_factorize_a_stack_that_cannot_be_sliced_on_each_device():
    """Its kernels for several matrices would wait for threads that collectives of other devices hold."""

    def update(g):
        q = jnp.linalg.qr(jnp.swapaxes(g["w"], 1, 2))[0]
        return {"w": jnp.swapaxes(q - q.mean(0, keepdims=True), 1, 2)}

    params = {"w": to_jax(0.1 * np.random.default_rng(0).normal(size=(3, 16, 24)))}
    tx = without_state(update)
    state, _ = models.update(params, tx, STEPS, stage=3)
    check(state, models.update_alone(params, tx, STEPS))
    (whole,) = jzero.plan_of(state).matrices.whole
    assert (whole.paths, whole.reason) == (("w",), "CPUs cannot factorize several matrices at once beside collectives")
    plain = jzero.TrainState.create(params=params, tx=tx)
    elsewhere = jzero.plan_train_state(plain, stage=3, mesh=jax.sharding.AbstractMesh((8,), ("data",)))
    assert not elsewhere.matrices.whole
    assert [(kind.num, kind.shape) for kind in elsewhere.matrices.kinds] == [(1, (3, 16, 24))]
