"""What steps say of values of single examples, and of losses that are no means over independent examples."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
from jzero.core.processes import agree as processes
from tests import shared

ROWS, WIDTH = 24, 5
W = np.linspace(-1, 1, WIDTH * 3, dtype=np.float32).reshape(WIDTH, 3)
BATCH = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
MAKERS = (jzero.value_and_grad, jzero.make_train_step)


def sharded(devices=8, **options):
    plain = jzero.TrainState.create(params={"w": jnp.asarray(W)}, tx=shared.sgd(0.1))
    mesh = jzero.make_mesh(
        devices=jax.devices()[:devices], **({"replica": 2, "data": -1} if "replica_axis" in options else {})
    )
    return jzero.shard_train_state(plain, config=jzero.ZeroConfig(**{"stage": 2, **options}), mesh=mesh)


def each(params, x):
    return jnp.square(x @ params["w"]).mean(-1)


def masked_mean(params, x):
    mask = jnp.maximum(x[:, 0], 0)
    return (each(params, x) * mask).sum() / mask.sum()


def with_aux(aux):
    return lambda params, x: (each(params, x).mean(), aux(params, x))


@pytest.mark.parametrize("maker", MAKERS)
def test_values_of_single_examples_are_refused_by_name(maker):
    def aux(params, x):
        times = jnp.stack([each(params, x)] * 7)  # [T, B]
        return {"each": each(params, x), "times": times, "bank": jzero.Summed(x), "mean": x.mean(0)}

    with pytest.raises(TypeError, match="single examples") as error:
        maker(with_aux(aux), has_aux=True)(sharded(), BATCH)
    for line in (
        "aux['each']: float32[3], one value per example",
        "aux['times']: float32[7, 3], examples along dimension 1",
        "aux['bank']: Summed of float32[3, 5], one value per example",
        "jzero.PerExample(x)",
        "jnp.moveaxis(x, 1, 0)",
    ):
        assert line in str(error.value)
    assert "mean'" not in str(error.value)


def test_predictions_of_an_evaluation_step_are_refused():
    predict = lambda params, x: x @ params["w"]
    with pytest.raises(TypeError, match=r"float32\[3, 3\], one value per example"):
        jzero.make_eval_step(predict)(sharded(), BATCH)
    marked = jzero.make_eval_step(lambda params, x: jzero.PerExample(predict(params, x)))
    np.testing.assert_allclose(marked(sharded(), BATCH), BATCH @ W, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("maker", MAKERS)
def test_a_step_warns_once_and_only_if_asked(maker):
    step = maker(masked_mean)
    with pytest.warns(UserWarning, match=r"test_row_check\.py:.*\(masked_m"):
        jax.make_jaxpr(step)(sharded(), BATCH)
    jax.make_jaxpr(step)(sharded(), BATCH[:16])  # pytest makes warnings errors
    jax.make_jaxpr(maker(masked_mean, check_rows=False))(sharded(), BATCH)
    with pytest.raises(ValueError, match="`check_rows` must be True or False"):
        maker(masked_mean, check_rows="no")


@pytest.mark.filterwarnings("ignore:The mesh has one device")
def test_a_batch_in_one_part_is_not_checked():
    """Code that runs on one device goes on running there; more devices or micro-batches are told."""
    aux = lambda params, x: {"each": each(params, x), "spread": x.std()}
    loss = lambda params, x: (masked_mean(params, x), aux(params, x))
    _, metrics = jzero.make_train_step(loss, has_aux=True)(sharded(1), BATCH)
    np.testing.assert_allclose(metrics["aux"]["each"], np.square(BATCH @ W).mean(-1), rtol=1e-5)
    with pytest.warns(UserWarning, match="each of 2 parts"):
        jax.make_jaxpr(jzero.make_train_step(masked_mean, accumulate_steps=2))(sharded(1), BATCH)


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (lambda params, x: each(params, x).sum(), "loss is a sum over rows"),
        (lambda params, x: jnp.log(each(params, x).mean()), "a sum over rows, `log` at"),
        (
            lambda params, x: jnp.square(x @ x.T).mean(),
            "different rows, `dot_general`",
        ),
        (lambda params, x: jzero.Weighted(each(params, x).sum() ** 2, len(x) * 1.0), "loss.sum applies"),
    ],
)
def test_warnings_name_the_value_and_the_way_out(fn, says):
    with pytest.warns(UserWarning, match=says):
        jax.make_jaxpr(jzero.value_and_grad(fn))(sharded(), BATCH)


@pytest.mark.parametrize("rows", [8, 16, 24])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(
    ("factor", "is_sum"),
    [
        (lambda x: 64 / len(x), False),
        (lambda x: 1 / len(x), False),
        (lambda x: 0.5, True),  # 1 / rows of a device, for one of the batches
        (lambda x: 0.25, True),
        (lambda x: 1 / 3, True),
    ],
)
def test_a_sum_is_a_mean_if_its_factor_follows_the_number_of_rows(factor, is_sum, maker, rows):
    step = maker(lambda params, x: factor(x) * each(params, x).sum() + 0.1 * jnp.square(params["w"]).sum())
    with pytest.warns(UserWarning, match="loss is a sum over rows") if is_sum else contextlib.nullcontext():
        jax.make_jaxpr(step)(sharded(), BATCH[:rows])


@pytest.mark.parametrize(
    ("reduce", "traces", "is_sum"),
    [
        (lambda y: y.mean(), 1, False),
        (lambda y: -y.reshape(-1).sum() / y.size, 1, False),
        (lambda y: y.mean(-1).sum() / 300, 2, True),
        (lambda y: y.sum() / y.shape[1], 2, True),
        (lambda y: y.mean() * len(y), 2, True),
        (lambda y: jax.lax.scan(lambda total, row: (total + row.mean(), None), 0.0, y)[0], 2, True),
        (lambda y: y[0, 0] + y.sum() / y.size, 2, False),
        (lambda y: y[:, :85].sum() / 255, 2, True),  # of 255 terms: a small number may be any constant
    ],
)
def test_a_plain_mean_is_known_from_one_trace(reduce, traces, is_sum):
    traced = []

    def loss(params, x):
        traced.append(len(x))
        return reduce(jnp.square(x @ params["w"] @ jnp.ones((3, 100))))

    with pytest.warns(UserWarning, match="loss is a sum over rows") if is_sum else contextlib.nullcontext():
        jax.make_jaxpr(jzero.value_and_grad(loss))(sharded(), BATCH)
    assert traced == [3, 6][:traces]


def test_a_loss_that_holds_for_one_number_of_rows_is_no_sum():
    """Nor does it fail: what a check cannot see is no reason to warn."""
    loss = lambda params, x: 0.25 * each(params, x.reshape(3, WIDTH)).sum()
    jax.make_jaxpr(jzero.value_and_grad(loss))(sharded(), BATCH)


def test_metrics_are_checked_unless_they_say_how_they_are_reduced():
    def metrics(params, x):
        losses, mask = each(params, x), x[:, 0] > 0
        return {
            "loss": losses.mean(),
            "right": jzero.Weighted((losses * mask).sum(), mask.sum()),
            "count": jzero.Summed(mask.sum()),
            "share": (mask * 1.0).mean(),
            "perplexity": jnp.exp(losses.mean()),
            "total": losses.sum(),
            "masked": (losses * mask).sum() / mask.sum(),
            "hardest": losses.max(),
            "easiest": jzero.Min(losses.min()),
        }

    step = jzero.make_eval_step(metrics)
    with pytest.warns(UserWarning, match="the results are averaged") as caught:
        jax.make_jaxpr(step)(sharded(), BATCH)
    lines = str(caught[0].message).split("\n")
    names = [line.split()[0] for line in lines if line.startswith("  aux")]
    assert names == ["aux['hardest']", "aux['masked']", "aux['perplexity']", "aux['total']"]
    assert "return `jzero.Max(x)`" in lines[1]
    assert "sum and weight as `jzero.Summed`" in lines[2]


@pytest.mark.usefixtures("checks_may_fail")
@pytest.mark.parametrize(
    "check",
    [
        "core.jaxpr.row_rules.shape_of",
        "core.engine.trace.growth",
        "core.step.loss.results_of",
        "core.step.row_check._trouble",
        "core.step.inputs.find_closed_over",
        "core.engine.trace.has_parts_to_recompute",
    ],
)
def test_a_check_that_fails_stops_no_step(check, monkeypatch, caplog):
    monkeypatch.setattr(f"jzero.{check}", shared.raising(KeyError("a new thing")))
    step = jzero.value_and_grad(lambda params, x: 2 * each(params, x).mean())
    with caplog.at_level("WARNING", "jzero"):
        loss, grads = step(sharded(stage=3, persistence_threshold=0), BATCH)
    np.testing.assert_allclose(loss, 2 * np.square(BATCH @ W).mean(), rtol=1e-5)
    np.testing.assert_allclose(grads["w"], 4 * BATCH.T @ (BATCH @ W) / (3 * ROWS), rtol=1e-4, atol=1e-6)
    assert "a new thing" in caplog.text


def test_a_loss_whose_signature_python_cannot_make_is_no_error():
    class Loss:
        @property
        def __signature__(self):
            raise NameError("name 'PyTree' is not defined")  # annotations for type checkers alone

        def __call__(self, params, x):
            return each(params, x).mean()

    loss, _ = jzero.value_and_grad(Loss())(sharded(), BATCH)
    np.testing.assert_allclose(loss, np.square(BATCH @ W).mean(), rtol=1e-5)


@pytest.mark.usefixtures("checks_may_fail")
def test_processes_that_cannot_describe_what_they_run_compare_nothing(monkeypatch):
    compared = []

    class Comparison:
        def __init__(self, *args):
            pass

        def run(self, parts):
            compared.append(parts)
            return ""

    monkeypatch.setattr(processes, "are_several", lambda mesh: True)
    monkeypatch.setattr("jzero.core.base.compat.distributed_client", object)
    monkeypatch.setattr(processes, "_group", lambda mesh: (0, 1))
    monkeypatch.setattr(processes, "_Comparison", Comparison)
    describe = lambda made: {"the batch": made.dtype.name}
    mesh = jzero.make_mesh()
    assert processes.agree("here", mesh, lambda: 7, describe) == 7
    assert processes.agree("here", mesh, lambda: W, describe) is W
    assert compared == [{}, {"the batch": "float32"}]
