"""Losses with kernels: what is saved for the backward pass, shared between layers, and known of rows and operations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jzero
from jzero.attention import attend
from jzero.core.jaxpr.equations import equations_of
from jzero.core.jaxpr.row_facts import RowKind
from jzero.core.jaxpr.rows import row_facts
from jzero.estimate.traced import trace_alone
from jzero.machines.topologies import topology_devices
from tests import kernels, shared
from tests.kernels import HEADS, SIZE, WIDTH, calls_of
from tests.tiers import default_for

LAYERS, ROWS, TOKENS = 3, 16, 7
BATCH = np.random.default_rng(0).normal(size=(ROWS, TOKENS, WIDTH)).astype(np.float32)
TX = shared.sgd(0.1)
ONCE = {"scaled": 2, "attention_forward": 1, "attention_backward": 1}


state_of = functools.partial(shared.sharded, tx=TX)


@functools.cache
def expected(scan, attend=kernels.plain_attention):
    params = kernels.params(LAYERS, scan=scan)
    loss, grads = jax.jit(jax.value_and_grad(kernels.loss_of(attend)))(params, BATCH)
    return loss, jax.tree.map(lambda x, g: x - 0.1 * g, params, grads)


def check(step, state, loss, params):
    state, metrics = step(state, BATCH)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    for new, old in zip(jax.tree.leaves(shared.whole(state.params)), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(new, old, rtol=2e-6, atol=2e-7)


def named_calls(jaxpr, name):
    return [x for x in equations_of(jaxpr) if x.primitive.name in ("jit", "pjit") and x.params["name"] == name]


WAYS = {
    "cheap": {"remat": "cheap"},
    "as_written": {"remat": "as_written"},
    "kept": {"remat": jzero.Keep(blocks=LAYERS)},
    "half_kept": {"remat": jzero.Keep(blocks=LAYERS // 2)},
    "micro_batches": {"remat": "cheap", "accumulate_steps": 2},
}


PAIRS = [(way, scan) for way in WAYS for scan in (False, True)]


@pytest.mark.parametrize(("way", "scan"), default_for([*PAIRS[::4], *PAIRS[3::4]], PAIRS))
def test_a_kernel_runs_once_in_each_pass(way, scan):
    params = kernels.params(LAYERS, scan=scan)
    options = {**WAYS[way]}
    if scan and "kept" in way:
        options["remat"] = jzero.Keep(blocks=1)  # the loop
    step = jzero.make_train_step(kernels.loss_of(), **options)
    count = LAYERS * options.get("accumulate_steps", 1)
    assert calls_of(step.trace(state_of(params), BATCH).jaxpr) == {name: count * n for name, n in ONCE.items()}
    if way not in ("cheap", "micro_batches"):  # numbers of `cheap` are those of the tests of rules and heads below
        check(step, state_of(params), *expected(scan))


@pytest.mark.parametrize("remat", ["cheap", "as_written"])
def test_equal_layers_with_kernels_are_one_function(remat):
    step = jzero.make_train_step(kernels.loss_of(), remat=remat)
    calls = named_calls(step.trace(state_of(kernels.params(LAYERS, scan=False)), BATCH).jaxpr, "layer")
    assert len(calls) == 2 * LAYERS
    assert len({id(x.params["jaxpr"]) for x in calls[1:LAYERS]}) == 1  # the first has no gradient of its input


def test_layers_whose_rules_differ_are_not_shared():
    def attend(factor):
        fn = jax.custom_vjp(kernels.attention)
        fn.defvjp(kernels._forward, lambda saved, ct: tuple(factor * x for x in kernels._backward(saved, ct)))
        return fn

    def loss(params, batch):
        for i, p in enumerate(params):
            batch = kernels.layer(batch, p, attend(1.0 + i % 2))
        return jnp.square(batch).mean()

    params = kernels.params(LAYERS, scan=False)
    value, grads = jax.jit(jax.value_and_grad(loss))(params, BATCH)
    step = jzero.make_train_step(loss, remat="cheap")
    check(step, state_of(params), value, jax.tree.map(lambda x, g: x - 0.1 * g, params, grads))


@pytest.mark.parametrize("scan", [False, True])
def test_kept_blocks_save_what_the_backward_kernel_reads(scan):
    """Between the products and the kernel is a sine: its cosine alone is computed in the backward pass."""
    params = kernels.params(LAYERS, scan=scan)
    sines = {}
    for keep in (0, LAYERS):
        remat = jzero.Keep(blocks=1 if scan else keep) if keep else "cheap"
        jaxpr = jzero.make_train_step(kernels.loss_of(), remat=remat).trace(state_of(params), BATCH).jaxpr
        found = [x for x in equations_of(jaxpr) if x.primitive.name == "sin"]
        sines[keep] = len(found)
    assert sines[LAYERS] < sines[0]


def test_one_lane_of_the_statistics_is_saved():
    """Kernels for TPUs write a number in all 128 lanes of a register."""
    size, width = 128, 128
    mask = masks.MultiHeadMask([masks.CausalMask((size, size))])

    def loss(params, batch):
        for w in params:
            attend = splash.make_splash_mha_single_device(mask, interpret=True)
            q, k, v = (jnp.sin(batch @ w[i])[:, None] for i in range(3))
            batch = batch + jax.vmap(attend)(q, k, v)[:, 0]
        return jnp.square(batch).mean()

    params = [jnp.eye(width)[None] * jnp.ones((3, 1, 1)) * (1 + i) / 8 for i in range(2)]
    batch = jnp.ones((8, size, width))
    traced = jzero.make_train_step(loss, remat="cheap").trace(state_of(params), batch)
    (first, *_) = named_calls(traced.jaxpr, "layer")
    statistics = [x.aval.shape for x in first.outvars if x.aval.shape[-1:] == (1,)]
    assert statistics == [(1, 1, size, 1)]
    assert (1, 1, size, 128) not in [x.aval.shape for x in first.outvars]


def facts(fn, *shapes):
    jaxpr = jax.make_jaxpr(fn)(*(jnp.ones(shape) for shape in shapes))
    return row_facts(jaxpr, batch=[True] * len(shapes), keys=[False] * len(shapes), axes=("data",))


def test_rows_along_the_grid_of_a_kernel_stay_rows():
    shape = (6, HEADS, TOKENS, SIZE)
    (found,) = facts(kernels.attention, shape, shape, shape)
    assert (found.kind, found.row_dims) == (RowKind.ROW, {0})
    mask = masks.MultiHeadMask([masks.CausalMask((128, 128))] * 2)
    attend = jax.vmap(splash.make_splash_mha_single_device(mask, interpret=True))
    (found,) = facts(attend, *[(6, 2, 128, 128)] * 3)
    assert (found.kind, found.row_dims) == (RowKind.ROW, {0})
    (found,) = facts(lambda *x: kernels.attention(*x).sum(), shape, shape, shape)
    assert found.kind is RowKind.LINEAR


def test_a_kernel_over_the_whole_batch_is_unknown():
    (found,) = facts(lambda x: kernels.scaled(x, x[0]), (6, WIDTH))
    assert (found.kind, found.row_dims) == (RowKind.UNKNOWN, set())
    swapped = lambda x: kernels.attention(x, x.swapaxes(0, 1), x)
    (found,) = facts(swapped, (6, 6, TOKENS, SIZE))
    assert found.kind is RowKind.UNKNOWN


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_heads_over_another_axis(kind):
    """Each device along `model` has a third of the heads, in the loss's own `shard_map`."""
    mesh = jax.make_mesh((2, 3), ("data", "model"), axis_types=(kind,) * 2, devices=jax.devices()[:6])
    to = jax.sharding.reshard if kind == AxisType.Explicit else lambda x, spec: x

    def attend(q, k, v):
        spec, on = P(None, "model"), None if kind == AxisType.Explicit else mesh
        how = {"mesh": on, "in_specs": (spec,) * 3, "out_specs": spec, "axis_names": {"model"}, "check_vma": False}
        return to(jax.shard_map(kernels.attention, **how)(*(to(x, spec) for x in (q, k, v))), P())

    step = jzero.make_train_step(kernels.loss_of(attend), remat="cheap")
    state = state_of(kernels.params(LAYERS, scan=False), mesh=mesh)
    assert calls_of(step.trace(state, BATCH).jaxpr) == {name: LAYERS * n for name, n in ONCE.items()}
    check(step, state, *expected(False))


def attention_layers(attend, size=256, width=128):
    def loss(params, batch):
        for w in params:
            q, k, v = (jnp.sin(batch @ w[i])[:, None] for i in range(3))  # [B, H, S, C]
            batch = batch + attend(q, k, v)[:, 0]
        return jnp.square(batch).mean()

    params = [jnp.ones((3, width, width), jnp.bfloat16) for _ in range(LAYERS)]
    return loss, params, jnp.ones((8, size, width), jnp.bfloat16)


def test_splash_attention_is_lowered_for_tpus_once_for_all_layers():
    mask = masks.MultiHeadMask([masks.CausalMask((256, 256))])
    attend = jax.vmap(splash.make_splash_mha_single_device(mask))
    loss, params, batch = attention_layers(attend)
    traced = jzero.make_train_step(loss, remat="cheap").trace(state_of(params), batch)
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("@tpu_custom_call") == 3


@pytest.fixture
def cudnn(monkeypatch):
    """A stand-in for the questions which cuDNN and which GPU there are."""
    library = "jax._src.cudnn.fused_attention_stablehlo."
    monkeypatch.setattr(f"{library}check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(f"{library}check_compute_capability", lambda capability: True)
    monkeypatch.setattr(f"{library}is_cuda_compute_capability_equal", lambda capability: False)


@pytest.mark.compilers
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize(
    ("topology", "kernel", "call", "count"),
    [
        ("v5p:2x2x2", "auto", "@tpu_custom_call", 6),
        ("h200:8", "cudnn", "__cudnn$fmha", 4),
        ("h200:8", "auto", "__gpu$xla.gpu.triton", 6),
    ],
)
def test_kernels_are_chosen_for_machines_that_are_not_there(topology, kernel, call, count):
    """By the device for which a loss is traced; and lowered once for the first layer, and once for the others."""
    loss, params, batch = attention_layers(
        lambda *x: attend(*(y.swapaxes(1, 2) for y in x), kernel=kernel).swapaxes(1, 2)
    )
    plain = jax.eval_shape(lambda p: jzero.TrainState.create(params=p, tx=TX), params)
    mesh = jzero.make_mesh(devices=topology_devices(topology))
    state = jzero.abstract_train_state(plain, config=shared.config(stage=3), mesh=mesh)
    step = jzero.make_train_step(loss, remat="cheap")
    text = step.lower(state, jax.ShapeDtypeStruct(batch.shape, batch.dtype)).as_text()
    assert text.count(call) == count


@pytest.mark.usefixtures("cudnn")
def test_attention_of_cudnn_is_a_kernel():
    def attend(q, k, v):
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn").swapaxes(1, 2)

    loss, params, batch = attention_layers(attend)
    traced = jzero.make_train_step(loss, remat="cheap").trace(state_of(params), batch)
    names = [x.primitive.name for x in equations_of(traced.jaxpr)]
    for name in ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"):
        assert names.count(name) == LAYERS
    kernels_found = trace_alone(traced.jaxpr).kernels
    product = 2 * 256 * 257 / 2 * 128  # of one row and head, half of it masked
    assert {name: found[0].flops for (name, _), found in kernels_found.items()} == {
        "dot_product_attention_fwd": 2 * product,
        "dot_product_attention_bwd": 5 * product,
    }
    (found,) = facts(lambda x: attend(*[x.astype(jnp.bfloat16)] * 3), (6, HEADS, 256, 64))
    assert (found.kind, found.row_dims) == (RowKind.ROW, {0})
