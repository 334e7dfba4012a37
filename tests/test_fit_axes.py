"""`fit` on meshes with axes that are not ZeRO's: experts that devices divide, parts of rows."""

import collections
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import balance
import decoder
import expert_parallel
import jzero
import pretrain
import training
from jzero.core.plan.table import format_bytes
from tests import hf_models, test_context
from tests.plan_states import abstract_mesh
from tests.tiers import slow

WIDTH, HIDDEN, EXPERTS, ROWS = 10, 14, 4, 96
CONFIG = jzero.ZeroConfig(stage=3, persistence_threshold=0, padding_threshold=0)
SMALL = {"hbm_bytes": 1e9, "remat": ("as_written",), "max_accumulate_steps": 1}
TX = optax.adam(1e-3)
KEY = jax.random.key(0)
BATCH = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def shard_bytes(tree):
    """The bytes of the live buffers of a device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def experts_of(mesh):
    """A function that makes a state whose experts are cut over an axis, and a loss whose rows are."""

    def make_state(key):
        over = NamedSharding(mesh, P("experts"))
        cut = lambda *shape: lax.with_sharding_constraint(jnp.full((EXPERTS, *shape), 0.1), over)
        params = {"up": cut(WIDTH, HIDDEN), "down": cut(HIDDEN, WIDTH), "head": jnp.ones((WIDTH, 3))}
        return jzero.TrainState.create(params=params, tx=TX)

    def of_device(x, up, down):  # [N, W], [E, W, H], [E, H, W]
        every = lax.all_gather(x, "experts", tiled=True)
        return lax.psum_scatter(jnp.einsum("ew,fwh,fhv->ev", every, jnp.sin(up), down), "experts", tiled=True)

    def loss(p, x):
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, P("experts")))
        over = P("experts")
        layer = jax.shard_map(of_device, mesh=mesh, axis_names={"experts"}, in_specs=over, out_specs=over)
        return jnp.square(layer(x, p["up"], p["down"]) @ p["head"]).mean()

    return make_state, loss


@pytest.mark.parametrize("num_data", [3, slow(4)])
def test_a_candidate_counts_what_devices_along_another_axis_hold_and_send(num_data):
    """The state is the live buffers; bytes are those of the compiled program, but for sums that the compiler adds."""
    mesh = jzero.make_mesh(devices=jax.devices()[: 2 * num_data], experts=2, data=num_data)
    make_state, loss = experts_of(mesh)
    choice = jzero.fit(make_state, loss, BATCH, mesh=mesh, config=CONFIG, confirm=False, stages=(3,), **SMALL)
    assert {tuple(x.mesh_shape.items()) for x in choice.tried} == {(("experts", 2), ("data", num_data))}
    state, memory = jzero.init_train_state(make_state, KEY, config=choice.config, mesh=mesh), choice.chosen.memory
    tokens = 4 * ROWS * WIDTH // num_data  # of the devices along the axis
    assert memory.arguments == shard_bytes(state) + tokens
    report = jzero.analyze(jzero.make_train_step(loss, remat=choice.remat), state, BATCH)
    assert report.memory.arguments == memory.arguments
    sent = collections.Counter()
    for row in report.collectives:
        sent[row.kind, row.axis] += row.sent_bytes
    assert sent["all-gather", "experts"] == 2 * sent["reduce-scatter", "experts"] == tokens
    added = sent.pop(("all-reduce", "experts"))
    assert 0 <= added - 4 * 3 * WIDTH < 32, "gradients of the head, of each device's rows, and scalars"
    assert memory.sent_by_axes["experts"] == 3 * tokens // 2
    assert memory.sent_bytes == pytest.approx(sum(sent.values()), abs=16)
    assert f"{format_bytes(3 * tokens // 2)} over experts" in str(choice)


@pytest.mark.slow
@pytest.mark.parametrize("num_data", [3, 4])
def test_the_decoder_with_its_experts_apart(num_data, tmp_path):
    config = hf_models.write_folder(tmp_path, "mixtral", num_local_experts=4, num_hidden_layers=2)
    args = pretrain.parse_args([f"--config={tmp_path}", "--data=x", "--experts=2", "--persistence-threshold=0"])
    mesh = jzero.make_mesh(devices=jax.devices()[: 2 * num_data], experts=2, data=num_data)
    model = training.of_parts(decoder.Decoder(config), args).clone(mesh=mesh)

    def make_state(key):
        params = decoder.Decoder(config).init(key, jnp.zeros((1, 1), jnp.int32))["params"]
        return jzero.TrainState.create(params=expert_parallel.cut_by_expert(params, mesh), tx=TX)

    batch = {"tokens": np.zeros((4 * num_data, 13), np.int32), "weights": np.ones(4 * num_data, np.float32)}
    loss, options = balance.balanced_loss(model), {"config": training.zero_config(args), "confirm": False, **SMALL}
    choice = jzero.fit(make_state, loss, batch, mesh=mesh, stages=(1, 3), **options)
    for x in sorted(choice.tried, key=lambda x: x.config.stage):
        state = jzero.init_train_state(make_state, KEY, config=x.config, mesh=mesh)
        assert x.memory.arguments == shard_bytes(state) + 4 * 14 * 4, "and 4 rows of 13 tokens and a weight"
    step = balance.make_step(model, args)
    state, _ = step(state, batch)
    assert x.memory.arguments == shard_bytes(state) + 4 * 14 * 4, "trained"


def test_a_mesh_without_devices_is_estimated_for_a_machine():
    mesh = abstract_mesh(experts=2, data=4)
    make_state, loss = experts_of(mesh)
    choice = jzero.fit(make_state, loss, BATCH, mesh=mesh, topology="h200:8", config=CONFIG, stages=(0,), **SMALL)
    held = 2 * (WIDTH * HIDDEN * 2) + WIDTH * 3
    assert choice.chosen.memory.params == 4 * held
    assert choice.chosen.memory.time.communication > 0
    assert "To compile, pass a mesh of devices" in choice.notes[0]


def test_a_loss_may_divide_rows_further():
    """Of 2 rows of the devices along the axis, each has one: two micro-batches would leave half a row."""
    mesh = abstract_mesh(experts=2, data=4)
    make_state, loss = experts_of(mesh)
    batch = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
    options = {"mesh": mesh, "config": CONFIG, "stages": (0,), "confirm": False}
    (least,) = jzero.fit(make_state, loss, batch, **options, **SMALL).tried
    scarce = {**SMALL, "hbm_bytes": least.memory.arguments, "max_accumulate_steps": 8}
    choice = jzero.fit(make_state, loss, batch, **options, **scarce)
    assert {x.accumulate_steps for x in choice.tried} == {1}
    assert any("2 micro-batches were not tried: " in x for x in choice.notes)


def test_axes_of_unknown_size_are_refused():
    make_state, loss = experts_of(jzero.make_mesh(experts=2, data=4))
    with pytest.raises(ValueError, match=r"axes \['experts'\].* `mesh=jzero.make_mesh\(experts=..., data=...\)`"):
        jzero.fit(make_state, loss, BATCH, **SMALL)
    with pytest.raises(ValueError, match=r"axes \['experts'\]"):
        jzero.fit(make_state, loss, BATCH, mesh=jzero.make_mesh(), **SMALL)
    with pytest.raises(ValueError, match="`mesh` has 8 devices, and 'h200:16' has 16"):
        jzero.fit(make_state, loss, BATCH, mesh=jzero.make_mesh(experts=2, data=4), topology="h200:16", **SMALL)


@pytest.mark.parametrize("stage", [3, slow(1)])
def test_parts_of_rows(stage):
    params, batch, *_ = test_context.on_one_device()
    mesh = jzero.make_mesh(data=2, context=4)
    state = jzero.TrainState.create(params=params, tx=TX)
    config = dataclasses.replace(CONFIG, context_axis="context")
    loss = test_context.loss_of_parts
    choice = jzero.fit(state, loss, batch, mesh=mesh, config=config, confirm=False, stages=(stage,), **SMALL)
    sharded = jzero.shard_train_state(state, config=choice.config, mesh=mesh)
    rows = sum(x.nbytes for x in batch.values()) // 2  # whole ones
    assert choice.chosen.memory.arguments == shard_bytes(sharded) + rows
    keys = 4 * math.prod(test_context.ROWS) * WIDTH // 2
    report = jzero.analyze(jzero.make_train_step(loss, remat=choice.remat), sharded, batch)
    sent = sum(x.sent_bytes for x in report.collectives)
    assert sum(x.sent_bytes for x in report.collectives if x.axis == "context") == pytest.approx(2 * 0.75 * keys)
    assert choice.chosen.memory.sent_by_axes["context"] == 2 * 0.75 * keys
    assert choice.chosen.memory.sent_bytes == pytest.approx(sent, rel=0.01)
    assert report.memory.arguments == choice.chosen.memory.arguments


def test_replicas_of_a_mesh_stay():
    state = jzero.TrainState.create(params={"w": np.ones((WIDTH, HIDDEN), np.float32)}, tx=TX)
    config, mesh = dataclasses.replace(CONFIG, replica_axis="replica"), abstract_mesh(replica=2, data=4)
    options = {"mesh": mesh, "config": config, "stages": (0, 1), "topology": "h200:8", "confirm": False}
    choice = jzero.fit(state, lambda p, x: jnp.square(x @ p["w"]).mean(), BATCH, **options, **SMALL)
    assert [(x.config, x.mesh_shape) for x in sorted(choice.tried, key=lambda x: x.config.stage)] == [
        (dataclasses.replace(config, stage=stage), {"replica": 2, "data": 4}) for stage in (0, 1)
    ]
