"""A warning names the user's line, however deep in jzero, or in jax's calls of it, its reason was found."""

import ast
import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.core.base.guard import warn

STACK = {"w": np.ones((8, 5, 7), np.float32)}


def over_rows(params, batch):
    """A scan over a dimension that is cut, which the engine finds in its trace; the backward loop reads rows, too."""
    return jax.lax.scan(lambda x, row: (x * row.sum(), None), batch, params["w"])[0].mean()


def trace_scan():
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0, rules={"w": jzero.LeafRule(dim=0)})
    state = jzero.shard_train_state(jzero.TrainState.create(params=STACK, tx=optax.sgd(0.1)), config=config)
    jax.eval_shape(jzero.make_train_step(over_rows), state, jnp.ones((8, 3)))


WARNINGS = {
    "here": lambda: warn("here"),
    "in jax": lambda: jax.eval_shape(jax.jit(jax.vmap(lambda x: (warn("in jax"), x)[1])), jnp.ones(3)),
    "in a plan": lambda: jzero.plan_train_state(
        jzero.TrainState.create(params=STACK, tx=optax.sgd(0.1)),
        stage=3,
        mesh=jzero.make_mesh(devices=jax.devices()[:1]),
    ),
    "in a trace": trace_scan,
    "in a configuration": lambda: jzero.from_deepspeed(
        {"zero_optimization": {"stage": 3}, "sparse_attention": {"a": 1}}
    ),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_a_warning_names_the_users_line_once(name):
    """However often a program that is traced comes by the reason, as in the backward loop."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        WARNINGS[name]()
    assert [x.filename for x in caught] == [__file__]


def test_all_of_jzero_warns_so():
    root = pathlib.Path(jzero.__file__).parent
    calls = [
        path.name
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn"
    ]
    assert calls == ["guard.py"]
