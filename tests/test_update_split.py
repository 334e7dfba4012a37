"""The split of an update: what every optimizer of optax and optax.contrib needs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib as contrib
import pytest
from jax.sharding import PartitionSpec

from jzero.core.base import compat
from jzero.core.jaxpr.equations import equations_of
from jzero.core.jaxpr.flat import flattened
from jzero.core.jaxpr.sizes import mixes
from jzero.core.plan.opt_leaves import find_owners
from jzero.core.update.split import EquationKind, kernel_of, split_update
from tests import shared
from tests.drawn import to_jax
from tests.optimizers import OPTIMIZERS
from tests.tiers import default_for

SHAPES = {"b": (24,), "v": (8, 9), "w": (6, 8)}
"""Parameters with which the survey is made: a vector, and matrices of both orientations."""


def _by_name(module: Any, names: str) -> dict[str, Callable[[], Any]]:
    return {name: lambda name=name: getattr(module, name)(1e-3) for name in names.split()}


def _vectors(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim < 2, params)


def _chained(first: Any, then: Any = None) -> Any:
    return optax.chain(first, optax.adam(1e-3) if then is None else then)


SGD = optax.sgd(0.1)

SURVEY: dict[str, Callable[[], Any]] = {
    **OPTIMIZERS,
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    **_by_name(
        optax,
        "adabelief adadelta adagrad adamax adamaxw adan amsgrad fromage lars nadam nadamw noisy_sgd novograd "
        "optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd signum sm3 yogi",
    ),
    "adafactor_unfactored": lambda: optax.adafactor(1e-2, factored=False),
    "adam_bf16": lambda: optax.adam(1e-3, mu_dtype=jnp.bfloat16),
    "adaptive_grad_clip": lambda: _chained(optax.adaptive_grad_clip(0.1), SGD),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adamw(1e-3), 3),
    "centralize": lambda: _chained(optax.centralize()),
    "clip": lambda: _chained(optax.clip(1.0)),
    "clip_by_block_rms": lambda: _chained(optax.clip_by_block_rms(1.0), SGD),
    "keep_nonnegative": lambda: optax.chain(optax.adam(1e-3), optax.keep_params_nonnegative()),
    "lbfgs": lambda: optax.lbfgs(1e-3, linesearch=None),
    "lbfgs_line_search": optax.lbfgs,
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "normalize_by_update_norm": lambda: _chained(optax.normalize_by_update_norm(), SGD),
    "polyak_sgd": optax.polyak_sgd,
    "rmsprop_momentum": lambda: optax.rmsprop(1e-3, momentum=0.9, centered=True),
    "scale_by_schedule": lambda: optax.chain(optax.trace(0.9), optax.scale_by_schedule(optax.linear_schedule(1, 0, 9))),
    "set_to_zero": lambda: optax.chain(optax.adam(1e-3), optax.masked(optax.set_to_zero(), _vectors)),
    "skip_not_finite": lambda: optax.MultiSteps(SGD, 2, should_skip_update_fn=optax.skip_not_finite),
    "zero_nans": lambda: _chained(optax.zero_nans()),
    **_by_name(
        contrib,
        "acprop ademamix adopt dadapt_adamw galore madgrad momo momo_adam prodigy schedule_free_adamw "
        "schedule_free_sgd simplified_ademamix sophia",
    ),
    "cocob": contrib.cocob,
    "dog": lambda: contrib.dog(1.0),
    "dowg": lambda: contrib.dowg(1.0),
    "mechanize": lambda: contrib.mechanize(optax.adam(1e-3)),
    "muon_adaptive": lambda: contrib.muon(1e-3, nesterov=False, adaptive=True),
    "normalize": lambda: _chained(contrib.normalize(), SGD),
    "reduce_on_plateau": lambda: optax.chain(optax.adam(1e-3), contrib.reduce_on_plateau()),
    "sam": lambda: contrib.sam(SGD, _chained(contrib.normalize(), SGD), sync_period=2, opaque_mode=False),
    "schedule_free_lion": lambda: contrib.schedule_free(optax.lion(1e-3), 1e-3),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(optax.adam(1e-3)),
}

CLASSES = {
    "kernels": "acprop adabelief adadelta adagrad adam adam_bf16 adamax adamaxw adamw adan ademamix adopt amsgrad clip "
    "cocob ema inject_hyperparams keep_nonnegative lion madgrad masked multi_steps multi_transform nadam nadamw "
    "nesterov optimistic_adam_v2 optimistic_gradient_descent radam reduce_on_plateau rmsprop rmsprop_momentum rprop "
    "scale_by_schedule schedule schedule_free_adamw schedule_free_lion schedule_free_sgd set_to_zero sgd sgd_momentum "
    "sign_sgd signum simplified_ademamix split_real_and_imaginary yogi",
    "sums": "apply_if_finite clip_adamw clip_by_block_rms fromage lars normalize normalize_by_update_norm novograd "
    "polyak_sgd sam skip_not_finite zero_nans",
    "sums of state": "adafactor_unfactored dadapt_adamw dog dowg lamb mechanize momo momo_adam prodigy",
    "rows or noise": "adafactor adaptive_grad_clip centralize noisy_sgd sm3",
    "products": "galore muon muon_adaptive",
    "mixed by scale_by_lbfgs": "lbfgs",
    "needs the loss function": "lbfgs_line_search sophia",
}
"""What each update needs beyond elements: sums over gradients and parameters, or over state, too; whole arrays."""


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
    """A function, traced and split; `owners` has the number of each argument leaf's parameter, or `None`."""

    def __init__(self, fn, arguments, owners):
        flat, _ = compat.open_jaxpr(flattened(jax.make_jaxpr(fn)(*arguments), chooses=True))
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
    kernels = [kernel_of(found, [v]) for v in found.jaxpr.outvars if not compat.is_literal(v)]
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


def test_an_update_constrains_only_what_may_lie_otherwise():
    """As a user's gradients may: whole on each device, they would have the update computed whole."""
    params = {"w": np.ones((64, 8), np.float32), "b": np.ones((8, 64), np.float32)}
    state = shared.sharded(params, optax.adam(1e-3), stage=3)
    jaxpr = jax.make_jaxpr(state.tx.update)(params, state.opt_state)
    specs = [eqn.params["sharding"].spec for eqn in equations_of(jaxpr) if eqn.primitive.name == "sharding_constraint"]
    of_arrays = [spec for spec in specs if spec != PartitionSpec()]
    assert len(of_arrays) == len(params) * (1 + 1 + 2)  # gradient, update, moments
