"""Checkpoints: what is on disk, who can read it, how training goes on from it."""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import signal
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training import train_state as flax_train_state

import jzero
from jzero.checkpoint import checksum, orbax_io
from tests import models

GOLDEN = pathlib.Path(__file__).parent / "golden" / "checkpoint_v1"
STAGES = (0, 1, 2, 3)


class StateWithStats(flax_train_state.TrainState):
    batch_stats: dict


class Net(nn.Module):
    """Sizes that hardly any number of devices divides."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(17, name="first")(x)
        x = nn.BatchNorm(use_running_average=False, name="norm")(x)
        x = nn.Dense(3, name="second", use_bias=False)(jnp.tanh(x))
        return nn.Dense(40, name="third")(x)


def linen_state(seed=0):
    """A plain state whose every leaf holds numbers of its own: one step taken by plain Flax and optax."""
    variables = Net().init(jax.random.key(seed), jnp.ones((2, 9)))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    state = StateWithStats.create(
        apply_fn=Net().apply, params=variables["params"], tx=tx, batch_stats=variables["batch_stats"]
    )
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(seed + 1), x.shape), state.params)
    stats = jax.tree.map(lambda x: x + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), state.batch_stats)
    state = state.apply_gradients(grads=grads)
    return state.replace(batch_stats=stats, step=jnp.asarray(state.step, jnp.int32))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(33, 17, rngs=rngs)
        self.first = nnx.Linear(17, 13, rngs=rngs)
        self.norm = nnx.BatchNorm(13, rngs=rngs)
        self.tied = nnx.Linear(17, 13, use_bias=False, rngs=rngs)
        self.tied.kernel = self.first.kernel
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        return self.dropout(self.norm(self.first(x)) + self.tied(x))


def nnx_state(seed=0):
    model = NnxNet(nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    params = nnx.state(model, nnx.Param)
    optimizer.update(model, jax.tree.map(lambda x: jax.random.normal(jax.random.key(seed + 1), x.shape), params))
    return model, optimizer


def mesh(num):
    return jzero.make_mesh(devices=jax.devices()[:num])


def sharded(state, stage, num=8, **options):
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=10, **options)
    return jzero.shard_train_state(state, config=config, mesh=mesh(num))


def like(state, stage, num=8, **options):
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=10, **options)
    return jzero.abstract_train_state(state, config=config, mesh=mesh(num))


def arrays(tree):
    """Returns the leaves by path; PRNG keys as their words."""
    found = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        found[jax.tree_util.keystr(path)] = np.asarray(jax.random.key_data(x) if is_key else x)
    return found


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for path, x in expected.items():
        assert found[path].dtype == x.dtype, path
        assert found[path].tobytes() == x.tobytes(), path


def natural(stored, shape):
    """Returns a stored array without padding, which must be zero; by hand, not by jzero's own functions."""
    if stored.shape == shape:
        return stored
    if stored.ndim == len(shape):
        inside = tuple(slice(0, size) for size in shape)
        rest = stored.copy()
        rest[inside] = 0
        assert not rest.any()
        return stored[inside]
    flat, size = stored.reshape(-1), int(np.prod(shape))
    assert not flat[size:].any()
    return flat[:size].reshape(shape)


def assert_holds(state, expected):
    """A sharded state (without masters) holds the numbers of a plain one, and nothing else but zeros."""
    found = arrays(state)
    assert found.keys() == expected.keys()
    assert_same_bits({path: natural(x, expected[path].shape) for path, x in found.items()}, expected)


ONE_DEVICE = pytest.mark.filterwarnings("ignore:The mesh has one device")


@pytest.fixture(scope="module")
def plain():
    return linen_state()


WRITERS = list(itertools.product(STAGES, (1, 3, 8)))


@ONE_DEVICE
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("writer", WRITERS)
def test_any_layout_reads_what_any_other_wrote(writer, every, plain, tmp_path):
    expected = arrays(plain)
    jzero.save_checkpoint(tmp_path / "c", sharded(plain, *writer))
    readers = list(itertools.product(STAGES, (1, 2, 5, 8)))
    if not every:  # half of them: every second, of the next writer the others
        readers = [(stage, num) for i, (stage, num) in enumerate(readers) if (i + stage + WRITERS.index(writer)) % 2]
    for stage, num in readers:
        restored = jzero.restore_checkpoint(tmp_path / "c", like(plain, stage, num))
        assert_holds(restored, expected)
        assert type(restored) is StateWithStats
        assert jzero.plan_of(restored).num_shards == num


@ONE_DEVICE
@pytest.mark.parametrize("writer_num", [1, 3, 8])
@pytest.mark.parametrize("writer_stage", STAGES)
def test_any_layout_reads_what_any_other_wrote_nnx(writer_stage, writer_num, tmp_path):
    expected = arrays(nnx.state(nnx_state()))
    jzero.save_checkpoint(tmp_path / "c", sharded(nnx_state(), writer_stage, writer_num))
    shapes = nnx.eval_shape(functools.partial(nnx_state, 5))
    for stage, num in zip(STAGES, (5, 1, 8, 2) if writer_num == 3 else (8, 2, 1, 5), strict=True):
        model, optimizer = jzero.restore_checkpoint(tmp_path / "c", like(shapes, stage, num))
        assert_holds(nnx.state((model, optimizer)), expected)
        assert model.tied.kernel is model.first.kernel


@pytest.mark.parametrize(("writer", "reader"), [("bf16", "fp32"), ("fp32", "bf16"), ("bf16", "fp16"), ("fp16", "bf16")])
@pytest.mark.parametrize("stages", [(1, 3), (3, 2)])
def test_precision_of_the_writer_does_not_show(writer, reader, stages, plain, tmp_path):
    jzero.save_checkpoint(tmp_path / "c", sharded(plain, stages[0], 3, precision=writer))
    assert_same_bits(arrays(read_by_plain_orbax(tmp_path / "c" / "default", plain)), arrays(plain))
    restored = jzero.restore_checkpoint(tmp_path / "c", like(plain, stages[1], 8, precision=reader))
    assert_same_bits(arrays(jzero.unshard_train_state(restored)), arrays(plain))
    if reader != "fp32" and stages[1] == 2:  # 16-bit copies, rounded from the masters
        rounded = jax.tree.map(lambda x: x.astype(restored.params["first"]["kernel"].dtype), plain.params)
        assert_same_bits(arrays(restored.params), arrays(rounded))


def test_edited_parameters_are_saved_as_the_optimizer_would_take_them(plain, tmp_path):
    state = sharded(plain, 2, precision="bf16")
    params = {**state.params, "second": {"kernel": state.params["second"]["kernel"] * 2}}
    jzero.save_checkpoint(tmp_path / "c", state.replace(params=params))
    restored = jzero.restore_checkpoint(tmp_path / "c", like(plain, 0))
    doubled = (plain.params["second"]["kernel"].astype(jnp.bfloat16) * 2).astype(jnp.float32)
    np.testing.assert_array_equal(np.asarray(restored.params["second"]["kernel"]), doubled)
    np.testing.assert_array_equal(restored.params["first"]["kernel"], plain.params["first"]["kernel"])


def read_by_plain_orbax(path, plain):
    return ocp.StandardCheckpointer().restore(path, jax.eval_shape(lambda: plain))


def test_plain_orbax_reads_ours(plain, tmp_path):
    jzero.save_checkpoint(tmp_path / "c", sharded(plain, 3))
    assert_same_bits(arrays(read_by_plain_orbax(tmp_path / "c" / "default", plain)), arrays(plain))
    with jzero.CheckpointManager(tmp_path / "run") as manager:
        manager.save(sharded(plain, 3), extra={"note": "x", "array": np.ones(3)}, data_iterator=Numbers())
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        restored = manager.restore(1, args=ocp.args.StandardRestore(jax.eval_shape(lambda: plain)))
    assert_same_bits(arrays(restored), arrays(plain))


@pytest.mark.parametrize("how", ["checkpointer", "manager", "numpy", "v1"])
def test_we_read_plain_orbax(how, plain, tmp_path):
    state = plain
    if how == "manager":
        with ocp.CheckpointManager(tmp_path / "run") as manager:
            manager.save(7, args=ocp.args.StandardSave(state))
    elif how == "v1":
        ocp.v1.save(tmp_path / "run", state)
    else:
        if how == "numpy":
            state = jax.tree.map(np.asarray, plain).replace(step=1)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "run", state)
    restored = jzero.restore_checkpoint(tmp_path / "run", like(plain, 3, 5))
    assert_holds(restored, arrays(plain))


def test_golden_checkpoint_of_this_format_is_read():
    """Written once by the first version that knew the format, `python -m tests.golden`; later ones have to read it."""
    from tests import golden  # noqa: PLC0415

    for stage, num in ((0, 2), (3, 8)):
        restored = jzero.restore_checkpoint(GOLDEN, golden.like(stage, mesh(num)))
        assert_holds(restored, golden.expected())
    info = jzero.inspect_checkpoint(GOLDEN, verify=True)
    assert info.damaged == {}
    assert info.extra["note"] == "golden"
    np.testing.assert_array_equal(info.extra["array"], np.arange(6, dtype=np.int16).reshape(2, 3))


def mixed_state(stage, precision):
    params = models.mlp_params()
    state = jzero.TrainState.create(params=params, tx=optax.adamw(1e-2))
    config = jzero.ZeroConfig(stage=stage, precision=precision, persistence_threshold=50)
    return jzero.shard_train_state(state, config=config)


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        (3, "fp32"),
        (2, "fp16"),
        (1, jzero.Precision(compute_dtype="bfloat16", master_dtype="bfloat16", state_dtype="bfloat16")),
    ],
    ids=["fp32", "fp16", "stochastic"],
)
def test_going_on_equals_never_having_stopped(stage, precision, tmp_path):
    step = jzero.make_train_step(models.mlp_loss)
    batches = [models.mlp_batch(24, seed=i) for i in range(25)]
    state = mixed_state(stage, precision)
    for batch in batches[:5]:
        state, _ = step(state, batch)
    with jzero.CheckpointManager(tmp_path) as manager:
        manager.save(state)
        losses = []
        for batch in batches[5:]:
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        start = jzero.abstract_train_state(mixed_state(stage, precision), config=jzero.plan_of(state).config)
        restored = manager.restore(start)
    again = []
    for batch in batches[5:]:
        restored, metrics = step(restored, batch)
        again.append(float(metrics["loss"]))
    assert len({*losses}) == 20
    assert again == losses
    assert_same_bits(arrays(restored), arrays(state))


def pointers(tree):
    return {shard.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) for shard in x.addressable_shards}


def test_a_restored_state_takes_no_more_memory_and_is_donated(tmp_path):
    step = jzero.make_train_step(models.mlp_loss)
    batch = models.mlp_batch(24)
    fresh, _ = step(mixed_state(3, "fp32"), batch)
    jzero.save_checkpoint(tmp_path / "c", fresh)
    shapes = jzero.abstract_train_state(fresh, config=jzero.plan_of(fresh).config)
    jax.clear_caches()
    before = sum(x.nbytes for x in jax.live_arrays())
    restored = jzero.restore_checkpoint(tmp_path / "c", shapes)
    assert sum(x.nbytes for x in jax.live_arrays()) - before == sum(x.nbytes for x in jax.tree.leaves(restored))
    large = [x for x in jax.tree.leaves(restored) if x.size > 50]
    buffers = pointers(large)
    after, _ = step(restored, batch)
    assert all(x.is_deleted() for x in large)
    assert buffers == pointers([x for x in jax.tree.leaves(after) if x.size > 50]), "every buffer is used again"


def test_donating_the_old_state_frees_it_first(tmp_path):
    state = mixed_state(3, "fp32")
    jzero.save_checkpoint(tmp_path / "c", state)
    restored = jzero.restore_checkpoint(tmp_path / "c", state, donate=True)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    kept = jzero.restore_checkpoint(tmp_path / "c", restored)
    assert not any(x.is_deleted() for x in jax.tree.leaves(restored))
    assert not pointers(kept) & pointers(restored)


def test_training_goes_on_while_files_are_written(tmp_path):
    """A step that reuses the memory of the state does not change what is being saved."""
    params = {"w": jnp.zeros((1024, 1021)), "odd": jnp.zeros((1023, 509))}
    state = jzero.shard_train_state(jzero.TrainState.create(params=params, tx=optax.sgd(1.0)), stage=3)
    step = jzero.make_train_step(lambda params, batch: sum(x.sum() for x in jax.tree.leaves(params)) * batch.mean())
    shapes = jzero.abstract_train_state(state, stage=3)
    with jzero.CheckpointManager(tmp_path) as manager:
        for _ in range(4):
            state, _ = step(state, jnp.ones(8))
            manager.save(state)
        manager.wait()
        for number in manager.all_steps():
            restored = manager.restore(shapes, step=number)
            assert int(restored.step) == number
            for x in jax.tree.leaves(jzero.gather_params(restored)):
                assert np.unique(np.asarray(x)).tolist() == [-number]


class Numbers:
    """An iterator as Grain's: `get_state`, `set_state`."""

    def __init__(self):
        self.position = 0

    def __next__(self):
        self.position += 1
        return self.position

    def get_state(self):
        return {"position": self.position, "raw": b"\x00\xff"}

    def set_state(self, state):
        assert state["raw"] == b"\x00\xff"
        self.position = state["position"]


def test_extras_and_the_position_of_the_data(plain, tmp_path):
    state, data = sharded(plain, 1), Numbers()
    for _ in range(5):
        next(data)
    extra = {
        "rng": jax.random.key(7),
        "other": jax.random.key(3, impl="rbg"),
        "history": [1, 2.5, None, True, "text", b"\x01"],
        "nested": {"array": np.arange(3, dtype=np.int8), "half": jnp.ones(2, jnp.bfloat16)},
    }
    with jzero.CheckpointManager(tmp_path / "run") as manager:
        manager.save(state, data_iterator=data, extra=extra)
        fresh = Numbers()
        manager.restore(state, data_iterator=fresh)
        found = manager.restore_extra()
    assert next(fresh) == next(data) == 6
    assert found["history"] == extra["history"]
    assert found["nested"]["array"].dtype == np.int8
    assert found["nested"]["array"].tolist() == [0, 1, 2]
    assert found["nested"]["half"].dtype == jnp.bfloat16
    for name in ("rng", "other"):
        assert found[name].dtype == extra[name].dtype
        assert (jax.random.bits(found[name], 3) == jax.random.bits(extra[name], 3)).all()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"a": {"f": print}}, r"`extra/a/f` must hold arrays.*got builtin_function_or_method"),
        ({1: 2}, "The keys of `extra` must be text"),
        ([1], "`extra` must be a dict: got list"),
        ({"o": np.array([object()])}, r"`extra/o` is an array of object\[1\]"),
        ({"o": np.array(["text"])}, r"`extra/o` is an array of <U4\[1\]"),
        ({"o": np.zeros((0, 3))}, r"`extra/o` is an array of float64\[0, 3\]"),
    ],
)
def test_extras_that_cannot_be_saved(extra, message, plain, tmp_path):
    with pytest.raises(TypeError, match=message):
        jzero.save_checkpoint(tmp_path / "c", sharded(plain, 1), extra=extra)
    assert not (tmp_path / "c").exists()


def test_data_iterators_without_a_position(plain, tmp_path):
    state = sharded(plain, 1)
    with pytest.raises(TypeError, match="`data_iterator` must have a method 'get_state' or 'state_dict'"):
        jzero.save_checkpoint(tmp_path / "c", state, data_iterator=iter([1]))
    jzero.save_checkpoint(tmp_path / "c", state)
    with pytest.raises(ValueError, match="holds no position of a data iterator"):
        jzero.restore_checkpoint(tmp_path / "c", state, data_iterator=Numbers())


def test_configuration_is_noted(plain, tmp_path):
    config = jzero.ZeroConfig(stage=2, precision="fp16", rules={".*/bias": jzero.LeafRule(persistent=True)})
    jzero.save_checkpoint(tmp_path / "c", jzero.shard_train_state(plain, config=config))
    noted = json.loads((tmp_path / "c" / "jzero" / "metadata").read_text())
    assert noted["config"]["stage"] == 2
    assert noted["config"]["rules"] == {
        ".*/bias": {
            **dict.fromkeys(noted["config"]["rules"][".*/bias"]),
            "persistent": True,
            "replicated": False,
        }
    }
    assert noted["config"]["precision"]["compute_dtype"] == "float16"
    assert noted["mesh"] == {"data": 8}
    assert noted["precision"]["loss_scale"]["scale"] == 2.0**16


# Parts of a checkpoint.


def test_parameters_alone(plain, tmp_path):
    jzero.save_checkpoint(tmp_path / "c", sharded(plain, 3))
    other = sharded(linen_state(5), 1, 5)
    restored = jzero.restore_checkpoint(tmp_path / "c", other, params_only=True)
    assert_holds(restored.params, arrays(plain.params))
    assert_same_bits(arrays(restored.opt_state), arrays(other.opt_state))
    assert_same_bits(arrays(restored.batch_stats), arrays(other.batch_stats))
    assert not pointers(restored) & pointers(other)


def test_all_but_the_optimizer(plain, tmp_path):
    jzero.save_checkpoint(tmp_path / "c", sharded(plain, 1))
    adafactor = StateWithStats.create(
        apply_fn=None, params=linen_state(5).params, tx=optax.adafactor(1e-3), batch_stats=plain.batch_stats
    )
    start = sharded(adafactor, 3)
    with pytest.raises(ValueError, match=r"(?s)do not have the same leaves.*missing in the checkpoint.*opt_state/0"):
        jzero.restore_checkpoint(tmp_path / "c", start)
    restored = jzero.restore_checkpoint(tmp_path / "c", start, paths="(?!opt_state/).*")
    assert_holds(restored.params, arrays(plain.params))
    assert_holds(restored.batch_stats, arrays(plain.batch_stats))
    assert int(restored.step) == int(plain.step)
    assert_same_bits(arrays(restored.opt_state), arrays(start.opt_state))


def test_frozen_parameters_are_always_there(tmp_path):
    def make(seed):
        params = jax.tree.map(lambda x: x + seed, models.mlp_params())
        return jzero.TrainState.create(params=params, tx=optax.adamw(1e-2))

    config = jzero.ZeroConfig(stage=3, precision="bf16", persistence_threshold=50)
    state = jzero.shard_train_state(make(0), config=config, trainable="layer_1/.*")
    jzero.save_checkpoint(tmp_path / "c", state)
    start = jzero.shard_train_state(make(1), config=config, trainable="layer_1/.*")
    for options in ({}, {"params_only": True}):
        restored = jzero.restore_checkpoint(tmp_path / "c", start, **options)
        assert_same_bits(arrays(restored.params), arrays(state.params))
    report = jzero.export_params(state, tmp_path / "out.safetensors")
    assert report.num_tensors == len(jax.tree.leaves(state.params))


def test_missing_and_unexpected_leaves_are_reported(plain, tmp_path):
    jzero.save_checkpoint(tmp_path / "c", sharded(plain, 3))
    params = {name: x for name, x in plain.params.items() if name != "second"} | {"added": {"bias": jnp.ones(5)}}
    changed = StateWithStats.create(apply_fn=None, params=params, tx=optax.sgd(0.1), batch_stats=plain.batch_stats)
    with pytest.raises(ValueError, match=r"(?s)missing in the checkpoint \(1\):\n    params/added/bias") as error:
        jzero.restore_checkpoint(tmp_path / "c", sharded(changed, 3))
    assert "params/second/kernel" in str(error.value)
    assert "`strict=False`" in str(error.value)
    start = sharded(changed, 3)
    with jzero.CheckpointManager(tmp_path / "run") as manager:
        manager.save(sharded(plain, 3))
        with pytest.warns(UserWarning, match=r"(?s)Restored \d+ leaves.*missing.*added/bias.*only in the checkpoint"):
            restored = manager.restore(start, strict=False)
    assert manager.last_restore.missing == ("params/added/bias",)
    assert "params/second/kernel" in manager.last_restore.unexpected
    np.testing.assert_array_equal(jzero.get_full_param(restored, "added/bias"), np.ones(5))
    np.testing.assert_array_equal(jzero.get_full_param(restored, "third/bias"), plain.params["third"]["bias"])
    with pytest.raises(ValueError, match=r"`like` has shapes but no values for them: \['params/added/bias'\]"):
        jzero.restore_checkpoint(tmp_path / "c", like(changed, 3), strict=False)


def test_renamed_leaves(plain, tmp_path):
    jzero.save_checkpoint(tmp_path / "c", sharded(plain, 3))
    params = {("renamed" if name == "third" else name): x for name, x in linen_state(5).params.items()}
    start = StateWithStats.create(apply_fn=None, params=params, tx=plain.tx, batch_stats=plain.batch_stats)
    rename = {r"(.*)/third/(.*)": r"\1/renamed/\2"}
    restored = jzero.restore_checkpoint(tmp_path / "c", like(start, 1), rename=rename)
    whole = jzero.unshard_train_state(restored)
    np.testing.assert_array_equal(whole.params["renamed"]["kernel"], plain.params["third"]["kernel"])
    np.testing.assert_array_equal(
        whole.opt_state[1][0].mu["renamed"]["kernel"], plain.opt_state[1][0].mu["third"]["kernel"]
    )
    for bad, message in (
        ({"params/nothing": "x"}, "match no leaf of the checkpoint"),
        ({"(": "x"}, "is not a regular expression"),
        ({".*/bias": "params/b"}, "gives two leaves the path"),
    ):
        with pytest.raises(ValueError, match=message):
            jzero.restore_checkpoint(tmp_path / "c", like(start, 1), rename=bad)


def test_a_checkpoint_of_another_model(plain, tmp_path):
    jzero.save_checkpoint(tmp_path / "c", sharded(plain, 3))
    params = {**plain.params, "first": {"kernel": jnp.ones((9, 18)), "bias": jnp.ones(18, jnp.int32)}}
    other = StateWithStats.create(apply_fn=None, params=params, tx=optax.sgd(0.1), batch_stats=plain.batch_stats)
    for strict in (True, False):
        with pytest.raises(ValueError, match="is of another model or optimizer") as error:
            jzero.restore_checkpoint(tmp_path / "c", like(other, 3), strict=strict)
    assert "  params/first/kernel: float32[9, 17] in the checkpoint, float32[9, 18] in the state\n" in str(error.value)
    assert "  params/first/bias: float32[17] in the checkpoint, int32[18] in the state\n" in str(error.value)
    with pytest.raises(ValueError, match="`paths` matches no leaf of the state"):
        jzero.restore_checkpoint(tmp_path / "c", like(plain, 3), paths="nothing")


def test_states_that_were_not_sharded(plain, tmp_path):
    with pytest.raises(TypeError, match="has no ZeRO plan"):
        jzero.save_checkpoint(tmp_path / "c", plain)
    jzero.save_checkpoint(tmp_path / "c", sharded(plain, 1))
    with pytest.raises(TypeError, match="has no ZeRO plan"):
        jzero.restore_checkpoint(tmp_path / "c", plain)
    with pytest.raises(ValueError, match="a checkpoint never replaces another"):
        jzero.save_checkpoint(tmp_path / "c", sharded(plain, 1))


def murmur_mix(h):
    """The finalizer of MurmurHash3 as published, in whole numbers."""
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def test_checksums_tell_what_sums_would_not():
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    swapped = x.copy()
    swapped[:8], swapped[8:16] = x[8:16], x[:8]
    others = [-x, swapped, x[::-1], np.zeros_like(x), x.T.copy(), np.where(x > 0, -x, x)]
    assert len({checksum.host_checksum(np.ascontiguousarray(y)) for y in [x, *others]}) == 7


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "uint16", "int32", "bool", "complex64", "int4"]
)
@pytest.mark.parametrize("layout", [(8, 3), (3, 3), (8, 0), (5, 1)])
def test_checksums_do_not_depend_on_the_layout(dtype, layout):
    """Against a sum written out by hand, with numpy, over the natural array."""
    num, stage = layout
    numbers = np.random.default_rng(0).integers(-8 if "u" not in dtype[:1] else 0, 8, size=(17, 5, 9))
    params = {"x": jnp.asarray(numbers).astype(dtype), "y": jnp.asarray(numbers[:16]).astype(dtype)}
    state = sharded(jzero.TrainState.create(params=params, tx=optax.identity()), stage, num)
    leaves = jax.tree.leaves(state.params)
    cuts = [leaf.param.cut for leaf in jzero.plan_of(state).leaves]
    found = checksum.checksums(leaves, cuts)
    for value, x in zip(found, params.values(), strict=True):
        raw = np.asarray(x)
        if dtype == "int4":
            words = [int(v) % 16 for v in raw.reshape(-1).astype(int)]
        else:
            words = np.frombuffer(raw.tobytes(), f"uint{min(32, 8 * raw.dtype.itemsize)}").tolist()
        assert value == sum(murmur_mix(w ^ (i * 0x9E3779B1 % 2**32)) for i, w in enumerate(words)) % 2**32
        assert checksum.host_checksum(raw) == value


def test_parts_keep_the_loss_scale(plain, tmp_path):
    state = sharded(plain, 2, precision="fp16")
    lower = dataclasses.replace(state.opt_state.loss_scale, scale=state.opt_state.loss_scale.scale / 4)
    scaled = state.replace(opt_state=dataclasses.replace(state.opt_state, loss_scale=lower))
    jzero.save_checkpoint(tmp_path / "c", scaled)
    for options, scale in (({}, 2.0**14), ({"paths": ".*"}, 2.0**14), ({"params_only": True}, 2.0**16)):
        restored = jzero.restore_checkpoint(tmp_path / "c", state, **options)
        assert float(restored.opt_state.loss_scale.scale) == scale


def test_fields_that_were_replaced_outside_of_a_step(plain, tmp_path):
    state = sharded(plain, 3)
    kernel = jnp.asarray(plain.params["second"]["kernel"]) * 2
    params = {**state.params, "second": {"kernel": kernel}}  # in its natural shape, on one device
    jzero.save_checkpoint(tmp_path / "c", state.replace(step=5, params=params))
    restored = jzero.restore_checkpoint(tmp_path / "c", like(plain, 0))
    assert int(restored.step) == 5
    np.testing.assert_array_equal(restored.params["second"]["kernel"], kernel)
    wrong = state.replace(params={**state.params, "second": {"kernel": jnp.ones(4)}})
    with pytest.raises(ValueError, match=r"second/kernel has shape \(4,\), but the plan stores it as"):
        jzero.save_checkpoint(tmp_path / "d", wrong)


class StateWithAverage(flax_train_state.TrainState):
    average: dict


def test_arrays_that_are_kept_are_not_freed(plain, tmp_path):
    jzero.save_checkpoint(tmp_path / "c", sharded(plain, 3))
    twin = StateWithAverage.create(apply_fn=None, params=plain.params, tx=plain.tx, average=plain.params)
    twin = sharded(twin, 3)
    twin = twin.replace(average=twin.params)
    restored = jzero.restore_checkpoint(tmp_path / "c", twin, params_only=True, donate=True)
    assert not any(x.is_deleted() for x in jax.tree.leaves(restored))


def test_names_that_cannot_be_told_apart_are_refused(tmp_path):
    for params in ({"a/b": jnp.ones(3), "a": {"b": jnp.zeros(3)}}, {"a.b": jnp.ones(3), "a": {"b": jnp.zeros(3)}}):
        state = sharded(jzero.TrainState.create(params=params, tx=optax.sgd(0.1)), 1)
        with pytest.raises(ValueError, match=r"cannot be told apart on disk.*params.a.b"):
            jzero.save_checkpoint(tmp_path / "c", state)


def test_leaves_without_elements_are_refused(tmp_path):
    params = {"w": jnp.ones(3), "none": jnp.ones((0, 3))}
    state = sharded(jzero.TrainState.create(params=params, tx=optax.sgd(0.1)), 1)
    with pytest.raises(ValueError, match=r"no arrays without elements: \['params/none'\]"):
        jzero.save_checkpoint(tmp_path / "c", state)


class StateWithKey(flax_train_state.TrainState):
    rng: jax.Array


def test_kinds_of_keys_are_not_confused(plain, tmp_path):
    def make(rng):
        return sharded(StateWithKey.create(apply_fn=None, params=plain.params, tx=optax.sgd(0.1), rng=rng), 1)

    jzero.save_checkpoint(tmp_path / "new", make(jax.random.key(3)))
    jzero.save_checkpoint(tmp_path / "old", make(jax.random.PRNGKey(3)))
    restored = jzero.restore_checkpoint(tmp_path / "new", make(jax.random.key(4)))
    assert (jax.random.key_data(restored.rng) == jax.random.PRNGKey(3)).all()
    rbg = jax.random.key(4, impl="rbg")
    for path, rng in (("new", jax.random.PRNGKey(4)), ("old", jax.random.key(4)), ("new", rbg)):
        with pytest.raises(ValueError, match=r"  rng: uint32\[2\].* in the checkpoint"):
            jzero.restore_checkpoint(tmp_path / path, make(rng))


def test_numbers_that_are_too_wide_for_jax_are_refused(tmp_path):
    for step, name in ((7, "small"), (2**40, "large")):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / name, {"step": np.array(step), "params": {"w": np.ones((5, 4), np.float32)}})
    start = sharded(jzero.TrainState.create(params={"w": jnp.zeros((5, 4))}, tx=optax.sgd(0.1)), 3)
    assert int(jzero.restore_checkpoint(tmp_path / "small", start).step) == 7
    with pytest.raises(ValueError, match="step holds int64 numbers that need more than 32 bits"):
        jzero.restore_checkpoint(tmp_path / "large", start)


def test_relative_paths_and_home(plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    state = sharded(plain, 3)
    for path in ("here/c", "~/c"):
        jzero.save_checkpoint(path, state)
        jzero.restore_checkpoint(path, state)
        assert jzero.inspect_checkpoint(path, verify=True).damaged == {}
        jzero.export_checkpoint(path, f"{path}.safetensors")
        jzero.load_params(state, f"{path}.safetensors")
    assert (tmp_path / "home" / "c.safetensors").exists()


# The manager.


def numbered(state, step):
    return state.replace(step=jnp.zeros_like(state.step) + step)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7]),
        ({"max_to_keep": 2}, [6, 7]),
        ({"max_to_keep": 1, "keep_every_steps": 3}, [3, 6, 7]),
        ({"save_interval_steps": 3}, [1, 3, 6]),
        ({"max_to_keep": 2, "best_metric": "loss"}, [2, 4, 7]),
        ({"max_to_keep": 1, "best_metric": "loss", "best_mode": "max"}, [1, 7]),
    ],
)
def test_what_is_saved_and_kept(options, kept, plain, tmp_path):
    losses = dict(zip(range(1, 8), [9.0, 2.0, 5.0, 1.0, 4.0, 6.0, 3.0], strict=True))
    state = sharded(plain, 1, 2)
    with jzero.CheckpointManager(tmp_path, **options) as manager:
        for number, loss in losses.items():
            manager.save(numbered(state, number), metrics={"loss": loss})
    with jzero.CheckpointManager(tmp_path, **options) as reader:
        assert reader.all_steps() == kept
        assert reader.latest_step() == kept[-1]
        if "best_metric" in options:
            best = min if options.get("best_mode") != "max" else max
            assert reader.best_step() == best(kept, key=losses.get)
        assert int(reader.restore(state).step) == kept[-1]
        assert int(reader.restore(state, step=kept[0]).step) == kept[0]


def test_saving_again_and_out_of_turn(plain, tmp_path):
    state = sharded(plain, 1, 2)
    with jzero.CheckpointManager(tmp_path, save_interval_steps=10) as manager:
        assert manager.save(numbered(state, 3))
        assert not manager.save(numbered(state, 3), force=True)
        assert not manager.save(numbered(state, 4))
        assert manager.save(numbered(state, 4), force=True)
        assert manager.save(state, step=10), "a step that the loop counts"
        with pytest.raises(jzero.CheckpointError, match="holds step 10, so step 7 would not be the one to go on from"):
            manager.save(state, step=7)
    with jzero.CheckpointManager(tmp_path, save_interval_steps=10) as manager:
        assert not manager.save(numbered(state, 11)), "there is one to go on from"
        assert manager.save(numbered(state, 20))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_to_keep": 0}, "`max_to_keep` must be a whole number of at least 1: got 0"),
        ({"save_interval_steps": None}, "`save_interval_steps` must be a whole number"),
        ({"keep_every_steps": 2.5}, "`keep_every_steps` must be"),
        ({"best_mode": "most"}, "`best_mode` must be 'max' or 'min': got 'most'"),
    ],
)
def test_impossible_options(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        jzero.CheckpointManager(tmp_path, **options)


def test_going_back_sets_later_steps_aside(plain, tmp_path):
    state = sharded(plain, 1, 2)
    with jzero.CheckpointManager(tmp_path) as manager:
        for number in (2, 4, 6):
            manager.save(numbered(state, number), extra={"branch": "first"})
        manager.restore(state, step=2)
        with pytest.warns(UserWarning, match=r"goes on from step 2: the later steps \[4, 6\] were moved to"):
            assert manager.save(numbered(state, 4), extra={"branch": "second"})
        assert manager.save(numbered(state, 5))
    with jzero.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [2, 4, 5]
        assert int(manager.restore(state).step) == 5
        assert not manager.save(numbered(state, 5)), "is there"
        assert manager.restore_extra(4) == {"branch": "second"}
        assert manager.save(numbered(state, 6))
    assert sorted(path.name for path in (tmp_path / "superseded").iterdir()) == ["4", "6"]
    other = jzero.CheckpointManager(tmp_path)
    with pytest.raises(jzero.CheckpointError, match="holds step 6, so step 1 would not be"):
        other.save(numbered(state, 1))


def test_looking_at_an_earlier_step_changes_nothing(plain, tmp_path):
    state = sharded(plain, 1, 2)
    with jzero.CheckpointManager(tmp_path, best_metric="loss") as manager:
        for number, loss in ((1, 2.0), (2, 1.0), (3, 3.0)):
            manager.save(numbered(state, number), metrics={"loss": loss})
        assert int(manager.restore(state, step=manager.best_step()).step) == 2
        assert manager.save(numbered(state, 4), metrics={"loss": 4.0})  # the run that goes on is the one that was at 3
        assert manager.all_steps() == [1, 2, 3, 4]
    assert not (tmp_path / "superseded").exists()


def test_sigterm_after_a_save_that_failed(plain, tmp_path, monkeypatch):
    async def fail(*_):
        raise OSError("disk on fire")

    state = sharded(plain, 1, 2)
    with jzero.CheckpointManager(tmp_path) as manager:
        manager.save(numbered(state, 1))
        manager.wait()
        with monkeypatch.context() as broken:
            broken.setattr(orbax_io, "_write", fail)
            manager.save(numbered(state, 2))
            with pytest.raises(jzero.CheckpointError, match=r"/2 could not be written \(OSError: disk on fire\)"):
                manager.save(numbered(state, 3))
            assert manager.all_steps() == [1], "this one was not begun"
            manager.save(numbered(state, 4))
            while manager._writer.is_saving_in_progress():
                time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.warns(UserWarning, match="/4 could not be written"), pytest.raises(SystemExit):
            manager.save(numbered(state, 5))
    assert jzero.CheckpointManager(tmp_path).all_steps() == [1, 5]


def test_sigterm_after_falling_back_from_a_damaged_step(plain, tmp_path):
    state = sharded(plain, 1, 2)
    with jzero.CheckpointManager(tmp_path, best_metric="loss") as manager:
        for number in (4, 6):
            manager.save(numbered(state, number), metrics={"loss": 1.0})
    (tmp_path / "6" / "default" / "manifest.ocdbt").write_bytes(b"x")
    with jzero.CheckpointManager(tmp_path, save_interval_steps=100, best_metric="loss") as manager:
        with pytest.warns(UserWarning, match="Step 4 was restored"):
            manager.restore(state)
        assert not manager.save(numbered(state, 5))
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.warns(UserWarning, match=r"later steps \[6\] were moved"), pytest.raises(SystemExit):
            manager.save(numbered(state, 6))  # without the metric, which is not at hand at each step
    assert jzero.inspect_checkpoint(tmp_path / "6", verify=True).damaged == {}


def test_metrics_that_are_no_numbers_or_not_there(plain, tmp_path):
    state = sharded(plain, 1, 2)
    with jzero.CheckpointManager(tmp_path) as manager:
        manager.save(numbered(state, 1))
    options = {"max_to_keep": 2, "best_metric": "loss"}
    with jzero.CheckpointManager(tmp_path, **options) as manager:
        for number, loss in zip(range(2, 8), (3.0, np.nan, 2.0, np.nan, np.nan, np.nan), strict=True):
            manager.save(numbered(state, number), metrics={"loss": loss})
        manager.wait()
        assert manager.all_steps() == [1, 2, 4, 7], "one without metrics, the best two, the latest"
        assert manager.best_step() == 4
    assert jzero.CheckpointManager(tmp_path, best_metric="accuracy").best_step() is None


def test_metrics_that_are_missing(plain, tmp_path):
    with (
        jzero.CheckpointManager(tmp_path, best_metric="loss") as manager,
        pytest.raises(ValueError, match=r"`metrics` must hold 'loss'.*got \['acc'\]"),
    ):
        manager.save(sharded(plain, 1, 2), metrics={"acc": 1.0})


def test_a_reader_writes_nothing(plain, tmp_path):
    with jzero.CheckpointManager(tmp_path / "run") as manager:
        assert manager.all_steps() == []
        with pytest.raises(jzero.CheckpointError, match=r"There is no checkpoint in .* to restore"):
            manager.restore(sharded(plain, 1, 2))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("exit_code", [0, 143, None])
def test_sigterm_saves_and_ends(exit_code, plain, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    state = sharded(plain, 1, 2)
    with jzero.CheckpointManager(tmp_path, save_interval_steps=100, preemption_exit_code=exit_code) as manager:
        assert manager.save(numbered(state, 100))
        os.kill(os.getpid(), signal.SIGTERM)
        assert not manager.preempted
        if exit_code is None:
            assert manager.save(numbered(state, 101))
            assert manager.preempted
            assert not manager.save(numbered(state, 102)), "once"
        else:
            with pytest.raises(SystemExit) as ended:
                manager.save(numbered(state, 101))
            assert ended.value.code == exit_code
            assert jzero.CheckpointManager(tmp_path).latest_step() == 101, "complete before the end"
    assert signal.getsignal(signal.SIGTERM) == before


def test_other_handlers_of_sigterm_are_called(plain, tmp_path):
    called = []
    before = signal.signal(signal.SIGTERM, lambda *_: called.append(1))
    try:
        with jzero.CheckpointManager(tmp_path, preemption_exit_code=None) as manager:
            state = sharded(plain, 1, 2)
            manager.save(state)
            os.kill(os.getpid(), signal.SIGTERM)
            manager.save(state)
            assert manager.preempted
            assert called == [1]
            os.kill(os.getpid(), signal.SIGTERM)
            assert called == [1, 1], "the second one goes past the manager"
    finally:
        signal.signal(signal.SIGTERM, before)
