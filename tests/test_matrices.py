"""Each matrix of an update on one device: the numbers of optax on one device, and what devices exchange for them."""

from __future__ import annotations

import functools
import math

import jax
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jzero
from jzero import _compat
from jzero.analysis.collectives import find_collectives
from tests import matrix_models as models
from tests.tiers import pairs, singles, slow, stages

STEPS = 3
CLOSE = 1e-13
"""Of the largest element of a leaf, in float64. Sums in another order differ by some 1e-16; Adam, as it divides
small numbers, and five iterations of Newton-Schulz make that up to 4e-15. In float32 it is 3e-6, and no less if all
devices compute all matrices."""


@pytest.fixture(autouse=True)
def _in_float64():
    with jax.enable_x64(True):
        yield


MUON = {
    "default": {},
    "adaptive_aol": {"adaptive": True, "preconditioning": "aol"},
    "schatten": {"preconditioning": "schatten"},
    "spectral": {"preconditioning": "spectral"},
    "dion": {"ns_coeffs": "dion"},
    "no_nesterov": {"nesterov": False},
}

OPTIMIZERS = {
    "muon": models.muon,
    "soap": models.soap,
    "shampoo": models.shampoo,
    "galore": lambda: optax.contrib.galore(1e-2, rank=4, update_proj_gap=2),
}


@functools.cache
def trained_alone(kind, variant="default"):
    return models.train_alone(models.params(kind), models.muon(**MUON[variant]), STEPS)


@functools.cache
def updated_alone(kind, name):
    return models.update_alone(models.params(kind, 16, 32, 0.3), OPTIMIZERS[name](), STEPS)


def check(state, reference, within=CLOSE):
    params, opt_state = models.deviation(state, reference)
    assert params <= within
    assert opt_state <= within


@pairs(variant=list(MUON), kind=["unrolled", "stack11", "stack8"], stage=[3, 0, 1, 2])
def test_muon_trains_like_optax_on_one_device(kind, variant, stage):
    state = models.train(models.params(kind), models.muon(**MUON[variant]), STEPS, stage=stage)
    check(state, trained_alone(kind, variant))


@singles(kind=["unrolled", "stack5", "stack8", "experts"], name=["muon", "soap", "shampoo"], stage=[3, 0, 1])
def test_updates_are_those_of_optax_on_one_device(name, kind, stage):
    state = models.update(models.params(kind, 16, 32, 0.3), OPTIMIZERS[name](), STEPS, stage=stage)
    check(state, updated_alone(kind, name), 0.0 if name == "soap" else CLOSE)


@stages(3)
def test_galore_updates_like_on_one_device(stage):
    """Its decomposition is of one matrix each, so stacks of layers are no case."""
    state = models.update(models.params("unrolled", 16, 32, 0.3), OPTIMIZERS["galore"](), STEPS, stage=stage)
    check(state, updated_alone("unrolled", "galore"))


@pytest.mark.parametrize(
    ("kind", "config", "sizes"),
    [
        ("unrolled", {"persistence_threshold": 3000}, {}),
        slow("stack11", {"persistence_threshold": 3000}, {}),
        ("stack8", {"replica_axis": "replica"}, {"replica": 2, "data": 4}),
        ("unrolled", {"node_axis": "node"}, {"node": 2, "data": 4}),
        ("stack8", {"node_axis": "node", "secondary_params": True}, {"node": 4, "data": 2}),
        slow("stack11", {"node_axis": "node"}, {"node": 2, "data": 3}),
        slow("stack8", {"node_axis": "node", "replica_axis": "replica"}, {"replica": 2, "node": 2, "data": 2}),
        slow("stack8", {}, {"data": 3}),
        slow("unrolled", {}, {"data": 5}),
        slow("unrolled", {"stage": 2, "offload": jzero.Offload()}, {}),
    ],
)
def test_other_layouts_train_like_one_device(kind, config, sizes):
    devices = jax.devices()[: math.prod(sizes.values())] if sizes else None
    mesh = jzero.make_mesh(devices=devices, **sizes) if sizes else None
    state = models.train(models.params(kind), models.muon(), STEPS, mesh=mesh, **{"stage": 3, **config})
    check(state, trained_alone(kind))


@pytest.mark.filterwarnings("ignore:The optimizer needs more than single elements")
@pytest.mark.parametrize("optimizer", [slow("host")])
@stages(2, of=[2, 3])
def test_state_on_the_host_is_updated_like_on_one_device(stage, optimizer):
    offload = jzero.Offload(optimizer=optimizer)
    state = models.train(models.params("unrolled"), models.muon(), STEPS, stage=stage, offload=offload)
    check(state, trained_alone("unrolled"))


@stages(1, 3)
def test_masters_of_16_bit_parameters_are_updated_in_32_bits(stage):
    with jax.enable_x64(False):
        params = models.params("unrolled")
        reference = models.update_alone(params, models.muon(), STEPS, "bfloat16")
        state = models.update(params, models.muon(), STEPS, "bfloat16", stage=stage, precision="bf16")
        check(state, reference, 4e-6)


def on_two_axes(params, mesh):
    """Returns parameters of which the first layer's are cut over another mesh axis."""
    first, *rest = params["layers"]
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    first = {**first, "a": place(first["a"], None, "model"), "b": place(first["b"], "model", None)}
    return {**params, "layers": [first, *rest]}


@stages(3, of=[1, 3])
def test_leaves_that_other_axes_cut_train_like_one_device(stage):
    mesh = jzero.make_mesh(data=4, model=2)
    params = on_two_axes(models.params("unrolled"), mesh)
    check(models.train(params, models.muon(), STEPS, mesh=mesh, stage=stage), trained_alone("unrolled"))


def test_one_product_of_several_parameters_runs_on_all_devices():
    params, tx = models.params("unrolled", 16, 32, 0.3), models.shampoo_one_for_all()
    reference = models.update_alone(params, tx, STEPS)
    check(models.update(params, tx, STEPS, stage=3), reference)


def outside(jaxpr):
    """Yields the equations of a program that are in no `shard_map`."""
    for eqn in _compat.open_jaxpr(jaxpr)[0].eqns:
        yield eqn
        if eqn.primitive.name != "shard_map":
            for inner in _compat.contained_jaxprs(eqn):
                yield from outside(inner)


@functools.cache
def collectives(kind, name, stage):
    """Returns the plan of a step, its program, and the collectives of what XLA makes of it."""
    tx = models.muon() if name == "muon" else optax.adamw(1e-2)
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=0)
    state = jzero.shard_train_state(jzero.TrainState.create(params=models.params(kind), tx=tx), config=config)
    step = jzero.make_train_step(models.loss)
    lowered = step.lower(state, models.batch(0))
    return jzero.plan_of(state), step.trace(state, models.batch(0)).jaxpr, find_collectives(lowered.compile().as_text())


def sent(found, kind):
    return sum(c.elements for c in found if c.kind == kind)


@pytest.mark.parametrize(("kind", "stage"), [("stack8", 3), ("stack8", 1), slow("unrolled", 2), slow("stack11", 3)])
def test_devices_exchange_a_share_of_each_matrix_and_gather_nothing(kind, stage):
    plan, program, muon = collectives(kind, "muon", stage)
    _, _, adamw = collectives(kind, "adamw", stage)
    assert "dot_general" not in {eqn.primitive.name for eqn in outside(program)}
    assert sent(muon, "all-gather") <= sent(adamw, "all-gather")
    assert sent(muon, "reduce-scatter") == sent(adamw, "reduce-scatter")
    assert sent(muon, "collective-permute") == 0
    stacks = [leaf for leaf in plan.leaves if leaf.path.endswith(("a", "b"))]
    others = [leaf for leaf in plan.leaves if leaf.path in ("in", "odd", "out")]
    matrices = sum(leaf.param.size for leaf in stacks)
    # In a slot, each device has room for the largest matrix of any device, in and out.
    slots = len(others) + len(stacks)
    largest = max(math.prod(leaf.param.shape[-2:]) for leaf in (*stacks, *others))
    assert 0 < sent(muon, "all-to-all") <= 1.1 * 2 * matrices / plan.num_shards + 2 * slots * largest
