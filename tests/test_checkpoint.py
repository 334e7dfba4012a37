"""Checkpoints: what is on disk, who can read it, how training goes on from it."""

import collections
import functools
import gc
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jzero
from jzero.checkpoint.extras import iterator_mover, iterator_position
from jzero.checkpoint.saving import checkpoint_items
from tests import disk_states, models, shared
from tests.checkpoint_states import (
    ONE_DEVICE,
    Numbers,
    arrays,
    assert_holds,
    assert_same_bits,
    like,
    linen_state,
    mesh,
    nnx_state,
    pointers,
    sharded,
)
from tests.tiers import slow

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def plain():
    return linen_state()


READERS = {1: (1, 2, 5, 8), 3: (5, 1, 8, 2), 8: (8, 5, 2, 1)}
"""The numbers of devices that read at each stage, by the number that wrote."""


@ONE_DEVICE
@pytest.mark.parametrize(("writer_stage", "writer_num"), [(2, 3), slow(0, 8), slow(1, 1), slow(3, 3)])
def test_any_layout_reads_what_any_other_wrote(writer_stage, writer_num, tmp_path):
    expected = arrays(nnx.state(nnx_state()))
    jzero.save_checkpoint(tmp_path / "c", sharded(nnx_state(), writer_stage, writer_num))
    shapes = nnx.eval_shape(functools.partial(nnx_state, 5))
    for stage, num in enumerate(READERS[writer_num]):
        model, optimizer = jzero.restore_checkpoint(tmp_path / "c", like(shapes, stage, num))
        assert_holds(nnx.state((model, optimizer)), expected)
        assert jzero.plan_of((model, optimizer)).num_shards == num
        assert model.tied.kernel is model.first.kernel


def test_edited_parameters_are_saved_as_the_optimizer_would_take_them(plain, tmp_path):
    state = sharded(plain, 1, 3, precision="bf16")
    params = {**state.params, "second": {"kernel": state.params["second"]["kernel"] * 2}}
    jzero.save_checkpoint(tmp_path / "c", state.replace(params=params))
    restored = jzero.restore_checkpoint(tmp_path / "c", like(plain, 0))
    doubled = (plain.params["second"]["kernel"].astype(jnp.bfloat16) * 2).astype(jnp.float32)
    np.testing.assert_array_equal(np.asarray(restored.params["second"]["kernel"]), doubled)
    np.testing.assert_array_equal(restored.params["first"]["kernel"], plain.params["first"]["kernel"])


def test_plain_orbax_reads_ours(plain, tmp_path):
    with jzero.CheckpointManager(tmp_path / "run") as manager:
        manager.save(sharded(plain, 3), extra={"note": "x", "array": np.ones(3)}, data_iterator=Numbers())
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        restored = manager.restore(1, args=ocp.args.StandardRestore(jax.eval_shape(lambda: plain)))
    assert_same_bits(arrays(restored), arrays(plain))


@pytest.mark.parametrize("how", ["checkpointer", "manager", "v1"])
def test_we_read_plain_orbax(how, plain, tmp_path):
    if how == "manager":
        with ocp.CheckpointManager(tmp_path / "run") as manager:
            manager.save(7, args=ocp.args.StandardSave(plain))
    elif how == "v1":
        ocp.v1.save(tmp_path / "run", plain)
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "run", jax.tree.map(np.asarray, plain).replace(step=1))
    restored = jzero.restore_checkpoint(tmp_path / "run", like(plain, 3, 5))
    assert_holds(restored, arrays(plain))


def test_devices_with_the_same_arrays_share_the_writing():
    params = {f"w{i}": jnp.ones((16, 5 + i)) for i in range(16)}
    state = sharded(jzero.TrainState.create(params=params, tx=optax.identity()), 0)
    written = collections.Counter()
    for x in jax.tree.leaves(checkpoint_items(state, data_iterator=None, extra=None).args["default"].item):
        (shard,) = x.shards()
        written[shard.device] += shard.data.nbytes
    assert set(written) == {*jax.devices()}
    assert max(written.values()) < 2 * min(written.values())


@pytest.mark.parametrize("version", [1, 2])
def test_golden_checkpoints_of_all_formats_are_read(version):
    """Written once by the first version that knew the format, `python -m tests.golden`; later ones have to read it."""
    from tests import golden  # noqa: PLC0415

    path = GOLDEN / f"checkpoint_v{version}"
    assert_holds(jzero.restore_checkpoint(path, golden.like(3, mesh(8))), golden.expected())
    info = jzero.inspect_checkpoint(path, verify=True)
    assert info.notes["format"] == version
    assert info.damaged == {}
    assert info.extra["note"] == "golden"
    np.testing.assert_array_equal(info.extra["array"], np.arange(6, dtype=np.int16).reshape(2, 3))


def mixed_state(stage, precision):
    state = jzero.TrainState.create(params=disk_states.make_params(), tx=disk_states.ADAMW)
    config = jzero.ZeroConfig(stage=stage, precision=precision, persistence_threshold=50)
    return jzero.shard_train_state(state, config=config)


def test_going_on_equals_never_having_stopped(tmp_path):
    """Where rounding draws random bits, too."""
    precision = jzero.Precision(compute_dtype="bfloat16", master_dtype="bfloat16", state_dtype="bfloat16")
    step = disk_states.step_of()
    batches = [models.mlp_batch(24, seed=i) for i in range(8)]
    state = mixed_state(1, precision)
    state, _ = shared.train(step, state, batches[:3])
    with jzero.CheckpointManager(tmp_path) as manager:
        manager.save(state)
        state, losses = shared.train(step, state, batches[3:])
        start = jzero.abstract_train_state(mixed_state(1, precision), config=jzero.plan_of(state).config)
        restored = manager.restore(start)
    restored, again = shared.train(step, restored, batches[3:])
    assert len({*losses}) == 5
    assert again == losses
    assert_same_bits(arrays(restored), arrays(state))


def test_a_restored_state_takes_no_more_memory_and_is_donated(tmp_path):
    step = disk_states.step_of()
    batch = models.mlp_batch(24)
    fresh, _ = step(mixed_state(3, "fp32"), batch)
    jzero.save_checkpoint(tmp_path / "c", fresh)
    shapes = jzero.abstract_train_state(fresh, config=jzero.plan_of(fresh).config)
    jzero.restore_checkpoint(tmp_path / "c", shapes)  # so that what is cached is there
    before = jax.live_arrays()  # held, so that none of them goes in the meantime
    restored = jzero.restore_checkpoint(tmp_path / "c", shapes)
    gc.collect()
    known = {id(x) for x in before}
    assert pointers([x for x in jax.live_arrays() if id(x) not in known]) == pointers(restored)
    large = [x for x in jax.tree.leaves(restored) if x.size > 50]
    buffers = pointers(large)
    after, _ = step(restored, batch)
    assert all(x.is_deleted() for x in large)
    assert buffers == pointers([x for x in jax.tree.leaves(after) if x.size > 50]), "every buffer is used again"
    kept = jzero.restore_checkpoint(tmp_path / "c", after)
    assert not any(x.is_deleted() for x in jax.tree.leaves(after))
    assert not pointers(kept) & pointers(after)
    jzero.restore_checkpoint(tmp_path / "c", after, donate=True)
    assert all(x.is_deleted() for x in jax.tree.leaves(after)), "freed first"


def test_training_goes_on_while_files_are_written(tmp_path):
    """A step that reuses the memory of the state does not change what is being saved."""
    params = {"w": jnp.zeros((1024, 1021)), "odd": jnp.zeros((1023, 509))}
    state = jzero.shard_train_state(jzero.TrainState.create(params=params, tx=optax.sgd(1.0)), stage=3)
    step = jzero.make_train_step(lambda params, batch: sum(x.sum() for x in jax.tree.leaves(params)) * batch.mean())
    shapes = jzero.abstract_train_state(state, stage=3)
    with jzero.CheckpointManager(tmp_path) as manager:
        for _ in range(3):
            state, _ = step(state, jnp.ones(8))
            manager.save(state)
        manager.wait()
        for number in manager.all_steps():
            restored = manager.restore(shapes, step=number)
            assert int(restored.step) == number
            for x in jax.tree.leaves(jzero.gather_params(restored)):
                assert np.unique(np.asarray(x)).tolist() == [-number]


def test_extras_and_the_position_of_the_data(plain, tmp_path):
    state, data = sharded(plain, 1), Numbers()
    for _ in range(5):
        next(data)
    extra = {
        "rng": jax.random.key(7),
        "other": jax.random.key(3, impl="rbg"),
        "history": [1, 2.5, None, True, "text", b"\x01"],
        "nested": {"array": np.arange(3, dtype=np.int8), "half": jnp.ones(2, jnp.bfloat16)},
        "swapped": np.arange(3, dtype=">i4"),
        "small": np.arange(3).astype(jnp.int4),
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
    assert found["swapped"].tolist() == found["small"].tolist() == [0, 1, 2]
    assert found["small"].dtype == jnp.int4
    for name in ("rng", "other"):
        assert found[name].dtype == extra[name].dtype
        np.testing.assert_array_equal(*(jax.random.key_data(x[name]) for x in (found, extra)))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"a": {"f": print}}, r"`extra/a/f` must hold arrays.*got builtin_function_or_method"),
        ({1: 2}, "The keys of `extra` must be text"),
        ([1], "`extra` must be a dict: got list"),
        ({"o": np.array([object()])}, r"`extra/o` is an array of object\[1\]"),
        ({"o": np.array(["text"])}, r"`extra/o` is an array of <U4\[1\]"),
        ({"o": np.zeros((0, 3))}, r"`extra/o` is an array of float64\[0, 3\]"),
        ({"a": [{"o": np.zeros(2, np.longdouble)}]}, r"`extra/a/0/o` is an array of float128\[2\]"),
        ({"o": np.zeros(2, [("x", int), ("y", float)])}, r"`extra/o` is an array of \[\('x', '<i8'\)"),
        ({"o": np.zeros(2, "V3")}, r"`extra/o` is an array of \|V3\[2\]"),
        ({"o": np.zeros(2, jnp.uint4)}, r"`extra/o` is an array of uint4\[2\]"),
    ],
)
def test_extras_that_cannot_be_saved(extra, message, plain, tmp_path):
    with pytest.raises(TypeError, match=message):
        jzero.save_checkpoint(tmp_path / "c", sharded(plain, 1), extra=extra)
    assert not (tmp_path / "c").exists()


def test_data_iterators_without_a_position(plain, tmp_path):
    state = sharded(plain, 1)
    with pytest.raises(TypeError, match="'get_state' or 'state_dict'"):
        jzero.save_checkpoint(tmp_path / "c", state, data_iterator=iter([1]))
    jzero.save_checkpoint(tmp_path / "c", state)
    with pytest.raises(ValueError, match="holds no position of a data iterator"):
        jzero.restore_checkpoint(tmp_path / "c", state, data_iterator=Numbers())


@pytest.mark.parametrize("saved_by", [1, 3])
def test_positions_that_agree_are_for_any_number_of_processes(saved_by, monkeypatch):
    next(numbers := Numbers())
    first = iterator_position(numbers)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    iterator_mover(moved := Numbers(), [first] * saved_by)()
    assert iterator_position(moved) == first
