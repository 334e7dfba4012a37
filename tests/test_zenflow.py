"""ZenFlow: equal to what it should be equal to, and else to a loop on one device that keeps its rules."""

import copy
import math
import os
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import save_file

import jzero
from jzero.core.disk.files import DiskError, UnnamedFile
from jzero.core.disk.stores import RamStore
from jzero.core.records import schedules
from jzero.core.records.run import RecordPass
from jzero.core.records.schedules import in_thread
from jzero.core.state.init import lower_init
from jzero.core.state.record_states import records_of
from tests import models, shared
from tests.checkpoint_states import arrays, assert_same_bits
from tests.offload_states import ADAMW, ONE_LAYER, step_of, whole
from tests.tiers import slow


def sharded(offload, *, stage=3, precision="fp32", tx=ADAMW, dtype=None, devices=2, sizes=ONE_LAYER):
    """Of one layer, since each leaf is several programs; records are a part of its kernel."""
    params = models.mlp_params(dtype or jnp.float32, sizes)
    return shared.sharded(params, tx, stage, mesh=devices, precision=precision, offload=offload)


def on_host(**options):
    return jzero.Offload(optimizer="host", compute="host", chunk_bytes=512, **options)


def flow(**options):
    return on_host(zenflow=jzero.ZenFlow(**options))


def train(state, steps=5, start=0, **options):
    return shared.train(step_of(**options), state, (models.mlp_batch(48, seed=i) for i in range(start, start + steps)))


TX = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 20), weight_decay=0.1)


@jax.jit
def update_chosen(grads, state, params, number, masks):
    """Returns parameters and state after the update of chosen elements, with the numbers of a step."""
    numbered = jax.tree.map(lambda x: x if x.ndim else jnp.full_like(x, number), state)
    updates, new = TX.update(grads, numbered, params)
    pick = lambda new, old: jax.tree.map(jnp.where, masks, new, old)
    adam, *others = numbered
    adam = adam._replace(mu=pick(new[0].mu, adam.mu), nu=pick(new[0].nu, adam.nu))
    return pick(optax.apply_updates(params, updates), params), (adam, *others)


@jax.jit
def loss_and_grads(params, batch, clip_norm):
    """Returns the loss and gradients as they are and clipped."""
    loss, grads = jax.value_and_grad(models.mlp_loss)(params, batch)
    scale = jnp.minimum(1, clip_norm / (optax.tree.norm(grads) + 1e-6))
    return loss, grads, jax.tree.map(lambda g: g * scale, grads)


def chosen_columns(plan, grads, ratio):
    """Which elements each device chooses: of each part, the columns with the largest gradients."""
    masks = []
    for leaf, grad in zip(plan.leaves, jax.tree.leaves(grads), strict=True):
        cut = leaf.grad.cut
        norms = np.square(np.moveaxis(np.asarray(grad), cut.dim, 0).reshape(grad.shape[cut.dim], -1)).sum(1)
        norms = np.pad(norms, (0, cut.stored_size - len(norms))).reshape(cut.num_shards, -1)
        count = min(norms.shape[1], max(1, round(ratio * norms.shape[1])) if ratio else 0)
        mask = np.zeros(norms.shape, bool)
        for device, row in enumerate(norms):
            mask[device, np.argsort(-row, kind="stable")[:count]] = True
        mask = mask.reshape(-1)[: grad.shape[cut.dim]]
        masks.append(np.broadcast_to(np.expand_dims(mask, [d for d in range(grad.ndim) if d != cut.dim]), grad.shape))
    return jax.tree.unflatten(jax.tree.structure(grads), masks)


class Loop:
    """ZenFlow on one device, in float64, with all columns in one place."""

    def __init__(self, plan, settings, clip_norm, sizes):
        self.plan, self.settings, self.clip_norm = plan, settings, clip_norm
        self.params = models.mlp_params(jnp.float64, sizes)
        self.state = TX.init(self.params)
        self.masks, self.sums, self.late, self.count, self.step = None, None, None, 0, 0

    def apply(self, grads, number, masks):
        self.params, self.state = update_chosen(grads, self.state, self.params, number, masks)

    def finish_pass(self):
        if self.late is not None:
            self.apply(*self.late, jax.tree.map(np.logical_not, self.masks))
        self.late = None

    def run(self, batch):
        settings, t = self.settings, self.step
        loss, grads, scaled = jax.tree.map(np.asarray, loss_and_grads(self.params, batch, self.clip_norm))
        self.step += 1
        if t < settings.warm_up_steps:
            self.apply(scaled, t, jax.tree.map(lambda g: np.ones(g.shape, bool), grads))
            return float(loss)
        if self.masks is None or (settings.topk_ratio and t % settings.select_interval == 0):
            self.masks = chosen_columns(self.plan, grads, settings.topk_ratio)
        self.sums = scaled if self.sums is None else jax.tree.map(np.add, self.sums, scaled)
        self.count += 1
        self.apply(scaled, t, self.masks)
        if (t + 1) % settings.update_interval == 0:
            self.finish_pass()
            self.begin(t)
            if not settings.overlap or (settings.topk_ratio and (t + 1) % settings.select_interval == 0):
                self.finish_pass()
        return float(loss)

    def begin(self, t):
        self.late = jax.tree.map(lambda x: x / self.count, self.sums), t
        self.sums, self.count = None, 0

    def apply_pending(self):
        self.finish_pass()
        if self.count:
            self.begin(self.step - 1)
            self.finish_pass()


SETTINGS = {
    "overlapped": {"topk_ratio": 0.2, "update_interval": 2, "select_interval": 4},
    "warm-up, waits": {
        "topk_ratio": 0.3,
        "update_interval": 3,
        "select_interval": 3,
        "warm_up_steps": 3,
        "overlap": False,
    },
    "warm-up, none near": {"topk_ratio": 0, "update_interval": 3, "select_interval": 3, "warm_up_steps": 3},
    "warm-up, many near": {"topk_ratio": 0.7, "update_interval": 2, "select_interval": 2, "warm_up_steps": 2},
}


@pytest.mark.parametrize(
    ("case", "stage", "where"),
    [
        ("overlapped", 3, "host"),
        slow("warm-up, waits", 1, "disk"),
        slow("warm-up, none near", 3, "host"),
        slow("warm-up, many near", 1, "host"),
    ],
)
def test_equals_a_loop_on_one_device(tmp_path, case, stage, where):
    settings, steps = jzero.ZenFlow(**SETTINGS[case]), 9
    # Devices hold rows of one layer's kernel, and columns of the first of two.
    sizes = models.TWO_LAYERS if case == "overlapped" else ONE_LAYER
    path = {"optimizer": "disk", "path": tmp_path} if where == "disk" else {"optimizer": "host"}
    offload = jzero.Offload(compute="host", chunk_bytes=512, zenflow=settings, **path)
    with jax.enable_x64(True):
        state = sharded(offload, stage=stage, tx=TX, dtype=jnp.float64, devices=3, sizes=sizes)
        loop = Loop(jzero.plan_of(state), settings, 0.3, sizes)
        step = jzero.make_train_step(models.mlp_loss, clip_norm=0.3)
        for i in range(steps):
            batch = models.mlp_batch(48, seed=i, dtype=np.float64)
            state, metrics = step(state, batch)
            np.testing.assert_allclose(float(metrics["loss"]), loop.run(batch), rtol=1e-12, err_msg=f"step {i}")
            assert int(state.step) == i + 1
        assert_close(arrays(jzero.gather_params(state)), arrays(loop.params))
        mu = jzero.get_full_opt_state(state, "layer_0/kernel", name="mu")
        np.testing.assert_allclose(mu, loop.state[0].mu["layer_0"]["kernel"], atol=1e-13)
        plain = jzero.unshard_train_state(jzero.apply_pending(state))  # the state itself if nothing is pending
        settled = copy.copy(loop)
        again, _ = step(state, models.mlp_batch(48, seed=77, dtype=np.float64))  # which a copy does not change
        last = loop.run(models.mlp_batch(48, seed=77, dtype=np.float64))
        assert np.isfinite(last)
        assert_close(arrays(jzero.gather_params(again)), arrays(loop.params))
        settled.apply_pending()
        assert_close(arrays(plain.params), arrays(settled.params))
        assert_close(arrays(plain.opt_state[0].nu), arrays(settled.state[0].nu))


def assert_close(found, expected):
    # Where a gradient is about as small as Adam's epsilon, its last bits become 1e-10 of a parameter.
    assert found.keys() == expected.keys()
    for path, x in expected.items():
        np.testing.assert_allclose(found[path], x, atol=1e-9, err_msg=path)


def test_training_resumes_at_an_interval_to_the_bit_and_a_skipped_step_adds_nothing(tmp_path):
    offload = flow(topk_ratio=0.2, update_interval=2, select_interval=4, overlap=False)
    state, _ = train(sharded(offload, precision="fp16"), steps=4)
    jzero.save_checkpoint(tmp_path / "checkpoint", state)
    state, expected = train(state, start=4)
    restored = jzero.restore_checkpoint(tmp_path / "checkpoint", sharded(offload, precision="fp16"))
    restored, losses = train(restored, start=4)
    assert losses == expected
    before = whole(state)
    assert_same_bits(whole(restored), before)
    # What is not restored keeps its numbers, those of columns on the devices, too.
    mu = np.asarray(jzero.get_full_opt_state(state, KERNEL, name="mu"))
    restored = jzero.restore_checkpoint(tmp_path / "checkpoint", state, paths="opt_state/.*/nu/.*")
    np.testing.assert_array_equal(jzero.get_full_opt_state(restored, KERNEL, name="mu"), mu)

    records = records_of(state)
    number, count = records.generation, records.pending.count
    assert count == 1
    batch = models.mlp_batch(48, seed=9)
    batch["x"][5] = np.inf
    state, metrics = step_of()(state, batch)
    assert not bool(metrics["step_applied"])
    assert int(state.step) == 9
    assert (records.generation, records.pending.count) == (number, count)
    assert_same_bits(whole(state), before)


KERNEL = "layer_0/kernel"
EDITS = {
    "optimizer state": (
        lambda state, value, _: jzero.set_full_opt_state(state, KERNEL, name="mu", value=value),
        lambda state: jzero.get_full_opt_state(state, KERNEL, name="mu"),
    ),
    "file": (
        lambda state, value, path: jzero.load_params(state, exported(value, path), paths=KERNEL),
        lambda state: jzero.get_full_param(state, KERNEL),
    ),
}


def exported(value, path):
    save_file({KERNEL.replace("/", "."): value}, path / "params.safetensors")
    return path


LATE = {"zenflow": {"zenflow": jzero.ZenFlow(topk_ratio=0.2, update_interval=2)}, "delay": {"delay": 1}}


@pytest.mark.parametrize(
    ("late", "where", "case"),
    [("zenflow", "host", "optimizer state"), ("delay", "disk", "file")],
)
def test_an_edit_counts_after_all_that_waits(tmp_path, case, where, late):
    """As an edit of a state that nothing waits for: it reads back at once, and a step goes on from it."""
    path = {"path": tmp_path} if where == "disk" else {}
    offload = jzero.Offload(optimizer=where, compute="host", chunk_bytes=512, **path, **LATE[late])
    edit, read = EDITS[case]
    state, _ = train(sharded(offload, precision="bf16"), steps=3)
    plan = jzero.plan_of(state)
    settled = jzero.shard_train_state(jzero.unshard_train_state(state), config=plan.config, mesh=plan.mesh)
    value = np.linspace(-1, 1, math.prod(read(state).shape), dtype=np.float32).reshape(read(state).shape)
    edited, expected = (edit(x, value, tmp_path) for x in (state, settled))
    np.testing.assert_array_equal(read(edited), value)
    assert_same_bits(whole(edited), whole(expected))
    later, wanted = (train(x, steps=2, start=3) for x in (edited, expected))
    assert later[1] == wanted[1]
    assert_same_bits(whole(later[0]), whole(wanted[0]))


@pytest.mark.slow
def test_an_update_that_fails_after_its_step_is_tried_again(tmp_path, monkeypatch):
    settings = jzero.ZenFlow(topk_ratio=0, update_interval=2, select_interval=2, overlap=False)
    offload = jzero.Offload(optimizer="disk", path=tmp_path, compute="host", chunk_bytes=512, zenflow=settings)
    state, step = sharded(offload, precision="bf16"), step_of()
    state, _ = step(state, models.mlp_batch(48, seed=0))
    before = arrays(jzero.gather_params(state))
    monkeypatch.setattr(UnnamedFile, "write", shared.raising(DiskError("Writing failed: EIO.")))
    with pytest.warns(UserWarning, match="the next step tries again: .*EIO"):
        state, _ = step(state, models.mlp_batch(48, seed=1))
    monkeypatch.undo()
    assert_same_bits(arrays(jzero.gather_params(state)), before)
    expected, _ = train(sharded(offload, precision="bf16"), steps=2)
    assert_same_bits(whole(jzero.apply_pending(state)), whole(expected))


@pytest.mark.parametrize(
    "use", [lambda records, path: records.read_leaf(path), lambda records, path: records.release()]
)
def test_whoever_uses_records_waits_for_the_update_beside_steps(use, monkeypatch):
    real, go_on, ended = RecordPass.run, threading.Event(), []
    monkeypatch.setattr(RecordPass, "run", lambda *args: (go_on.wait(60), real(*args), ended.append(True))[1])
    state, _ = train(sharded(flow(update_interval=2, select_interval=4)), 2)
    records, leaves = records_of(state), jzero.plan_of(state).record_fields
    assert not ended
    threading.Timer(0.2, go_on.set).start()
    use(records, leaves[min(leaves)][0].path)
    assert ended


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_while_a_step_waits_starts_no_second_update(monkeypatch):
    """The update that the step waits for goes on, and the next step waits for the same one."""
    offload = flow(topk_ratio=0, update_interval=1)
    step, go_on = step_of(clip_norm=0.5), threading.Event()
    expected, _ = train(sharded(offload, precision="bf16"), steps=3, clip_norm=0.5)
    state, real, running, updates = sharded(offload, precision="bf16"), RamStore.write, [], []

    def slow(*args):
        running.append(True)
        go_on.wait(60)
        real(*args)

    def counted(update):  # a second one beside the first would wait for ever
        updates.append(in_thread(update) if go_on.is_set() or not updates else updates[0])
        return updates[-1]

    def interrupt():
        while not running:
            time.sleep(0.01)
        time.sleep(0.2)  # until the step waits
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        go_on.set()

    def interrupted_step():
        thread.start()
        step(state, models.mlp_batch(48, seed=1))

    thread = threading.Thread(target=interrupt)
    monkeypatch.setattr(RamStore, "write", slow)
    monkeypatch.setattr(schedules, "in_thread", counted)
    try:
        state, _ = step(state, models.mlp_batch(48, seed=0))  # its update begins
        with pytest.raises(KeyboardInterrupt):
            interrupted_step()
        assert len(updates) == 1
    finally:
        go_on.set()
    thread.join()
    state, _ = train(state, steps=2, start=1, clip_norm=0.5)
    assert len(updates) == 3, "one per step"
    assert_same_bits(whole(state), whole(expected))


def test_what_cannot_be(tmp_path):
    for options, message in (
        ({"topk_ratio": 1.5}, r"`ZenFlow.topk_ratio` must be a number from 0 to 1"),
        ({"update_interval": 0}, r"`ZenFlow.update_interval` must be an integer >= 1"),
        ({"select_interval": 6}, r"`ZenFlow.select_interval=6` must be a multiple of `update_interval`.*=4"),
        ({"warm_up_steps": 3}, r"`ZenFlow.warm_up_steps=3` must be a multiple"),
    ):
        with pytest.raises(ValueError, match=message):
            jzero.ZenFlow(**options)
    for options, message in (
        ({"optimizer": "host", "zenflow": jzero.ZenFlow()}, r"got compute='device', delay=0"),
        ({"optimizer": "host", "compute": "host", "delay": 1, "zenflow": jzero.ZenFlow()}, r"delay=1, params='none'"),
        ({"optimizer": "host", "compute": "host", "zenflow": 3}, r"`Offload.zenflow` must be .*`jzero.ZenFlow`: got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            jzero.Offload(**options)
    for tx, stage, message in (
        (optax.lamb(1e-2), 3, r"`Offload.zenflow` applies means .*LAMB's norms.*`delay=1`"),
        (optax.adafactor(1e-2, min_dim_size_to_factor=16, momentum=0.9), 3, r"`Offload.zenflow` applies means .*rows"),
        (optax.adamw(1e-2), 0, r"`Offload.zenflow` lets the update .*Set `zenflow=None`"),
    ):
        with pytest.raises(ValueError, match=message):
            sharded(flow(), tx=tx, stage=stage)
    lamb = lambda key: jzero.TrainState.create(params={"w": jnp.zeros((64, 64))}, tx=optax.lamb(1e-2))
    with pytest.raises(ValueError, match="LAMB's norms"):  # before the state is made
        lower_init(lamb, jax.random.key(0), shared.config(3, offload=flow()), jzero.make_mesh())
    state = sharded(flow())
    with pytest.raises(ValueError, match=r"outside of programs \(`Offload\(zenflow=...\)`\)"):
        state.tx.update(state.params, state.opt_state, state.params)
