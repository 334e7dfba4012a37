"""Which losses are means over independent rows, as the traced loss says, and which line couples the rows of others.

Each loss is evaluated on a batch and on four parts of it: the mean over the parts is what a step computes.
"""

from __future__ import annotations

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jzero.core.jaxpr import row_rules
from jzero.core.jaxpr.row_facts import RowKind
from tests.test_rows import TIME, WIDTH, facts

RIGHT, WRONG = [], []


def right(fn):
    """A loss of which the mean over the parts of a batch is that of the batch."""
    RIGHT.append(fn)
    return fn


def wrong(how):
    """A loss of which it is not, because of the line that says so, or because it is a sum."""

    def register(fn):
        WRONG.append(pytest.param(fn, how, id=fn.__name__))
        return fn

    return register


def each(p, x):
    """One loss per row."""
    return jnp.square(jnp.tanh(x @ p["w"])).mean(-1)


ONE_LINE = {
    "mean": (lambda p, x, t, key: 3 * each(p, x).mean() + 0.1 * jnp.square(p["w"]).sum(), None),
    "means_of_means": (lambda p, x, t, key: jnp.square(t @ p["w"]).sum(-1).mean(1).mean() - x.mean(0).mean() / 2, None),
    "sum_divided_by_the_rows": (
        lambda p, x, t, key: each(p, x).sum() / len(x) + each(p, 2 * x) @ jnp.full(len(x), 1 / len(x)),
        None,
    ),
    "branch_of_a_parameter": (
        lambda p, x, t, key: lax.cond(p["at"] > 0, lambda: each(p, x).mean(), lambda: 2 * each(p, 3 * x).mean()),
        None,
    ),
    "linear_in_rows": (
        lambda p, x, t, key: (x.mean(0) @ p["w"]).sum() + (each(p, x) - each(p, x).mean() + p["w"][0, 0]).mean(),
        None,
    ),
    "scaled_to_a_data_set": (
        lambda p, x, t, key: 64 / len(x) * each(p, x).sum() + 0.1 * jnp.square(p["w"]).sum(),
        None,
    ),
    "total": (lambda p, x, t, key: each(p, x).sum(), "is_sum"),
    "half_of_the_rows": (lambda p, x, t, key: 2 / 6 * each(p, x).sum(), "is_sum"),  # of which the test has six
    "rows_by_a_loop": (lambda p, x, t, key: lax.fori_loop(0, len(x), lambda i, c: c + each(p, x[i]), 0.0), "is_sum"),
    "sum_of_means": (lambda p, x, t, key: jnp.square(t @ p["w"]).mean((1, 2)).sum(), "is_sum"),
    "mean_where": (lambda p, x, t, key: jnp.mean(each(p, x), where=x[:, 0] > -1), "ratio"),
    "hardest_rows": (lambda p, x, t, key: lax.top_k(each(p, x), 2)[0].mean(), "rows"),
    "mean_of_numbers": (lambda p, x, t, key: jnp.nanmean(jnp.where(x > -1, x @ p["queue"][:WIDTH], jnp.nan)), "ratio"),
    "perplexity": (lambda p, x, t, key: jnp.exp(9 * each(p, x).mean()), "sum"),
    "softmax_over_rows": (lambda p, x, t, key: jax.nn.logsumexp(each(p, x)), "sum"),
}
"""Losses, and how rows are coupled by them, if they are."""
for name, (loss, how) in ONE_LINE.items():
    loss.__name__ = name
    (right if how is None else wrong(how))(loss)


@right
def tokens_flattened(p, x, t, key):
    logits = t.reshape(-1, WIDTH) @ p["w"]
    labels = t[..., 0].reshape(-1).astype(int) % 3
    return -jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels].mean()


@right
def time(p, x, t, key):
    def step(h, now):
        h = jnp.tanh(now @ p["queue"][:WIDTH] + h)
        return h, h.sum(-1)

    h, ys = lax.scan(step, jnp.zeros_like(x), t.swapaxes(0, 1))
    both = lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (t, t), axis=1)
    return h.mean() + jnp.square(ys).mean() + both[1].mean()


@right
def chunks(p, x, t, key):
    total, _ = lax.scan(lambda c, x: (c + each(p, x).sum(), None), 0.0, x.reshape(-1, 2, WIDTH))
    parts, _ = lax.scan(lambda c, x: (c + each(p, x).mean(), None), 0.0, x.reshape(2, -1, WIDTH))
    return total / len(x) + parts / 2


@right
def vmapped(p, x, t, key):
    loop = lambda row: lax.while_loop(lambda c: c.sum() > 1, lambda c: c / 2, row)
    slope = jax.vmap(jax.grad(lambda row: jnp.tanh(row @ p["w"]).sum()))(x)
    chosen = jax.vmap(lambda row, i: lax.dynamic_slice(row, (i,), (2,)))(x, x[:, 0].astype(int))
    return jax.vmap(loop)(x).mean() + jnp.linalg.norm(slope, axis=-1).mean() + jnp.square(chosen).mean()


@right
def experts_in_rows(p, x, t, key):
    gates = jax.nn.softmax(t @ p["w"])
    weight, chosen = lax.top_k(gates, 2)
    place = jnp.cumsum(jax.nn.one_hot(chosen[..., 0], 3, dtype=int), axis=1)
    slots = jax.nn.one_hot(place - 1, 2) * jax.nn.one_hot(chosen[..., 0], 3)[..., None]  # [B, T, E, C]
    y = jnp.tanh(jnp.einsum("btec,btd->becd", slots, t))
    balance = (jax.nn.one_hot(chosen[..., 0], 3).mean(1) * gates.mean(1)).sum(-1).mean()
    return jnp.einsum("btec,becd->btd", slots * weight[..., :1, None], y).mean() + balance


@right
def images(p, x, t, key):
    y = nn.relu(lax.conv(t[:, None], jnp.ones((2, 1, 2, 2)), (1, 1), "SAME"))
    y = nn.max_pool(y.transpose(0, 2, 3, 1), (2, 2), (2, 2))
    return jax.nn.standardize(y, axis=(1, 2)).max(-1).mean() + jnp.square(jnp.sort(y, 1)[:, 0]).mean()


@right
def chunks_of_tokens(p, x, t, key):
    tokens = t.reshape(3, -1, WIDTH)  # which cuts rows apart
    total, _ = lax.scan(lambda c, x: (c + jax.nn.logsumexp(x @ p["w"], axis=-1).sum(), None), 0.0, tokens)
    return total / (len(t) * TIME)


@right
def shifted_by_the_largest(p, x, t, key):
    y = x @ p["w"]
    top = lax.stop_gradient(y.max())
    return (jnp.log(jnp.exp(y - top).sum(-1)) + top).mean() + jnp.where(jnp.isfinite(y.mean()), y.mean(), 0.0)


@right
def negatives_of_all(p, x, t, key):
    y = lax.all_gather(x, "data", tiled=True)
    return jax.nn.logsumexp(x @ y.T, axis=-1).mean() + jnp.log(lax.pmean(jnp.square(x).mean(), "data"))


@right
def ring(p, x, t, key):
    """Each row meets those of all devices, which go round."""
    block = lambda x, y: jax.nn.log_sigmoid(x @ y.T).sum()
    own, y, total = x @ p["w"], 2 * x @ p["w"], 0.0
    for _ in range(4):
        total += block(own, y)
        y = lax.ppermute(y, "data", [(i, (i + 1) % 4) for i in range(4)])
    return total / len(x)


@wrong("ratio")
def masked_mean(p, x, t, key):
    mask = x[:, 0] > -1
    losses = each(p, x) * mask
    return losses.sum() / mask.sum()  # here


@wrong("rows")
def in_batch_negatives(p, x, t, key):
    scores = x @ (2 * x).T  # here
    return -jnp.diagonal(jax.nn.log_softmax(scores)).mean()


@wrong("rows")
def pairwise(p, x, t, key):
    differences = x[:, None] - x[None]  # here
    return jnp.square(differences).mean()


@wrong("sum")
def balance_of_the_batch(p, x, t, key):
    gates = jax.nn.softmax(x @ p["w"])
    return (jax.nn.one_hot(gates.argmax(-1), 3).mean(0) * gates.mean(0)).sum()  # here


def loss_facts(fn):
    return facts(lambda p, x, t, n, key: fn(p, x, t, key))[0]


@pytest.mark.parametrize("fn", RIGHT, ids=lambda fn: fn.__name__)
def test_no_false_alarm_for_means_over_independent_rows(fn):
    found = loss_facts(fn)
    assert found.kind in (RowKind.LINEAR, RowKind.SAME, RowKind.EXCHANGED)
    assert not found.is_sum
    assert found.coupled is None


@pytest.mark.parametrize(("fn", "how"), WRONG)
def test_the_line_that_couples_rows_is_found(fn, how):
    found = loss_facts(fn)
    if how == "is_sum":
        assert found.is_sum
        return
    lines, first = inspect.getsourcelines(fn)
    marked = [i for i, line in enumerate(lines) if "# here" in line] or [len(lines) - 1]
    assert found.coupled.how == how
    assert f"{__file__}:{first + marked[0]} (" in found.coupled.source


MASKED = {
    "where": lambda total, n, mask: jnp.where(n == 0, 0.0, total / n),
    "branch": lambda total, n, mask: lax.cond(n > 0, lambda: total / n, lambda: 0.0),
    "factor": lambda total, n, mask: total * jnp.where(n == 0, 0.0, 1 / jnp.where(n == 0, 1.0, n)),
    "power": lambda total, n, mask: total * n**-1,
    "any": lambda total, n, mask: total / jnp.where(mask.any(), n, 1.0),
    "at least one": lambda total, n, mask: total / jnp.maximum(n, 1),
}


@pytest.mark.parametrize("name", MASKED)
def test_a_mean_over_some_rows_is_one_however_it_avoids_to_divide_by_zero(name):
    def loss(p, x, t, key):
        mask = x[:, 0] > -1
        return MASKED[name]((each(p, x) * mask).sum(), mask.sum().astype(float), mask)

    assert loss_facts(loss).coupled.how == "ratio"


@pytest.mark.usefixtures("checks_may_fail")
def test_a_rule_that_fails_makes_values_unknown(monkeypatch):
    """A check stops no step, whatever jax or a program does that the rules do not expect."""

    def fail(eqn, ins):
        raise IndexError(eqn.primitive.name)

    monkeypatch.setattr(row_rules, "RULES", dict.fromkeys(row_rules.RULES, fail))
    found = facts(lambda p, x, t, n, key: ((x @ p["w"]).mean(), p["at"] + 1, lax.pmean(x.sum(), "data")))
    assert [(x.kind, x.differs) for x in found] == [
        (RowKind.UNKNOWN, True),
        (RowKind.SAME, False),
        (RowKind.SAME, False),
    ]
