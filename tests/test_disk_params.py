"""Parameters on disk: the numbers of parameters in memory, rows read as counted, errors that change nothing."""

import functools
import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jzero
from jzero.core.disk import rows
from jzero.core.disk.files import PAGE, DiskError, page_aligned
from jzero.core.disk.rows import RowReader, StoredRow, take_row
from jzero.core.disk.stores import DiskStore, RamStore
from jzero.core.state.record_states import records_of
from tests import shared
from tests.checkpoint_states import assert_same_bits, whole
from tests.tiers import slow

LAYERS, D, F = 3, 29, 29
N = 2  # devices; the programs of a record are compiled for each
STACKS = ("h/v", "h/w")


ADAMW = optax.adamw(1e-2)


def params():
    random = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(random.normal(size=shape) / 8, jnp.float32)
    return {"h": {"b": make(LAYERS, F), "v": make(LAYERS, F, D), "w": make(LAYERS, D, F)}, "out": make(D, D)}


def loss_fn(params, batch):
    def layer(x, h):
        return x + jnp.tanh(x @ h["w"] + h["b"][None]) @ h["v"], None

    x, _ = lax.scan(layer, batch.astype(params["out"].dtype), params["h"])
    return jnp.square((x @ params["out"]).astype(jnp.float32) - 1).mean()


@functools.cache
def batch(seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(4 * N, D)), jnp.float32)


def config(offload, precision="bf16", **options):
    options = {
        "persistence_threshold": 400,
        "padding_threshold": 0,
        "rules": {"h/.*": jzero.LeafRule(scan_dim=0)},
    } | options
    return jzero.ZeroConfig(precision=precision, offload=offload, **options)


def on_disk(path, **options):
    return jzero.Offload(optimizer="disk", params="disk", path=path, **options)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """One folder for all, so that plans are equal and each program is compiled once."""
    return tmp_path_factory.mktemp("scratch")


def mesh():
    return jzero.make_mesh(devices=jax.devices()[:N])


def made(offload, precision="bf16", tx=None, params=params, **options):
    state = jzero.TrainState.create(params=params(), tx=tx or ADAMW)
    return jzero.shard_train_state(state, config=config(offload, precision, **options), mesh=mesh())


@functools.cache
def step_of(accumulate_steps=2):
    return jzero.make_train_step(loss_fn, accumulate_steps=accumulate_steps, clip_norm=0.5)


def train(state, seeds=range(3), step=None):
    return shared.train(step or step_of(), state, map(batch, seeds))  # one step for almost all


evaluate = jzero.make_eval_step(loss_fn)


def bytes_read(state):
    return records_of(state).pipeline.store.stats.read_bytes


OPTIMIZERS = {
    "adamw": lambda: ADAMW,
    "lamb": lambda: optax.lamb(1e-2),  # sums over masters in records, then the update
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "sgd": lambda: optax.sgd(1e-2),  # in fp32, a record is the parameter alone
}
CASES = [("adamw", "bf16", 2), slow("lamb", "fp32", 1), slow("momentum", "fp16", 2), slow("sgd", "fp32", 1)]


@pytest.mark.parametrize(("name", "precision", "accumulate_steps"), CASES)
def test_parameters_on_disk_train_like_those_in_memory(scratch, name, precision, accumulate_steps):
    found = []
    for offload in (jzero.Offload(), on_disk(scratch)):
        state = made(offload, precision, OPTIMIZERS[name]())
        state, losses = train(state, step=step_of(accumulate_steps))
        found.append((losses, whole(state)))
    (expected, memory), (losses, disk) = found
    # Records and one program over all fuse other multiply-adds; fp16 rounds a last bit of the master to 2^-11.
    tolerance = 2e-6 if precision != "fp16" else 2e-4
    np.testing.assert_allclose(losses, expected, rtol=1e-6 if precision != "fp16" else 1e-4)
    assert disk.keys() == memory.keys()
    for path, x in memory.items():
        np.testing.assert_allclose(disk[path], x, rtol=tolerance, atol=tolerance, err_msg=path)


def test_rows_are_read_as_counted_and_no_stack_is_in_memory(scratch):
    state = made(on_disk(scratch))
    plan, store = jzero.plan_of(state), records_of(state).pipeline.store
    assert [plan.leaves[i].path for i in plan.params_on_disk] == list(STACKS)
    per_row = N * len(STACKS) * PAGE  # one request each
    step = step_of()
    before = bytes_read(state)
    state, _ = step(state, batch())
    assert bytes_read(state) - before == 2 * 2 * LAYERS * per_row + store.num_bytes  # and each record for the update
    before = bytes_read(state)
    value = evaluate(state, batch())
    assert bytes_read(state) - before == LAYERS * per_row
    before = bytes_read(state)
    loss, grads = jzero.value_and_grad(loss_fn)(state, batch())
    assert bytes_read(state) - before == 2 * LAYERS * per_row
    assert float(loss) == float(value)
    assert grads["h"]["w"].shape == (LAYERS, D, F)

    sizes = {leaf.path: leaf.param.bytes_per_device for leaf in plan.leaves}
    taken = sum(sizes[path] for path in STACKS)
    assert plan.bytes_per_device.params == sum(sizes.values()) - taken
    assert plan.host_bytes_per_device.params == 0
    assert plan.disk_bytes_per_device == 2 * store.num_bytes // N
    memory = [step.lower(x, batch()).compile().memory_analysis() for x in (state, made(jzero.Offload()))]
    assert memory[0].argument_size_in_bytes < memory[1].argument_size_in_bytes - taken
    assert memory[0].temp_size_in_bytes < memory[1].temp_size_in_bytes


def test_a_stack_may_have_more_rows_than_a_row(scratch):
    stack, rows = np.random.default_rng(0).normal(size=(40, 4, 4)).astype(np.float32) / 2, batch()[:, :4]
    loss = lambda params, x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["h"]["w"])[0].mean()
    state = made(on_disk(scratch), "fp32", params=lambda: {"h": {"w": stack}})
    assert jzero.plan_of(state).params_on_disk
    np.testing.assert_allclose(jzero.make_eval_step(loss)(state, rows), loss({"h": {"w": stack}}, rows), rtol=1e-5)


def test_a_read_that_fails_changes_nothing_and_the_step_can_be_repeated(scratch, monkeypatch):
    expected, losses = train(made(on_disk(scratch)))
    step, state = step_of(), made(on_disk(scratch))
    real, left = DiskStore.read, [0]

    def fails(store, record, buffer, **slot):
        left[0] -= 1
        if left[0] == 0:
            raise DiskError("Reading failed: EIO.")
        real(store, record, buffer, **slot)

    state, _ = step(state, batch(0))
    before = whole(state)
    with monkeypatch.context() as patched:
        patched.setattr(DiskStore, "read", fails)
        left[0] = 8
        with pytest.raises(DiskError, match="EIO"):
            step(state, batch(1))
        left[0] = 8
        with pytest.raises(DiskError, match="EIO"):
            evaluate(state, batch(1))
    assert_same_bits(whole(state), before)
    for seed in (1, 2):
        state, metrics = step(state, batch(seed))
        assert float(metrics["loss"]) == losses[seed]
    assert_same_bits(whole(state), whole(expected))


@pytest.mark.slow
def test_reading_editing_and_moving_rows(scratch):
    def make_state(key):
        return jzero.TrainState.create(params=params(), tx=ADAMW)

    state = jzero.init_train_state(make_state, jax.random.key(0), config=config(on_disk(scratch)), mesh=mesh())
    assert_same_bits(whole(state), whole(made(on_disk(scratch))))
    state, _ = train(state, [0])
    expected, value = whole(state), np.full((LAYERS, D, F), 1 / 3, np.float32)
    other = jzero.shard_train_state(state, config=config(jzero.Offload()))
    assert_same_bits(whole(other), expected)
    assert_same_bits(whole(jzero.shard_train_state(other, config=config(on_disk(scratch)))), expected)
    edited = jzero.set_full_param(state, "h/w", value=value)
    assert (jzero.get_full_param(edited, "h/w") == value).all()
    assert (np.asarray(jzero.gather_params(edited)["h"]["w"]) == np.asarray(1 / 3, jnp.bfloat16)).all()
    for read in (lambda s: evaluate(s, batch()), jzero.gather_params, lambda s: jzero.get_full_param(s, "h/w")):
        with pytest.raises(RuntimeError, match="later step overwrote"):
            read(state)
    _, losses = train(edited, [1])
    _, near = train(jzero.set_full_param(other, "h/w", value=value), [1])
    np.testing.assert_allclose(losses, near, rtol=1e-6)


@pytest.mark.slow
def test_checkpoints_are_those_of_states_in_memory(tmp_path, scratch):
    state, _ = train(made(on_disk(scratch)), [0])
    jzero.save_checkpoint(tmp_path / "rows", state)
    near = jzero.restore_checkpoint(tmp_path / "rows", made(jzero.Offload()))
    assert_same_bits(whole(near), whole(state))
    jzero.save_checkpoint(tmp_path / "near", near)
    back = jzero.restore_checkpoint(tmp_path / "near", jzero.abstract_train_state(state))
    assert_same_bits(whole(back), whole(state))
    assert float(evaluate(back, batch())) == float(evaluate(state, batch()))


def test_errors_say_what_else_to_do(scratch):
    host = r"params='host'"
    for options, message in (
        ({"optimizer": "host"}, rf"beside their masters .*'host': set `optimizer='disk'` too, or `{host}`"),
        ({"optimizer": "disk", "path": "x", "compute": "host", "delay": 1}, rf"set `delay=0`, or `{host}`"),
    ):
        with pytest.raises(ValueError, match=message):
            jzero.Offload(params="disk", **options)
    with pytest.raises(ValueError, match=r"needs stage 3, .* got stage 2"):
        config(on_disk(scratch), stage=2)
    with pytest.raises(ValueError, match=rf"trained and cut.*`{host}`"):
        made(on_disk(scratch), persistence_threshold=10**6)
    plain = jzero.TrainState.create(params=params(), tx=optax.adamw(1e-2))
    with pytest.raises(ValueError, match=rf"got \('data', 'model'\).*`{host}`"):
        jzero.shard_train_state(plain, config=config(on_disk(scratch)), mesh=jzero.make_mesh(data=4, model=2))
    state = made(on_disk(scratch))
    penalty = lambda params, batch: loss_fn(params, batch) + jnp.square(params["h"]["w"]).sum()
    with pytest.raises(ValueError, match=rf"'h/w', of shape.*`{host}`"):
        jzero.make_train_step(penalty, check_rows=False)(state, batch())
    with pytest.raises(ValueError, match=rf"'h/v' is on disk.*`{host}`"):
        jax.jit(lambda s: evaluate(s, batch()))(state)
    with pytest.raises(TypeError, match="'h/w' is on disk: it is no array"):
        jax.jit(lambda p: jnp.sum(p["h"]["w"]))(state.params)
    with pytest.raises(ValueError, match=r"outside of `jax.jit`. Use them"):
        jax.jit(lambda s: jzero.natural_params(s)["out"])(state)
    with pytest.raises(ValueError, match="steps of `make_train_step` alone"):
        state.apply_gradients(grads=state.params)
    replaced = state.replace(params=params())
    with pytest.raises(ValueError, match="'h/v' is an array"):
        jzero.make_train_step(loss_fn)(replaced, batch())
    with pytest.raises(TypeError, match="This state has shapes but no values"):
        evaluate(jzero.abstract_train_state(state), batch())


@pytest.mark.slow
def test_records_of_single_rows_that_unrolled_layers_read_change_no_bit_of_an_update(scratch):
    def unrolled(params, batch):
        x = batch.astype(params["h"]["w"].dtype)
        for i in range(LAYERS):
            x = x + jnp.tanh(x @ params["h"]["w"][i] + params["h"]["b"][i][None])[:, :D]
        return jnp.square(x.astype(jnp.float32) - 1).mean()

    def fewer():
        return {"h": {name: x for name, x in params()["h"].items() if name != "v"}}

    step, found = jzero.make_train_step(unrolled), []
    for offload in (jzero.Offload(optimizer="disk", path=scratch), on_disk(scratch, chunk_bytes=2048)):
        state, losses = train(made(offload, params=fewer), [0, 1], step)
        found.append((losses, whole(state)))
    assert found[0][0] == found[1][0]
    assert_same_bits(found[0][1], found[1][1])


# The reader by itself.

COUNTS = (3, 5)
STACK = [StoredRow((2 * i, 2 * i + 1), COUNTS, (2, 4), np.dtype(np.int16)) for i in range(4)]  # each in two records


def reader_of_rows(threads=2):
    store = RamStore([2 * PAGE] * 8, num_slots=1)
    store.heads = (PAGE,) * 8
    for record in range(8):
        buffer = page_aligned(2 * PAGE)
        count = COUNTS[record % 2]
        buffer.view(np.int16)[:count] = np.arange(count) + 100 * (record // 2) + (record % 2) * COUNTS[0]
        store.write(record, buffer)
    return RowReader(store, [STACK, STACK], threads), store


@pytest.mark.parametrize("taken", [[0, 1, 2, 3, 3, 2, 1, 0], [2, 0, 3], [0, 1, 3, 2, 2]], ids=str)
def test_rows_come_in_any_order(taken):
    reader, _ = reader_of_rows()
    reader.begin([1, -1])
    kept = []
    for row in taken:
        for first in reader.first:
            kept.append((row, take_row(np.array([reader.ticket, first + row], np.int32), (2, 4), np.int16)))
    for row, x in kept:  # each has memory of its own as long as it is used
        np.testing.assert_array_equal(x, 100 * row + np.arange(8).reshape(2, 4))
    reader.check()
    reader.close()


def test_what_a_program_gets_after_an_error_is_zero(monkeypatch):
    reader, store = reader_of_rows()
    monkeypatch.setattr(rows, "WAIT_S", 0.05)
    goes_on = threading.Event()
    monkeypatch.setattr(store, "read", lambda *_: goes_on.wait(10))
    reader.begin([1])
    assert not reader.take(0).any()
    assert not reader.take(3).any()
    with pytest.raises(DiskError, match=r"not read within 0.05 seconds"):
        reader.check()
    goes_on.set()
    reader.check()  # said once
    ticket = reader.ticket
    reader.close()
    del reader
    gc.collect()
    assert not take_row(np.array([ticket, 0], np.int32), (2, 4), np.int16).any()


def test_the_head_of_a_record_has_a_checksum(tmp_path):
    store = DiskStore(tmp_path, [3 * PAGE], [PAGE])
    buffer = page_aligned(3 * PAGE)
    buffer[:] = np.arange(buffer.size) % 251
    store.write(0, buffer)
    store.commit()
    head = page_aligned(PAGE)
    store.read(0, head)
    np.testing.assert_array_equal(head, buffer[:PAGE])
    assert store.stats.read_bytes == PAGE
    other = page_aligned(3 * PAGE)
    store._files[store.slot].write(other, 0)
    for part in (head, other):
        with pytest.raises(DiskError, match="the checksum of its"):
            store.read(0, part)
    store.close()
