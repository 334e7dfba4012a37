"""The load-balancing loss of mixtures of experts, `examples/llm/balance.py`: that of the whole batch, as published."""

import argparse
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import balance
import decoder
import jzero
from jzero.hf import Experts
from tests import hf_models
from tests.shared import whole
from tests.test_hf_parity import born
from tests.tiers import slow

LAYERS, WIDTH, VOCABULARY = 2, 8, 11
EXPERTS = Experts(count=5, per_token=2, normalized=True, aux_coef=0.7)


class Model:
    """Two routers over embedded tokens, and a head: what the loss sees of a decoder."""

    config = types.SimpleNamespace(experts=EXPERTS)

    def __init__(self, context=None):
        self.context = context

    def apply(self, variables, tokens, positions=None, segments=None, targets=None, mutable=()):
        params = variables["params"]
        x = params["embed"][tokens]
        logits = jnp.einsum("bsd,lde->lbse", x, params["router"])
        y = jnp.tanh(x) @ params["head"]
        y = y if targets is None else optax.softmax_cross_entropy_with_integer_labels(y, targets)
        return y, {"router": {"layers": {"logits": (logits,)}}}


def make_state():
    rng = np.random.default_rng(0)
    shapes = {"embed": (VOCABULARY, WIDTH), "router": (LAYERS, WIDTH, 5), "head": (WIDTH, VOCABULARY)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return jzero.TrainState.create(params=params, tx=optax.sgd(1.0))


def make_batch(num_rows):
    """Padding, tokens that are not learned, and a row that only fills the batch."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, VOCABULARY, (num_rows, 7)).astype(np.int32)
    ends = rng.integers(2, 8, num_rows)
    segments = np.where(np.arange(7)[None] < ends[:, None], 0, -1).astype(np.int32)
    learned = (rng.random((num_rows, 7)) < 0.5) & (segments >= 0)
    weights = np.ones(num_rows, np.float32)
    weights[-1] = 0
    return {"tokens": tokens, "segments": segments, "learned": learned, "weights": weights}


def published(params, batch):
    """The loss by the formulas of `transformers`' `load_balancing_loss_func`, of the whole batch at once."""
    logits, kept = Model().apply({"params": params}, batch["tokens"][:, :-1])
    counted = batch["learned"][:, 1:] * batch["weights"][:, None]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    real = (batch["segments"][:, :-1] >= 0) & (batch["weights"] > 0)[:, None]
    router = jnp.concatenate([x[real] for x in kept["router"]["layers"]["logits"][0]])  # [L tokens, E]
    probabilities = jax.nn.softmax(router, axis=-1)
    mask = jax.nn.one_hot(jax.lax.top_k(probabilities, 2)[1], 5)  # [L tokens, 2, E]
    aux = 5 * (mask.mean(0) * probabilities.mean(0)[None]).sum()
    return (losses * counted).sum() / counted.sum() + EXPERTS.aux_coef * aux


@pytest.mark.parametrize(
    ("sizes", "micro_batches"),
    [({"data": 2, "context": 3}, 3), slow({"data": 3}, 1)],
)
def test_the_loss_of_parts_is_that_of_the_whole_batch(sizes, micro_batches):
    batch = make_batch(12)
    plain = make_state()
    loss, grads = jax.jit(jax.value_and_grad(lambda params: published(params, batch)))(plain.params)
    context = "context" if "context" in sizes else None
    step = balance.make_step(
        Model(context), argparse.Namespace(accumulate_steps=micro_batches, offload_activations=False)
    )
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0, context_axis=context)
    mesh = jzero.make_mesh(devices=jax.devices()[: np.prod([*sizes.values()])], **sizes)
    state, metrics = step(jzero.shard_train_state(plain, config=config, mesh=mesh), batch)
    shrink = 1 / np.maximum(1, optax.tree.norm(grads))  # the step clips
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    wanted = jax.tree.map(lambda x, g: x - g * shrink, plain.params, grads)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6), whole(state).params, wanted)


@pytest.mark.slow
def test_it_is_that_of_transformers(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = hf_models.write_folder(tmp_path, "mixtral")
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = np.random.default_rng(0).integers(1, 61, (3, 10))
    with torch.no_grad():
        found = there(torch.tensor(tokens[:, :-1]), output_router_logits=True)
    losses = torch.nn.functional.cross_entropy(found.logits.reshape(-1, 61), torch.tensor(tokens[:, 1:]).reshape(-1))
    wanted = losses.item() + config.experts.aux_coef * found.aux_loss.item()
    model = decoder.Decoder(config)
    state = jzero.load_params(born(config, 3)[0], tmp_path, mapping="auto")
    loss = jzero.value_and_grad(balance.balanced_loss(model))
    batch = {"tokens": tokens.astype(np.int32), "weights": np.ones(3, np.float32)}
    for given in (batch, balance.make_balance(model)(state, batch)):
        np.testing.assert_allclose(loss(state, given)[0], wanted, rtol=1e-5)
