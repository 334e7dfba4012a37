"""`estimate_step_memory` and `make_train_step(remat=)`: against hand arithmetic and compiled programs."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState

import decoder_models
import jzero
from jzero.estimate.step_memory import memory_of_trace
from jzero.estimate.traced import trace_program
from jzero.estimate.traced_collectives import traced_collectives
from tests import models
from tests.shared import whole
from tests.step_memory_models import (
    BATCH,
    HIDDEN,
    LAYERS,
    LOCAL,
    ROWS,
    WIDTH,
    config_of,
    layer,
    mlp_loss,
    mlp_state,
    reckoned,
    stack_loss,
    stack_state,
)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_are_those_of_the_plan_and_of_the_buffers(stage):
    state = stack_state(config_of(stage))
    memory = reckoned(stack_loss, state)
    held = lambda tree: sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
    assert memory.params == held(state.params)
    assert memory.opt_state == held(state.opt_state)
    assert memory.other == LOCAL * WIDTH * 4 + held(state.step)
    assert memory.peak == memory.arguments + sum(memory.at_peak.values())


def test_what_the_host_holds_is_none_of_the_devices(monkeypatch):
    """Nor where a trace has all on the devices, since the programs of GPUs that are not there cannot tell."""
    states = [stack_state(config_of(2, offload=jzero.Offload(optimizer=home))) for home in ("none", "host")]
    near, away = (reckoned(stack_loss, state) for state in states)
    assert away.host == near.opt_state - away.opt_state > 0
    assert away.other == near.other
    monkeypatch.setattr("jzero.core.plan.plan.names_host_memory", lambda mesh: False)
    step, plan = jzero.make_train_step(stack_loss), jzero.plan_of(states[1])
    arguments = step.abstract_arguments(states[0], BATCH)
    absent = memory_of_trace(step.trace(states[0], BATCH), arguments, plan, None, gpu=True, micro_batches=1)
    assert absent.other == near.other


def test_what_a_layer_keeps():
    """Of tanh(x·up)·down: the hyperbolic tangents, which both gradients read, and the output, whose square is taken."""
    memory = reckoned(mlp_loss, mlp_state(config_of(0)))
    assert memory.activation_bytes == pytest.approx(LOCAL * (HIDDEN + WIDTH) * 4, abs=8)  # and a scalar


@pytest.mark.parametrize(("topology", "sines"), [("v5p:2x2x2", []), ("h100:8", [4 * ROWS * HIDDEN])])
def test_on_tpus_products_compute_what_is_elementwise_in_their_operands(topology, sines):
    loss = lambda params, batch: jnp.square(jnp.sin(batch @ params["up"]) @ params["down"]).mean()
    params = {"up": np.ones((WIDTH, HIDDEN), np.float32), "down": np.ones((HIDDEN, WIDTH), np.float32)}
    state = jzero.TrainState.create(params=params, tx=optax.sgd(0.1))
    step, rows = jzero.make_train_step(loss, remat="as_written"), np.ones((8 * ROWS, WIDTH), np.float32)
    memory = jzero.estimate_step_memory(step, state, rows, topology=topology, config=config_of(0))
    assert [x.num_bytes for x in memory.activations if x.layer.endswith(": sin")] == sines


def test_a_saved_operand_is_kept_though_its_product_reads_another_layout():
    """Of a recomputed block its input and the named operand, which its product contracts over outer dimensions."""

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("shares"))
    def block(y):
        shares = jax.ad_checkpoint.checkpoint_name(jnp.tanh(y), "shares")
        return jnp.einsum("rabc,rac->rb", shares, y[:, :, 0])

    loss = lambda params, x: jnp.square(block((x @ params["up"]).reshape(len(x), 2, 2, -1))).mean()
    memory = reckoned(loss, mlp_state(config_of(0)))
    assert memory.activation_bytes == pytest.approx((2 * HIDDEN + 2) * LOCAL * 4, abs=8)  # and the result, and a scalar


def test_what_the_backward_pass_needs_is_written_where_it_is_computed():
    """The sum of two products goes into a checkpoint: it is kept, not the products, which nothing else reads."""

    def loss(params, x):
        total = x @ params["up"] + jnp.roll(x, 1, 1) @ params["up"]
        return jax.checkpoint(lambda y: jnp.square(jax.nn.relu(y) @ params["down"]).mean())(total)

    memory = reckoned(loss, mlp_state(config_of(0)), remat="as_written")
    assert memory.activation_bytes == pytest.approx(LOCAL * HIDDEN * 4, abs=8)  # and a scalar


def test_one_function_per_block_however_often_it_is_called():
    block = jax.jit(lambda x, w: jnp.tanh(x @ w["up"]) @ w["down"])

    def loss(params, x):
        for _ in range(12):
            x = block(x, params)
        return jnp.square(x).mean()

    def num_functions(remat):
        return (
            jzero.make_train_step(loss, remat=remat).lower(mlp_state(config_of(1)), BATCH).as_text().count("func.func")
        )

    assert num_functions(True) <= num_functions(None) + 2


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "accumulate_steps"), [(1, 2), (2, 1), (3, 2)])
def test_sent_bytes_are_those_of_the_compiled_program(stage, accumulate_steps):
    """Scans in fp32 on CPUs, where XLA keeps every collective of the trace, and gathers updated parameters."""
    state = stack_state(config_of(stage))
    step = jzero.make_train_step(stack_loss, accumulate_steps=accumulate_steps)
    report = jzero.analyze(step, state, BATCH)
    sent = sum(row.sent_bytes for row in report.collectives)
    assert report.estimated.sent_bytes == pytest.approx(sent, rel=1e-3)
    assert report.estimated == jzero.estimate_step_memory(step, state, BATCH)
    gathered = sum(4 * row.elements for row in report.collectives if row.kind == "all-gather")
    assert report.estimated.gathered_bytes == report.estimated.planned_bytes == gathered


@pytest.mark.slow
def test_what_an_update_gathers_in_a_branch_is_sent():
    """The update of every second step gathers each matrix, in a branch."""
    state = mlp_state(config_of(3), optax.MultiSteps(optax.contrib.muon(1e-3), 2))
    report = jzero.analyze(jzero.make_train_step(mlp_loss), state, BATCH)
    report.verify()
    assert report.estimated.sent_bytes == pytest.approx(sum(row.sent_bytes for row in report.collectives), rel=0.01)


def test_products_are_counted():
    forward = 2 * LOCAL * WIDTH * HIDDEN * 2 * LAYERS
    memory = reckoned(stack_loss, stack_state(config_of(2)))
    assert memory.flops == 3 * forward  # the scan computes the gradient of its first input, too
    # The second product of a layer, whose result is the next one's input, need not be recomputed.
    assert reckoned(stack_loss, stack_state(config_of(2)), remat=True).flops == 3.5 * forward


def test_each_row_of_a_ragged_product_meets_one_matrix():
    x, w = jnp.ones((48, 16)), jnp.ones((5, 16, 24))
    products = lambda x, w: jax.lax.ragged_dot(x, w, jnp.array([8, 0, 30, 10, 0])).sum()
    for fn, count in {products: 1, jax.grad(products, (0, 1)): 2}.items():  # the gradient of a sum needs no result
        assert trace_program(jax.jit(fn).trace(x, w).jaxpr, [1, 1]).flops == count * 2 * 48 * 16 * 24


def test_of_branches_the_most_work_counts():
    """One branch multiplies, one writes the most."""

    def multiplies(x):
        for _ in range(3):
            x = x[:, :16] @ x[:16]
        return x

    def writes(x):
        return jnp.cumsum(jnp.tile(x, (64, 1)), axis=0)[:48]

    x = jax.ShapeDtypeStruct((48, 48), jnp.float32)
    jaxpr = jax.jit(lambda k, x: jax.lax.switch(k, [writes, multiplies, lambda x: x], x)).trace(0, x).jaxpr
    assert trace_program(jaxpr, [1, 1]).flops == 3 * 2 * 48 * 16 * 48


def test_what_is_divided_outside_of_a_branch_is_divided_in_it():
    fn = lambda k, x: jax.lax.cond(k, lambda x: jnp.cumsum(x, axis=0), lambda x: x, x)
    jaxpr = jax.jit(fn).trace(True, jax.ShapeDtypeStruct((48, 40), jnp.float32)).jaxpr
    for parts in (1, 8):
        (branch,) = [x.inner for x in trace_program(jaxpr, [1, parts]).operations if x.inner]
        assert max(x.num_bytes for x in branch.buffers) == 48 * 40 * 4 / parts


def test_accumulation_keeps_one_micro_batch():
    whole = reckoned(stack_loss, stack_state(config_of(2)))
    halves = reckoned(stack_loss, stack_state(config_of(2)), accumulate_steps=2)
    assert halves.activation_bytes == pytest.approx(whole.activation_bytes / 2, abs=8)


def abstract_stack():
    """Which nothing is allocated for, and the number of its parameters."""
    params = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in params.items()}
    plain = jax.eval_shape(lambda x: jzero.TrainState.create(params=x, tx=optax.adamw(1e-3)), params)
    return plain, sum(math.prod(x.shape) for x in params.values())


def test_states_fall_with_the_number_of_devices():
    """8 and 512 devices that are not there, without their compiler: 12 bytes per parameter over N."""
    plain, num_params = abstract_stack()
    for n in (8, 512):
        batch = jax.ShapeDtypeStruct((n, WIDTH), jnp.float32)
        memory = jzero.estimate_step_memory(
            jzero.make_train_step(stack_loss), plain, batch, topology=f"h200:{n}", config=config_of(3, precision="bf16")
        )
        assert (memory.params + memory.opt_state) * n == pytest.approx(12 * num_params, rel=0.02)
        assert memory.communication_seconds > 0


class Convolution(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(16, (3, 3), name="conv")(x)
        return nn.Dense(10)(nn.relu(x).mean(axis=(1, 2)))


def test_convolutions():
    model = Convolution()
    params = models.draw_params(model, np.zeros((1, 12, 12, 3), np.float32))
    plain = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))
    loss = lambda params, x: jnp.square(model.apply({"params": params}, x)).mean()
    state = jzero.shard_train_state(plain, config=config_of(0))
    memory = jzero.estimate_step_memory(jzero.make_train_step(loss), state, np.ones((8, 12, 12, 3), np.float32))
    convolution, dense = 2 * 12 * 12 * 16 * 3 * 3 * 3, 2 * 16 * 10
    assert memory.flops == 2 * convolution + 3 * dense  # the image has no gradient
    # What goes into the `relu`, the means and the outputs of the one row of a device, and a scalar.
    assert memory.activation_bytes == (12 * 12 * 16 + 16 + 10 + 1) * 4
    assert memory.activations[0].layer.startswith("Convolution/conv")
    assert "Convolution/conv" in str(memory)


MIB = 2**20
# What the compilers of jax 0.12.0.1 (CUDA 13 plugin, libtpu) said of these steps in bf16; `tests/test_accelerators.py`
# asks them again. A rule of the model that is taken out shows here.
COMPILED_PEAKS = [
    ("h200:8", "gpt_124m", (4173.6, 3011.9, 2936.5, 2707.2)),
    ("h200:8", "gpt_1_4b", (24271.6, 7002.3, 7002.3, 3899.9)),
    ("v5p:2x2x2", "gpt_124m", (4175.7, 2938.4, 2938.4, 2762.9)),
    ("v5p:2x2x2", "gpt_1_4b", (22759.1, 6538.4, 6538.4, 3865.7)),
]


def reckoned_peak(topology, model, stage):
    make_state, loss_fn, batch = getattr(decoder_models, model)()
    plain, step = jax.eval_shape(make_state, jax.random.key(0)), jzero.make_train_step(loss_fn)
    config = jzero.ZeroConfig(stage=stage, precision="bf16")
    return jzero.estimate_step_memory(step, plain, batch, topology=topology, config=config).peak / MIB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "model", "compiled", "stage"),
    [(*row, stage) for row, stage in zip(COMPILED_PEAKS, (0, 3, 1, 2), strict=True)],
)
def test_peaks_are_those_that_the_compilers_gave(topology, model, compiled, stage):
    assert reckoned_peak(topology, model, stage) == pytest.approx(compiled[stage], rel=0.09)


def test_the_peak_of_a_model_that_the_rules_were_not_made_from():
    assert reckoned_peak("h200:64", "llama_70b", 3) == pytest.approx(34.18 * 1024, rel=0.13)


def test_errors():
    state, step = stack_state(config_of(3)), jzero.make_train_step(stack_loss)
    plain = jzero.unshard_train_state(state)
    for error, says, wrong, given, options in (
        (TypeError, "got PjitFunction", jax.jit(stack_loss), state, {}),
        (TypeError, "not sharded by jzero: pass `config=", step, plain, {}),
        (ValueError, "GPUs: h200", step, state, {"topology": "h300:8"}),
        (ValueError, "must be divisible by 64", step, state, {"topology": "h200:64"}),
        (ValueError, r"`topology` must .*: got 8", step, state, {"topology": 8}),
        (TypeError, "`config` must be a `ZeroConfig`: got 3", step, plain, {"config": 3}),
    ):
        with pytest.raises(error, match=says):
            jzero.estimate_step_memory(wrong, given, BATCH, **options)


def rematted_loss(params, x):
    return jnp.square(jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, params)[0]).mean()


def jitted_loss(params, x):
    return jax.jit(stack_loss)(params, x)


def test_what_scanned_layers_keep_with_and_without_remat():
    state = stack_state(config_of(3))
    output = LOCAL * WIDTH * 4  # whose square is taken
    kept = LAYERS * LOCAL * (WIDTH + 2 * HIDDEN) * 4 + output  # input, tangents t, and 1 - t for jax
    products = LAYERS * LOCAL * (WIDTH + HIDDEN) * 4 + output  # input and first product
    recomputed = LAYERS * LOCAL * WIDTH * 4 + output  # its input alone
    cases = [
        (stack_loss, None, products),
        (stack_loss, "cheap", products),
        (stack_loss, False, kept),
        (stack_loss, True, recomputed),
        (jitted_loss, True, recomputed),
        (rematted_loss, None, recomputed),
        (rematted_loss, False, kept),
    ]
    for loss, remat, want in cases:
        memory = reckoned(loss, state, remat=remat)
        assert memory.activation_bytes == pytest.approx(want, abs=8), (loss.__name__, remat, memory)  # and a scalar
        assert {row.times for row in memory.activations} == {1, LAYERS}


def chunked_loss(checkpointed):
    """A loop that closes over a parameter, as for the cross-entropy of long sequences, chunk by chunk."""

    def loss(params, x):
        one = lambda rows: jnp.square(jnp.tanh(rows @ params["up"]) @ params["down"]).sum()
        one = jax.checkpoint(one) if checkpointed else one
        return jax.lax.map(one, x.reshape(8, -1, WIDTH)).sum() / x.size

    return loss


@pytest.mark.parametrize(
    ("cell", "stage"), [((True, None), 0), ((False, True), 2), ((False, "as_written"), 3), ((True, False), 3)]
)
def test_loops_that_close_over_parameters_are_recomputed_at_every_stage(stage, cell):
    """Kept without recomputation: t and 1 - t and the output of every chunk; with it: nothing but the rows.

    All train as plain jax does.
    """
    checkpointed, remat = cell
    recomputed = remat is True or (checkpointed and remat is None)
    tx, many = optax.sgd(0.1), np.tile(BATCH, (64, 1))
    step, state = jzero.make_train_step(chunked_loss(checkpointed), remat=remat), chunked_state(stage, tx)
    estimated = jzero.estimate_step_memory(step, state, many)
    rows = 64 * LOCAL
    if recomputed:
        assert estimated.activation_bytes <= rows * WIDTH * 4 + 64
    else:
        assert estimated.activation_bytes >= rows * (2 * HIDDEN + WIDTH) * 4
    compiled = step.lower(state, many).compile()
    limit = rows * 2 * HIDDEN * 4 // 2 + 4 * 4 * 2 * WIDTH * HIDDEN
    assert (compiled.memory_analysis().temp_size_in_bytes < limit) == recomputed
    state, metrics = compiled(state, many)
    plain, want, norm = chunked_gradients()
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    for name, x in whole(state.params).items():
        np.testing.assert_allclose(x, plain[name] - np.float32(0.1) * want[name], rtol=1e-5, atol=1e-6)


def chunked_state(stage, tx):
    """Of parameters that differ, so that a gradient shows which it is of."""
    rng = np.random.default_rng(2)
    draw = lambda *shape: (rng.normal(size=shape) / 8).astype(np.float32)
    params = {"up": draw(WIDTH, HIDDEN), "down": draw(HIDDEN, WIDTH)}
    return jzero.shard_train_state(jzero.TrainState.create(params=params, tx=tx), config=config_of(stage))


@functools.cache
def chunked_gradients():
    """The parameters, their gradients in plain jax, and the norm of these."""
    params = whole(chunked_state(0, optax.sgd(0.1)).params)
    grads = jax.tree.map(np.asarray, jax.jit(jax.grad(mlp_loss))(params, BATCH))
    return params, grads, np.sqrt(sum(np.square(x).sum() for x in grads.values()))


def test_checkpoints_in_branches_hold_at_stage_3():
    """With `jax.checkpoint` the rows and the result are kept; without it, the branch's hyperbolic tangents as well."""
    block = lambda params, x: jnp.tanh(jnp.tanh(x @ params["up"]) @ params["down"])
    # Not as many rows as a parameter has: jax hands what has one shape to the backward pass in one place.
    many, rows = jax.ShapeDtypeStruct((48 * ROWS, WIDTH), jnp.float32), 48 * LOCAL
    kept, temporaries = {}, {}
    for branch in (block, jax.checkpoint(block)):

        def loss(params, x, branch=branch):
            return jnp.square(jax.lax.cond(x[0, 0] > 0, branch, lambda _, x: x, params, x)).mean()

        step = jzero.make_train_step(loss, check_rows=False)  # a branch on one row
        report = jzero.analyze(step, mlp_state(config_of(3)), many)
        kept[branch is block] = report.estimated.activation_bytes
        temporaries[branch is block] = report.memory.temporaries
    assert kept[False] == pytest.approx(2 * rows * WIDTH * 4, abs=16)
    assert kept[True] > rows * 2 * HIDDEN * 4
    assert temporaries[False] < temporaries[True] - rows * HIDDEN * 4


@pytest.mark.parametrize("remat", [None, True])
def test_remat_in_fori_loops_gathers_one_layer_at_a_time(remat):
    def loss(params, x):
        one = lambda i, y: layer(y, jax.tree.map(lambda w: w[i], params))[0]
        return jnp.square(jax.lax.fori_loop(0, LAYERS, one, x)).mean()

    jaxpr = jzero.make_train_step(loss, remat=remat).trace(stack_state(config_of(3)), BATCH).jaxpr
    gathered = [c.num_elements for x in traced_collectives(jaxpr) if x.gathers for c in x.collectives]
    assert set(gathered) == {WIDTH * HIDDEN}


def test_remat_looks_into_branches_and_checkpoints():
    def loss(params, x):
        scanned = lambda x: jax.lax.scan(layer, x, params)[0]
        inner = jax.checkpoint(scanned)
        return jnp.square(jax.lax.cond(x[0, 0] > 0, scanned, inner, x)).mean()

    kept = {}
    for remat in (None, True):
        step = jzero.make_train_step(loss, remat=remat, check_rows=False)  # a branch on one row
        kept[remat] = jzero.estimate_step_memory(step, stack_state(config_of(1)), BATCH).activation_bytes
    assert kept[True] < kept[None] - LAYERS * LOCAL * 2 * HIDDEN * 4 // 2, kept
