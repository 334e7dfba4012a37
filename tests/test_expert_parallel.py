"""Experts on a mesh axis of their own beside ZeRO, `examples/llm/expert_parallel.py`, against one device."""

import argparse
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import balance
import decoder
import expert_parallel
import experts
import jzero
import jzero.hf
import pretrain
import training
from tests import hf_models, shared, test_hf_parity
from tests.tiers import default_for, slow

TX = shared.sgd(1.0)
TOKENS, WIDTH, HIDDEN = 48, 10, 14


def draw(shapes, scale=1.0):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) * np.float32(scale), shapes)


def born(params, mesh, config):
    """Returns a state whose experts are cut by what the function that makes it says."""

    def make_state(key):
        arrays = jax.tree.map(jnp.asarray, params)
        return jzero.TrainState.create(params=expert_parallel.cut_by_expert(arrays, mesh), tx=TX)

    return jzero.init_train_state(make_state, jax.random.key(0), config=config, mesh=mesh)


LAYERS = [("blocks", 4, 3.0), ("ragged", 4, 0.0), ("ragged", 2, 3.0), ("blocks", 2, 0.0)]


@pytest.mark.parametrize(("product", "size", "preferred"), default_for(LAYERS[:2], LAYERS))
def test_a_layer_of_experts_equals_products_with_all_of_them(product, size, preferred):
    """One of 8 experts may be `preferred`, so that most blocks are on one device."""
    kind = jzero.hf.Experts(count=8, per_token=3, normalized=True, aux_coef=0.0)
    shapes = {"up": (1, 8, WIDTH, HIDDEN), "down": (1, 8, HIDDEN, WIDTH)}
    params = {name: {"kernel": draw(jax.ShapeDtypeStruct(shape, np.float32), 0.3)} for name, shape in shapes.items()}
    x = draw(jax.ShapeDtypeStruct((TOKENS, WIDTH + 8), np.float32))
    x[:, WIDTH + 6] += preferred
    mesh = jzero.make_mesh(experts=size, data=8 // size)

    def of_each(p, x):  # dense: each token with every expert
        every = jnp.einsum("neh,ehd->ned", jnp.sin(jnp.einsum("nd,edh->neh", x[:, :WIDTH], p["up"])), p["down"])
        best = jnp.sort(x[:, WIDTH:], axis=-1)[:, -3:-2]
        shares = jax.nn.softmax(jnp.where(x[:, WIDTH:] >= best, x[:, WIDTH:], -jnp.inf), axis=-1)
        return jnp.einsum("ned,ne->nd", every, shares)

    def of_sorted(p, x):
        x = expert_parallel.own_rows(x, mesh)
        experts = expert_parallel.Apart.of(mesh, product, x[:, WIDTH:], kind)
        hidden = jnp.sin(experts.multiply(experts.spread(x[:, :WIDTH]), p["up"]))
        return experts.collect(experts.multiply(hidden, p["down"]))

    def loss_with(layer):
        return lambda p, x: jnp.square(layer(jax.tree.map(lambda k: k[0], {n: p[n]["kernel"] for n in p}), x)).mean()

    want, grads = jax.jit(jax.value_and_grad(loss_with(of_each)))(params, x)
    state = born(params, mesh, jzero.ZeroConfig(stage=3, persistence_threshold=0))
    assert state.params["up"]["kernel"].sharding.spec[:2] == (None, "experts")
    step = jzero.make_train_step(loss_with(of_sorted))
    report = jzero.analyze(step, state, x)
    report.verify()
    held = sum(k.size for k in jax.tree.leaves(params)) // size
    sent = {(row.kind, row.axis): row.elements for row in report.collectives}
    assert held <= sent["reduce-scatter", "data"] < 1.2 * held, "a device's own experts alone, up to padding"
    new, metrics = step(state, x)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-6)
    got = jzero.gather_params(new)
    jax.tree.map(lambda p, a, g: np.testing.assert_allclose(p - a, g, atol=1e-6), params, got, grads)


@pytest.mark.parametrize(("more", "blocks"), [(0, [1, 1, 1, 1]), (9, [2, 1, 1, 1]), (25, [3, 1, 1, 1])])
def test_only_experts_with_more_tokens_have_further_blocks(more, blocks):
    """Of 40 tokens for 4 experts a block holds 13. What is left has no tokens, and a step leaves its products out."""
    kind = jzero.hf.Experts(count=4, per_token=1, normalized=True, aux_coef=0.0)
    logits = jax.nn.one_hot(jnp.arange(40) % 4, 4).at[:more, 0].add(2.0)
    made = experts.Blocks.of(logits, kind)
    held = np.bincount(made.places // made.size, minlength=len(made.experts))
    assert (made.size, held.sum(), list(made.experts[:4])) == (13, 40, [0, 1, 2, 3])
    assert [(held[made.experts == e] > 0).sum() for e in range(4)] == blocks
    assert not held[made.experts == 4].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "product", "size", "micro_batches"), [("mixtral", "ragged", 4, 2), ("gpt_oss", "blocks", 2, 1)]
)
def test_the_decoder_trains_as_on_one_device(family, product, size, micro_batches, tmp_path):
    """With the router's loss of the whole batch; one row only fills it."""
    config = hf_models.write_folder(tmp_path, family, num_local_experts=4, num_hidden_layers=2)
    options = [f"--config={tmp_path}", "--data=x", f"--experts={size}", "--precision=fp32", f"--products={product}"]
    args = pretrain.parse_args([*options, "--persistence-threshold=0", f"--accumulate-steps={micro_batches}"])
    model, num_rows = decoder.Decoder(config), 8 * micro_batches
    tokens = np.random.default_rng(1).integers(0, 61, (num_rows, 10)).astype(np.int32)
    batch = {"tokens": tokens, "weights": np.float32([1] * (num_rows - 1) + [0])}
    params = draw(jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 4), np.int32))["params"], 1 / 3)

    def mean(p):
        loss = jax.vmap(lambda p: balance.balanced_loss(model)(p, batch), None, axis_name=balance.AXIS, axis_size=1)(p)
        return loss.sum[0] / loss.weight[0]

    want, grads = jax.jit(jax.value_and_grad(mean))(params)
    mesh = pretrain.make_mesh(model, args)
    state = born(params, mesh, training.zero_config(args))
    step = balance.make_step(training.of_parts(model, args).clone(product=product, mesh=mesh), args)
    new, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["loss"], want, rtol=2e-6)
    shrink = 1 / np.maximum(1, optax.tree.norm(grads))  # the step clips
    got = jzero.gather_params(new)
    jax.tree.map(lambda p, a, g: np.testing.assert_allclose(p - a, g * shrink, atol=2e-6), params, got, grads)


def test_the_plan_says_both_axes():
    mesh = jzero.make_mesh(experts=4, data=2)
    params = {
        "up": {"kernel": np.zeros((3, 4, 10, 12), np.float32)},
        "router": {"kernel": np.zeros((10, 4), np.float32)},
    }
    plan = jzero.plan_of(born(params, mesh, jzero.ZeroConfig(stage=3, persistence_threshold=0)))
    assert "float32 cut on dim 2, dim 1 over experts" in str(plan)
    assert plan.bytes_per_device.params == 4 * (3 * 4 * 10 * 12 // 8 + 10 * 4 // 2)


def test_what_cannot_be_divided_is_refused(tmp_path):
    for family, text in (("mixtral", "5 experts have no 4 equal parts: change --experts"), ("llama", "has no experts")):
        model = decoder.Decoder(hf_models.write_folder(tmp_path / family, family))
        args = pretrain.parse_args([f"--config={tmp_path / family}", "--data=x", "--experts=4"])
        with pytest.raises(ValueError, match=text):
            pretrain.make_mesh(model, args)
    with pytest.raises(ValueError, match="6 rows of the devices along --experts have no 4 equal parts"):
        expert_parallel.own_rows(np.zeros((6, 3)), jzero.make_mesh(experts=4, data=2))


# The load-balancing loss, `examples/llm/balance.py`: that of the whole batch, as published.


ROUTERS, FEATURES, VOCABULARY = 2, 8, 11
EXPERTS = jzero.hf.Experts(count=5, per_token=2, normalized=True, aux_coef=0.7)


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
    shapes = {"embed": (VOCABULARY, FEATURES), "router": (ROUTERS, FEATURES, 5), "head": (FEATURES, VOCABULARY)}
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
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6), shared.whole(state).params, wanted)


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
    state = jzero.load_params(test_hf_parity.born(config, 3)[0], tmp_path, mapping="auto")
    loss = jzero.value_and_grad(balance.balanced_loss(model))
    batch = {"tokens": tokens.astype(np.int32), "weights": np.ones(3, np.float32)}
    for given in (batch, balance.make_balance(model)(state, batch)):
        np.testing.assert_allclose(loss(state, given)[0], wanted, rtol=1e-5)
