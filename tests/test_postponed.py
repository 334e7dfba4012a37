"""Which operations compilers postpone or fuse, and what memory that takes: against hand arithmetic."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jzero
from jzero.estimate.footprint import footprint
from jzero.estimate.traced import trace_program

ROWS, WIDTH, LAYERS = 4096, 16, 6
ACTIVATION = ROWS * WIDTH * 4


def peak(loss, params, *inputs, gpu, gradient=jax.grad):
    jaxpr = jax.jit(gradient(loss)).trace(params, *inputs).jaxpr
    return footprint(trace_program(jaxpr, [1] * len(jaxpr.jaxpr.invars)), gpu=gpu).peak


def chain(block):
    def loss(params, x):
        for w in params:
            x = block(x, w)
        return x.mean()

    return loss


def layer(x, w):
    return jnp.exp(x @ w)  # all that its derivative needs


PARAMS = [jnp.ones((WIDTH, WIDTH))] * LAYERS
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def test_operands_of_the_gradients_of_weights_stay_until_the_end():
    """Of each layer its input and the cotangent of its product; in order, the cotangent of one layer at a time.

    The input of the first layer is an argument.
    """
    in_order, late = (peak(chain(layer), PARAMS, X, gpu=gpu) for gpu in (False, True))
    assert late == pytest.approx((2 * LAYERS - 1) * ACTIVATION, rel=0.1)
    assert in_order == pytest.approx((LAYERS + 1) * ACTIVATION, rel=0.1)


def test_they_stay_past_barriers_that_do_not_wait_for_them():
    """A recomputed block begins with a barrier, which waits for its operands alone."""
    assert peak(chain(jax.checkpoint(layer)), PARAMS, X, gpu=True) >= (2 * LAYERS - 1) * ACTIVATION


@pytest.mark.parametrize("stage", [0, 3])
def test_the_blocks_of_a_step_wait_for_them_as_on_the_machine_that_is_named(stage):
    """Without its devices as with them, the trace for a GPU has waits: then the products of one block are pending."""
    tx = optax.sgd(0.1)
    plain = jax.eval_shape(lambda: jzero.TrainState.create(params=PARAMS, tx=tx))
    batch, config = jax.ShapeDtypeStruct((8 * ROWS, WIDTH), jnp.float32), jzero.ZeroConfig(stage=stage)
    step = jzero.make_train_step(chain(jax.checkpoint(layer)))
    memory = jzero.estimate_step_memory(step, plain, batch, topology="h200:8", config=config)
    assert memory.temporaries <= (LAYERS + 3) * ACTIVATION * 1.1


def layers_again(x, stacks):
    """Layers in a loop, of which each iteration of the backward pass computes several again."""

    def block(x, ws):
        for w in ws:
            x = layer(x, w)
        return x, None

    return jax.lax.scan(jax.checkpoint(block), x, stacks)[0]


STACKS = [jnp.ones((2, WIDTH, WIDTH))] * LAYERS


@pytest.mark.parametrize("gpu", [False, True])
def test_in_a_loop_they_stay_to_the_end_of_an_iteration(gpu):
    """Of each layer its input and the cotangent of its product.

    Beside it: what is kept of two iterations, what is carried, and the gradient of the loss.
    """
    found = peak(lambda params, x: layers_again(x, params).mean(), STACKS, X, gpu=gpu)
    assert found == pytest.approx((2 * LAYERS - 1 + 4) * ACTIVATION, rel=0.01)


def test_on_tpus_loops_run_last_whose_results_the_backward_pass_does_not_need():
    """It computes parts of a loss again; what they read waits for the forward pass's, unless it needs their sum."""

    def of(result):
        def loss(params, x):
            table = params["a"] @ params["b"]
            part = jax.checkpoint(lambda none, x: (none, jnp.square(x @ table).sum()))
            parts = layers_again(x, params["stacks"]).reshape(16, -1, WIDTH)
            return result(jax.lax.scan(part, None, parts)[1].sum())

        return loss

    params = {"stacks": STACKS, "a": jnp.ones((WIDTH, WIDTH)), "b": jnp.ones((WIDTH, ROWS))}
    how = {"gpu": False, "gradient": jax.value_and_grad}
    waits, needed = (peak(of(result), params, X, **how) for result in (lambda x: x, jnp.square))
    assert waits - needed == ACTIVATION  # the table


def test_concatenated_features_are_joined_for_each_reader():
    """Both ends of an edge: kept are the parts, which other layers read as well, not the three of them joined."""

    def loss(params, parts):
        joined = jnp.concatenate([jnp.sin(x) for x in parts], axis=-1)
        out = jnp.square(joined @ params[0])
        for w in params[1:]:
            out = jnp.square(out @ w)
        return out.sum()

    params = [jnp.ones((8 * WIDTH, WIDTH)), *PARAMS[1:]]
    parts = [X] * 8
    jaxpr = jax.jit(jax.grad(loss)).trace(params, parts).jaxpr
    kept = footprint(trace_program(jaxpr, [1] * len(jaxpr.jaxpr.invars)), gpu=True).residuals
    assert max(x.num_bytes for x in kept) == ACTIVATION
    assert not [x.name for x in kept if "concatenate" in x.name]


@pytest.mark.parametrize(("on_tpus", "copies"), [(False, 2), (True, 1)])
def test_what_is_joined_is_stored_once_on_tpus(on_tpus, copies):
    def sorts(parts):
        joined = jnp.concatenate(parts, axis=-1)
        return jnp.sort(joined, axis=0), jnp.sort(joined, axis=1)

    program = trace_program(jax.jit(sorts).trace([X] * 2).jaxpr, [1, 1], fuses_products=on_tpus)
    assert sum(x.name.endswith(":concatenate") for x in program.buffers) == copies


def test_what_is_normalized_on_gpus_is_not_written_over():
    """A fusion reads each row for its maximum, then again; a product reads the result."""

    def normalized(x, w):
        scores = x @ w
        return (scores - scores.max(-1, keepdims=True)) @ w.T

    jaxpr = jax.jit(normalized).trace(X, jnp.ones((WIDTH, 3 * WIDTH))).jaxpr
    program = trace_program(jaxpr, [1, 1])
    of_gpu, of_tpu = (footprint(program, gpu=gpu).peak for gpu in (True, False))
    assert of_tpu == 3 * ACTIVATION + ROWS * 4  # and the maxima
    assert of_gpu - of_tpu == 3 * ACTIVATION


@pytest.mark.parametrize(("larger", "kept"), [(True, WIDTH), (False, 1)])
def test_expensive_terms_of_a_sum_are_written_beside_it(larger, kept):
    """If they take more than what they are made of: both passes sum exponentials of all pairs' differences."""

    def loss(params, x):
        y = x @ params[0]
        terms = jnp.exp(y[:, :, None] - x[:, None]) if larger else jnp.exp(y)
        total = terms.sum(-1)
        return jnp.square(total).mean()

    jaxpr = jax.jit(jax.grad(loss)).trace(PARAMS[:1], X).jaxpr
    residuals = footprint(trace_program(jaxpr, [1, 1]), gpu=True).residuals
    assert max(x.num_bytes for x in residuals) == kept * ACTIVATION


@pytest.mark.parametrize(("levels", "written"), [(1, 0), (2, 1), (4, 1), (5, 2)])
def test_what_is_made_of_slices_of_slices_is_written(levels, written):
    """Each level of a tree of products computes those below twice, until one of them is written."""

    def sums(x):
        x = jnp.exp(x)
        for _ in range(levels):
            even, odd = (jax.lax.slice_in_dim(x, i, None, 2) for i in range(2))
            x = even * odd
        return x.sum(0), jnp.square(x).sum(0)

    buffers = trace_program(jax.jit(sums).trace(X).jaxpr, [1]).buffers
    products = [x.num_bytes for x in buffers if x.name.endswith(":mul")]
    assert products == [ACTIVATION // 2**i for i in (2, 5)][:written]


@pytest.mark.parametrize(("is_tpu", "inner", "rows"), [(True, 1, [3, 7, 7]), (False, 1, [7]), (True, 0, [7])])
def test_on_tpus_a_pad_between_elements_is_a_kernel_of_its_own(is_tpu, inner, rows):
    """As an associative scan makes, and the gradient of a slice with strides. What it pads is written before it."""
    padding = [(2 - inner, 2 - inner, inner), (0, 0, 0)]  # three rows become seven
    fn = lambda x: jax.lax.cumsum(jnp.cos(jax.lax.pad(jnp.sin(x), 0.0, padding)))
    program = trace_program(jax.make_jaxpr(fn)(jnp.ones((3, 16))), [1], fuses_products=is_tpu)
    sizes = [program.buffers[i].num_bytes for op in program.operations for i in op.writes]
    assert [x for x in sizes if x > 4] == [n * 64 for n in rows]  # the result takes the place of an argument
