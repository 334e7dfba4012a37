"""The split of an update: what each optimizer of optax needs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jzero import _compat
from jzero.jaxpr.flat import flattened
from jzero.jaxpr.products import mixes
from jzero.plan.opt_leaves import find_owners
from jzero.update.split import EquationKind, kernel_of, split_update
from tests.drawn import to_jax
from tests.survey import CLASSES, SHAPES, SURVEY
from tests.tiers import default_for

NAMES = sorted(SHAPES)
CLASS_OF = {name: kind for kind, names in CLASSES.items() for name in names.split()}
TRACED = [name for name, kind in CLASS_OF.items() if kind != "needs the loss function"]
OFTEN = (
    "adamw inject_hyperparams multi_steps clip_adamw novograd lamb mechanize adafactor sm3 noisy_sgd muon galore lbfgs"
)


def values():
    """Returns a tree like the parameters, of random numbers."""
    rng = np.random.default_rng(0)
    return {k: to_jax(rng.normal(size=SHAPES[k]), jnp.float32) for k in NAMES}


class Program:
    """A function of fields and other values, traced and split.

    Args:
      fn: The function.
      arguments: Its arguments.
      owners: For each leaf of the arguments, the number of the parameter that it belongs to, or `None`.
    """

    def __init__(self, fn, arguments, owners):
        flat, _ = _compat.open_jaxpr(flattened(jax.make_jaxpr(fn)(*arguments), chooses=True))
        self.fields = {
            v: owner
            for v, owner in zip(flat.invars, owners, strict=True)
            if owner is not None and v.aval.shape == SHAPES[NAMES[owner]]
        }
        self.split = split_update(flat, self.fields)

    def of_kind(self, kind):
        return [eqn for eqn, k in zip(self.split.jaxpr.eqns, self.split.kinds, strict=True) if k is kind]


def make_update(name):
    """Returns an optimizer's update `(grads, params, state) -> (params, state)`."""
    tx = optax.with_extra_args_support(SURVEY[name]())
    params = values()
    state = tx.init(params)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    owners = [*range(len(NAMES)), *range(len(NAMES)), *find_owners(tx.init, params, state, paths)]

    def update(grads, params, state, **extra):
        updates, state = tx.update(grads, state, params, **extra)
        return jax.tree.map(jnp.add, params, updates), state

    try:
        return Program(update, (params, params, state), owners)
    except TypeError:  # it asks for the loss
        return Program(functools.partial(update, value=jnp.float32(1.5)), (params, params, state), owners)


def needs(update):
    """Returns the class of an update in the survey."""
    found = update.split
    if update.of_kind(EquationKind.MIXED):
        return f"mixed by {', '.join(found.mixed)}"
    if any(map(mixes, found.jaxpr.eqns)):
        return "products"
    is_noise = lambda k: k.eqns and any(v.aval.shape for v in k.reads if v not in update.fields)
    kernels = [kernel_of(found, [v]) for v in found.jaxpr.outvars if not _compat.is_literal(v)]
    if update.of_kind(EquationKind.WHOLE) or any(map(is_noise, kernels)):
        return "rows or noise"
    state, sums = set(list(update.fields)[2 * len(NAMES) :]), update.of_kind(EquationKind.SUM)
    if any(state & set(kernel_of(found, eqn.invars).reads) for eqn in sums):
        return "sums of state"
    return "sums" if sums else "kernels"


def test_the_survey_is_complete():
    assert set(CLASS_OF) == set(SURVEY)
    assert len(SURVEY) == 78


@pytest.mark.filterwarnings("ignore:Specifying a key")
@pytest.mark.parametrize("name", default_for(OFTEN.split(), TRACED))
def test_what_an_update_needs(name):
    assert needs(make_update(name)) == CLASS_OF[name]


@pytest.mark.parametrize("name", CLASSES["needs the loss function"].split())
def test_what_cannot_be_traced(name):
    with pytest.raises((TypeError, ValueError), match=r"arguments|obj_fn"):
        make_update(name)
