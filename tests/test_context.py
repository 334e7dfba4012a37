"""Devices along `ZeroConfig.context_axis` have parts of the same rows, in `examples/llm` and in a user's own loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import chat_data
import decoder
import jzero
import packing
import pretrain
import training
from jzero.attention import plain as attention
from tests import hf_models, shared
from tests.tiers import default_for

ROWS, WIDTH = (8, 24), 10
TX = shared.sgd(1.0)


def mixed(p, x, gather):
    """Rows whose tokens attend to each other, then a product; what is gathered are keys."""
    keys = gather(x @ p["k"])
    return x + jax.nn.softmax(jnp.einsum("bsd,btd->bst", x @ p["q"], keys)) @ keys


def weighted(p, batch, own, gather):
    x, weights = own(batch["x"]), own(batch["weights"])
    losses = jnp.square(mixed(p, x, gather)).mean(-1)
    return jzero.Weighted((losses * weights).sum(), weights.sum())


def loss_of_parts(p, batch):
    gather = functools.partial(lax.all_gather, axis_name="context", axis=1, tiled=True)
    return weighted(p, batch, functools.partial(attention.own_part, axis="context"), gather)


@functools.cache
def on_one_device():
    """Parameters, a batch, the loss of all its rows, and the gradients."""
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4 for name in "qk"}
    weights = np.arange(np.prod(ROWS), dtype=np.float32).reshape(ROWS) % 5 * (np.arange(ROWS[1]) > 7)
    batch = {"x": rng.normal(size=(*ROWS, WIDTH)).astype(np.float32), "weights": weights}

    def mean(p):
        total = weighted(p, batch, lambda x: x, lambda x: x)
        return total.sum / total.weight

    return params, batch, *jax.jit(jax.value_and_grad(mean))(params)


NODES = {"node": 2, "data": 2, "context": 2}
COPIES = {"replica": 2, "data": 1, "context": 3}
CASES = [
    ({"data": 2, "context": 4}, 3, {}, 2),
    (COPIES, 1, {}, 1),
    (NODES, 1, {}, 1),
    ({"data": 1, "context": 3}, 0, {}, 1),
    (NODES, 3, {"secondary_params": True, "secondary_grads": True}, 2),
    ({"data": 2, "context": 4}, 2, {"reduce_scatter": False}, 4),
]


@pytest.mark.parametrize(("sizes", "stage", "fields", "steps"), default_for(CASES[:2], CASES))
def test_a_loss_of_parts_of_rows_equals_one_device(sizes, stage, fields, steps):
    """Weights are zero on the first part of each row, so a mean of the means of parts would be another."""
    params, batch, want, grads = on_one_device()
    axes = {f"{name}_axis": name for name in ("node", "replica") if name in sizes}
    mesh = jzero.make_mesh(devices=jax.devices()[: np.prod([*sizes.values()])], **sizes)
    state = shared.sharded(params, TX, stage, mesh=mesh, context_axis="context", padding_threshold=0, **axes, **fields)
    step = jzero.make_train_step(loss_of_parts, accumulate_steps=steps)
    report = jzero.analyze(step, state, batch)
    report.verify()
    new, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-6)
    got = jzero.gather_params(new)
    jax.tree.map(lambda p, a, g: np.testing.assert_allclose(p - a, g, atol=2e-6), params, got, grads)
    within = "data+context" if sizes["data"] > 1 else "context"
    moved = {(row.kind, row.axis) for row in report.collectives}
    assert ("reduce-scatter" if fields != {"reduce_scatter": False} else "all-reduce", within) in moved or not stage


def test_state_is_cut_over_both_axes_and_rows_over_one():
    params, batch, *_ = on_one_device()
    mesh = jzero.make_mesh(data=2, context=4)
    config = jzero.ZeroConfig(context_axis="context", persistence_threshold=0, padding_threshold=0)
    plan = jzero.plan_train_state(jzero.TrainState.create(params=params, tx=TX), config=config, mesh=mesh)
    assert plan.num_shards == 8
    assert plan.bytes_per_device.params == 2 * -(-WIDTH * WIDTH // 8) * 4
    assert "over 'data', 'context' (N=8), mesh (data=2, context=4), batch over ('data',)" in str(plan)
    bad = {"x": batch["x"][:3], "weights": batch["weights"][:3]}
    state = jzero.shard_train_state(jzero.TrainState.create(params=params, tx=TX), config=config, mesh=mesh)
    with pytest.raises(ValueError, match=r"divisible by 2 \(the size of mesh axes \('data',\)"):
        jzero.make_train_step(loss_of_parts)(state, bad)


def test_results_of_each_row_come_once():
    """`PerExample` of each row, made equal along the axis; `Summed` adds the parts."""
    params, batch, *_ = on_one_device()
    state = shared.sharded(
        params, TX, 3, mesh=jzero.make_mesh(data=2, context=4), context_axis="context", padding_threshold=0
    )

    def metrics(p, batch):
        of_part = attention.own_part(batch["weights"], "context").sum(1)
        return {"rows": jzero.PerExample(lax.psum(of_part, "context")), "all": jzero.Summed(of_part.sum())}

    got = jzero.make_eval_step(metrics)(state, batch)
    np.testing.assert_array_equal(got["rows"], batch["weights"].sum(1))
    assert got["all"] == batch["weights"].sum()


def test_what_cannot_be_is_refused():
    params, batch, *_ = on_one_device()
    state = jzero.TrainState.create(params=params, tx=TX)
    for fields in ({"axis": "context"}, {"node_axis": "context"}, {"replica_axis": "context"}):
        with pytest.raises(ValueError, match="`context_axis` must be None or a mesh axis other than"):
            jzero.ZeroConfig(context_axis="context", **fields)
    config = jzero.ZeroConfig(context_axis="context")
    with pytest.raises(ValueError, match="`context_axis='context'` needs a mesh that says how many parts of a row"):
        jzero.shard_train_state(state, config=config)
    with pytest.raises(ValueError, match="multiple of 10 tokens, two pieces for each device along 'context': got 24"):
        jax.vmap(lambda _: attention.own_part(batch["x"], "context"), axis_name="context")(np.ones(5))
    with pytest.raises(ValueError, match="of 24 tokens have no 7 equal parts: choose a number"):
        attention.divide(batch["x"], 7)
    with pytest.raises(ValueError, match="`context_axis='context'` needs a mesh that says how many parts of a row"):
        jzero.fit(state, loss_of_parts, batch, config=config)


CHUNKS = "--loss-chunks=2"
DECODERS = [("gemma3_text", 3, CHUNKS, False), ("gpt_oss", 4, CHUNKS, True)]


@pytest.mark.parametrize(("family", "size", "more", "trains"), default_for(DECODERS[:1], DECODERS))
def test_the_decoder_on_packed_rows_equals_one_device(family, size, more, trains, tmp_path, monkeypatch):
    """One device computes rows and logits at once; segments, windows and padding cross the borders of parts."""
    config = hf_models.write_folder(tmp_path, family)
    options = [f"--config={tmp_path}", "--data=x", f"--context={size}", "--precision=fp32", more]
    args = pretrain.parse_args([*options, "--persistence-threshold=0"])
    model, rng = decoder.Decoder(config), np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 4), np.int32))["params"]
    params = jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape) / 3), shapes)
    lengths = [5, 17, 9, 25, 12, 7, 20, 3]
    examples = [chat_data.Example(np.arange(n, dtype=np.int32) * 7 % 61, np.arange(n) % 3 > 0) for n in lengths]
    rows = packing.PackedRows(examples, 25)
    rows = [rows[i % len(rows)] for i in range(4)]
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]} | {"weights": np.float32([1, 1, 0, 1])}

    def mean(p):
        loss = training.next_token_loss(model)(p, batch)
        return loss.sum / loss.weight

    want, grads = jax.jit(jax.value_and_grad(mean) if trains else lambda p: (mean(p), None))(params)
    monkeypatch.setattr(attention, "MOST_SCORES", 700)
    mesh = jzero.make_mesh(devices=jax.devices()[: 2 * size], data=2, context=size)
    state = jzero.TrainState.create(params=params, tx=TX)
    state = jzero.shard_train_state(state, config=training.zero_config(args), mesh=mesh)
    model = training.of_parts(model, args)
    if not trains:
        assert training.make_evaluate(model)(state, [batch]) == pytest.approx(float(want), rel=2e-6)
        return
    new, metrics = jzero.make_train_step(training.next_token_loss(model), accumulate_steps=2)(state, batch)
    np.testing.assert_allclose(metrics["loss"], want, rtol=2e-6)
    got = jzero.gather_params(new)
    jax.tree.map(lambda p, a, g: np.testing.assert_allclose(p - a, g, atol=2e-5), params, got, grads)
