"""The split of an update: what each optimizer of optax needs, and kernels that compute the same to the bit."""

from __future__ import annotations

import functools
import itertools
import math

import hypothesis
import hypothesis.strategies
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jzero import _compat
from jzero.jaxpr.flat import flattened
from jzero.jaxpr.interpret import evaluate
from jzero.jaxpr.products import mixes
from jzero.plan.opt_leaves import find_owners
from jzero.update.split import REDUCTIONS, EquationKind, kernel_of, split_update
from tests.drawn import to_jax
from tests.survey import CLASSES, SHAPES, SURVEY
from tests.tiers import default_for, slow

NAMES = sorted(SHAPES)
CLASS_OF = {name: kind for kind, names in CLASSES.items() for name in names.split()}
TRACED = [name for name, kind in CLASS_OF.items() if kind != "needs the loss function"]

FEW = "lamb muon".split()
"""Those whose kernels run by default: sums, and whole matrices; chains below have a `cond`."""


def values(seed):
    """Returns a tree like the parameters, of random numbers."""
    rng = np.random.default_rng(seed)
    return {k: to_jax(rng.normal(size=SHAPES[k]), jnp.float32) for k in NAMES}


def records(size, *, unequal):
    """Returns where records begin and end: of one length, or of two, for all leaves, so that few operations compile."""
    assert size % 24 == 0
    return sorted({*range(0, size + 1, 24), *(range(7, size, 24) if unequal else ())})


class Program:
    """A function of fields and other values, traced and split.

    Args:
      fn: The function.
      arguments: Its arguments.
      owners: For each leaf of the arguments, the number of the parameter that it belongs to, or `None`.
    """

    def __init__(self, fn, arguments, owners):
        jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*arguments)
        self.treedef = jax.tree.structure(out)
        flat, self.consts = _compat.open_jaxpr(flattened(jaxpr, chooses=True))
        self.fields = {
            v: owner
            for v, owner in zip(flat.invars, owners, strict=True)
            if owner is not None and v.aval.shape == SHAPES[NAMES[owner]]
        }
        self.split = split_update(flat, self.fields)

    def of_kind(self, kind):
        return [eqn for eqn, k in zip(self.split.jaxpr.eqns, self.split.kinds, strict=True) if k is kind]

    def on_records(self, inputs, *, unequal=False):
        """Evaluates the split, operation by operation, with kernels on flat records."""
        found = self.split
        env = dict(zip([*found.jaxpr.constvars, *found.jaxpr.invars], [*self.consts, *inputs], strict=True))

        def elements(v):
            kernel = kernel_of(found, [v])
            flat = [np.asarray(x).reshape(-1) if jnp.ndim(x) else x for x in map(value, kernel.reads)]
            done = []
            for a, b in itertools.pairwise(records(math.prod(v.aval.shape), unequal=unequal)):
                done += kernel([x[a:b] if jnp.ndim(x) else x for x in flat], (b - a,))
            return jnp.asarray(np.concatenate(done).reshape(v.aval.shape))

        def value(v):
            if _compat.is_literal(v):
                return v.val
            if v not in env:
                env[v] = elements(v)
            return env[v]

        for eqn, kind in zip(found.jaxpr.eqns, found.kinds, strict=True):
            if kind is EquationKind.SUM:
                factors = [elements(v).astype(eqn.outvars[0].aval.dtype) for v in eqn.invars]
                env[eqn.outvars[0]] = REDUCTIONS[eqn.primitive.name][0](functools.reduce(jnp.multiply, factors))
            elif kind is not EquationKind.ELEMENT:
                operands = list(map(value, eqn.invars))
                with _compat.equation_context(eqn):  # as `evaluate` does, so that both run one program
                    env.update(zip(eqn.outvars, _compat.bind(eqn, operands), strict=True))
        return [value(v) for v in found.jaxpr.outvars]

    def whole(self, inputs):
        """Evaluates the same jaxpr, operation by operation, on whole arrays."""
        closed = jax.extend.core.ClosedJaxpr(self.split.jaxpr, self.consts)
        return evaluate(closed, inputs, _compat.bind)


def make_update(name):
    """Returns an optimizer's update `(grads, params, state) -> (params, state)`, and its first state."""
    tx = optax.with_extra_args_support(SURVEY[name]())
    params = values(0)
    state = tx.init(params)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    owners = [*range(len(NAMES)), *range(len(NAMES)), *find_owners(tx.init, params, state, paths)]

    def update(grads, params, state, **extra):
        updates, state = tx.update(grads, state, params, **extra)
        return jax.tree.map(jnp.add, params, updates), state

    try:
        return Program(update, (params, params, state), owners), state
    except TypeError:  # it asks for the loss
        return Program(functools.partial(update, value=jnp.float32(1.5)), (params, params, state), owners), state


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
@pytest.mark.parametrize("name", TRACED)
def test_what_an_update_needs(name):
    update, _ = make_update(name)
    assert needs(update) == CLASS_OF[name]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Specifying a key")
@pytest.mark.parametrize("name", default_for(FEW, TRACED))
def test_kernels_equal_the_operations_on_whole_arrays(name):
    """To the bit: on flat records of one length, that of the vector, operation by operation, in two steps."""
    update, state = make_update(name)
    params = values(0)
    for step in range(2):
        inputs = jax.tree.leaves((values(step + 1), params, state))
        found = update.on_records(inputs)
        assert_same(found, update.whole(inputs))
        params, state = jax.tree.unflatten(update.treedef, found)


def assert_same(found, want):
    for x, y in zip(found, want, strict=True):
        assert (jnp.shape(x), jnp.result_type(x)) == (jnp.shape(y), jnp.result_type(y))
        np.testing.assert_array_equal(bits(x), bits(y))


def bits(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) else x)


@pytest.mark.parametrize("name", CLASSES["needs the loss function"].split())
def test_what_cannot_be_traced(name):
    with pytest.raises((TypeError, ValueError), match=r"arguments|obj_fn"):
        make_update(name)


OPERATIONS = {
    "add": jnp.add,
    "scaled": lambda x, y: x * 0.5 + jnp.tanh(y),
    "chosen": lambda x, y: jnp.where(x > y, x, y),
    "rounded": lambda x, y: x.astype(jnp.bfloat16).astype(jnp.float32) - y,
    "by its sum": lambda x, y: x / (1 + jnp.sum(y * y)),
    "by its maximum": lambda x, y: x * jnp.max(jnp.abs(y)),
    "by an inner product": lambda x, y: x - jnp.vdot(x, y) * 1e-3,
    "raveled": lambda x, y: (x.ravel() * jnp.ones(x.size) + y.ravel()).reshape(x.shape),
    "if any": lambda x, y: jax.lax.cond(jnp.any(y > 2), lambda a, b: a + b, lambda a, b: a, x, y),
}


@hypothesis.given(
    hypothesis.strategies.lists(
        hypothesis.strategies.tuples(
            hypothesis.strategies.sampled_from(sorted(OPERATIONS)), *[hypothesis.strategies.integers(0, 9)] * 2
        ),
        min_size=1,
        max_size=6,
    )
)
def check_chain(chain):
    """Whatever is elementwise up to numbers is split into kernels and sums alone, which equal it to the bit.

    Records have unequal lengths.
    """

    def update(grads, moments):
        def one(g, m):
            made = [g, m]
            for name, i, j in chain:
                made.append(OPERATIONS[name](made[i % len(made)], made[j % len(made)]))
            return made[-1], made[len(made) // 2]

        return [one(grads[k], moments[k]) for k in NAMES]

    program = Program(update, (values(1), values(2)), 2 * [*range(len(NAMES))])
    assert not program.of_kind(EquationKind.WHOLE)
    assert not program.of_kind(EquationKind.MIXED)
    inputs = jax.tree.leaves((values(3), values(4)))
    assert_same(program.on_records(inputs, unequal=True), program.whole(inputs))


@pytest.mark.slow
@pytest.mark.parametrize("draws", [5, slow(60)])
def test_chains_of_operations(draws):
    hypothesis.settings(max_examples=draws, deadline=None)(check_chain)()
