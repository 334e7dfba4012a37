"""Attention as one kernel, interpreted: equal to plain attention by feature, whole and in pieces."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import decoder
import jzero
import pretrain
import training
from jzero.attention import KERNELS, attend, choose, kernels, own_part, whole_rows
from tests import hf_models, shared
from tests.kernels import calls_of
from tests.tiers import default_for

ROWS, TOKENS, HEADS, KV_HEADS, SIZE = 2, 256, 4, 2, 32
CASES = {
    "causal": ({}, ("splash", "pallas")),
    "window": ({"window": 100}, ("splash",)),
    "segments": ({"segments": True}, ("splash", "pallas")),
    "soft cap": ({"softcap": 5.0}, ("splash",)),
    "sinks": ({"sinks": True}, ("splash",)),
    "all": ({"window": 40, "segments": True, "sinks": True, "softcap": 5.0}, ("splash",)),
}
PAIRS = [(case, kernel) for case, (*_, kernels) in CASES.items() for kernel in kernels]


def operands(tokens=TOKENS):
    rng = np.random.default_rng(0)
    shapes = [(ROWS, tokens, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in [*shapes, (HEADS,)]]


def segments_of(tokens=TOKENS):
    """Segments of rows of four examples of one length, and the places in them."""
    index = np.broadcast_to(np.arange(tokens)[None], (ROWS, tokens))
    return {"positions": index % (tokens // 4), "segments": index // (tokens // 4)}


def both(kernel, how):
    """Attention by plain products and by a kernel, with what a case has."""

    def of(kernel):
        def total(q, k, v, sinks):
            given = {
                name: x for name, x in {"segments": segments_of()["segments"], "sinks": sinks}.items() if name in how
            }
            return jnp.sin(attend(q, k, v, kernel=kernel, **how | given)).sum()

        return jax.jit(jax.value_and_grad(total, range(4)))

    return of("plain"), of(kernel)


@pytest.mark.parametrize(("case", "kernel"), default_for([("all", "splash"), ("segments", "pallas")], PAIRS))
def test_kernels_equal_plain_attention(case, kernel):
    (want, wants), (value, grads) = (fn(*operands()) for fn in both(kernel, CASES[case][0]))
    np.testing.assert_allclose(value, want, rtol=2e-6, atol=5e-4)  # a sum of 65,536 sines
    for x, y in zip(grads, wants, strict=True):
        np.testing.assert_allclose(x, y, atol=3e-6 * max(1, np.abs(y).max()))


def test_tables_of_long_rows_are_those_of_jax():
    for window, mask in (
        (None, kernels.masks.CausalMask((TOKENS, TOKENS))),
        (90, kernels.masks.LocalMask((TOKENS, TOKENS), (89, 0), 0)),
    ):
        own = kernels.splash_kernel(1, TOKENS, 2, window, None)
        other = kernels.splash.make_splash_mha(
            kernels.masks.MultiHeadMask([mask]), block_sizes=own.kwargs["block_sizes"], head_shards=1, q_seq_shards=2
        )
        for x, y in zip(jax.tree.leaves(own), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(x, y)


def test_work_is_equal_between_devices():
    """Blocks that a device computes for its first and its last piece."""
    devices, tokens = 4, 8 * 512
    blocks = np.asarray(kernels.splash_kernel(1, tokens, 2 * devices, None, None).fwd_mask_info.block_mask)[0] > 0
    pieces = blocks.reshape(2 * devices, -1).sum(1)
    work = pieces + pieces[::-1]
    assert work.max() <= 1.05 * work.mean()


def test_pieces_are_put_back_in_order():
    mesh = jax.make_mesh((4,), ("context",), devices=jax.devices()[:4])
    x = jnp.arange(2 * 24 * 3).reshape(2, 24, 3)

    def there_and_back(x):
        own = own_part(x, "context")
        return own, whole_rows(own, "context")

    spec = P(None, "context")
    own, whole = jax.jit(
        jax.shard_map(there_and_back, mesh=mesh, in_specs=P(), out_specs=(spec, P()), check_vma=False)
    )(x)
    np.testing.assert_array_equal(whole, x)
    order = [0, 7, 1, 6, 2, 5, 3, 4]
    np.testing.assert_array_equal(own, np.concatenate([x[:, 3 * i : 3 * i + 3] for i in order], axis=1))


@pytest.mark.parametrize(
    ("wanted", "needs", "where", "kernel", "why"),
    [
        ("auto", [], {}, "splash", "tpu"),
        ("auto", ["windows", "sinks", "segments", "parts of rows"], {"pieces": 16}, "splash", "sinks, windows"),
        ("auto", [], {"tokens": 4000}, "plain", "multiples of 128 tokens, not 4000"),
        ("auto", [], {"platform": "cpu"}, "plain", "no kernel for cpu"),
        ("auto", ["windows"], {"platform": "gpu"}, "cudnn", "windows"),
        ("auto", ["segments"], {"platform": "gpu"}, "pallas", "segments"),
        ("auto", [], {"platform": "gpu", "wide": True}, "pallas", "gpu"),
        ("auto", ["sinks"], {"platform": "gpu"}, "plain", "cudnn has no sinks; pallas has no sinks"),
        ("fused", [], {}, "splash", "tpu"),
        ("plain", [], {}, "plain", "as asked for"),
        ("splash", [], {"platform": "cpu"}, "splash", ""),
    ],
)
def test_the_choice_says_why(wanted, needs, where, kernel, why):
    choice = choose(wanted, needs, **{"platform": "tpu", "tokens": 4096, **where})
    assert choice.kernel == kernel
    assert why in str(choice)


def test_what_is_asked_for_and_cannot_be_is_refused():
    where = {"platform": "gpu", "tokens": 4096, "wide": True}
    why = r"asked for, 'fused': cudnn has no soft cap; pallas has no soft cap\. Take 'plain', or 'auto'"
    with pytest.raises(ValueError, match=why):
        choose("fused", ["soft cap"], **where)
    with pytest.raises(ValueError, match=f"one of auto, plain, fused, {', '.join(KERNELS)}: got 'flash'"):
        choose("flash", [], **where)
    with pytest.raises(ValueError, match=r"`needs` must be of .*'windows'\]: got \['soft_cap'\]"):
        choose("auto", ["soft_cap"], **where)
    args = types.SimpleNamespace(attention="fused", context=1, seq=256, precision="bf16")
    config = types.SimpleNamespace(windows=(None, 9), attn_softcap=None, sinks=True)
    with pytest.raises(SystemExit, match=r"--attention fused: .*there is no kernel for cpu"):
        training.attention_of(types.SimpleNamespace(config=config), args, packed=False)


@pytest.mark.filterwarnings("ignore:The mesh has one device")
@pytest.mark.parametrize(("family", "context"), default_for([("gpt_oss", 2)], [("gpt_oss", 2), ("gemma2", 1)]))
def test_the_decoder_equals_plain_attention(family, context, tmp_path):
    """Packed rows, windows in some layers, sinks, soft caps; in pieces on devices that share rows.

    Gradients of kernels are compared above, and in pieces in `test_windows_in_parts.py`.
    """
    config, tokens = hf_models.write_folder(tmp_path, family), 256 * context
    options = [f"--config={tmp_path}", "--data=x", f"--context={context}", f"--seq={tokens}", "--precision=fp32"]
    args = pretrain.parse_args([*options, "--persistence-threshold=0", "--attention=splash"])
    model, rng = decoder.Decoder(config), np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 4), np.int32))["params"]
    params = jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape) / 3), shapes)
    batch = {"tokens": rng.integers(0, config.vocab_size, (ROWS, tokens + 1)).astype(np.int32)}
    batch |= {name: np.pad(x, ((0, 0), (0, 1)), mode="edge") for name, x in segments_of(tokens).items()}
    batch["weights"] = np.ones(ROWS, np.float32)

    def mean(p):
        loss = training.next_token_loss(model)(p, batch)
        return loss.sum / loss.weight

    sizes = {"data": 1, "context": context} if context > 1 else {"data": 1}
    mesh = jzero.make_mesh(devices=jax.devices()[:context], **sizes)
    state = jzero.TrainState.create(params=params, tx=shared.sgd(1.0))
    state = jzero.shard_train_state(state, config=training.zero_config(args), mesh=mesh)
    found = training.make_evaluate(training.of_parts(model, args, packed=True))(state, [batch])
    assert found == pytest.approx(float(jax.jit(mean)(params)), rel=2e-6)


@pytest.mark.parametrize("kernel", ["splash", "pallas"])
def test_recomputed_layers_do_not_run_their_kernel_twice(kernel, tmp_path):
    config = hf_models.write_folder(tmp_path, "llama3")
    model = decoder.Decoder(config, attention=kernel)
    params = jax.eval_shape(decoder.Decoder(config).init, jax.random.key(0), np.zeros((1, 4), np.int32))["params"]
    plain = jax.eval_shape(lambda p: jzero.TrainState.create(params=p, tx=shared.sgd(1.0)), params)
    state = jzero.abstract_train_state(plain, stage=3, mesh=jzero.make_mesh())
    batch = {"tokens": jax.ShapeDtypeStruct((8, 129), jnp.int32), "weights": jax.ShapeDtypeStruct((8,), jnp.float32)}
    step = jzero.make_train_step(training.next_token_loss(model), remat="as_written")
    found = calls_of(step.trace(state, batch).jaxpr)
    again = kernel == "splash" and jax.__version_info__ < (0, 12)  # which stages what is saved once more
    assert sorted(found.values()) == [config.num_layers] * 2 + [config.num_layers * (1 + again)]


def test_plain_products_on_an_accelerator_are_told(monkeypatch, caplog):
    q, k, v, _ = operands()
    plain = attend(q, k, v, softcap=5.0, kernel="plain")
    for platform, levels in (("cpu", []), ("gpu", ["WARNING"])):
        monkeypatch.setattr("jzero.attention.causal.traced_platform", lambda platform=platform: platform)
        caplog.clear()
        np.testing.assert_array_equal(attend(q, k, v, softcap=5.0), plain)
        assert [x.levelname for x in caplog.records if x.levelname == "WARNING"] == levels
        assert "no soft cap" in caplog.text or platform == "cpu"


def test_operands_that_do_not_fit_are_refused():
    q, k, v, _ = operands()
    with pytest.raises(ValueError, match=r"heads of `k` must divide those of `q`, 4: got 3"):
        attend(q, *(jnp.repeat(x[:, :, :1], 3, axis=2) for x in (k, v)))
    with pytest.raises(ValueError, match=r"`window` must be at least 1.*got 0"):
        attend(q, k, v, window=0)
