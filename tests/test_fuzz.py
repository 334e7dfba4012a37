"""The contract, fuzzed: what hypothesis draws trains with jzero as it does with plain optax on one device.

A failing case prints itself as a `Case(...)`; `check(Case(...))` runs it again. `FUZZ_SEEDS=500` makes the slow test a
long run.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import time
import warnings
from typing import Any, NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from jax import lax

import jzero
from tests.fuzz_cases import (
    FROZEN,
    OPTIMIZERS,
    TRAINABLE,
    Case,
    Layer,
    cases,
    forward,
    make_batch,
    make_params,
    reduced,
)
from tests.test_loss_scale import expected_scales

STEPS, WIDTH = 3, 7


class Problem(NamedTuple):
    """A case for either side: what jzero takes, then parameters by path and their loss, as plain jax takes them."""

    state: Any
    loss_fn: Any
    params: dict[str, Any]
    plain_loss: Any


def path_str(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_frozen(path: str) -> bool:
    return not re.fullmatch(TRAINABLE, path)


def _tx(case: Case) -> Any:
    """The optimizer; where leaves are frozen optax is told so, since `init` knows no moments of integers."""
    tx = OPTIMIZERS[case.optimizer]()
    if not set(case.extras) & set(FROZEN):
        return tx
    return optax.masked(tx, lambda p: jax.tree_util.tree_map_with_path(lambda at, _: not is_frozen(path_str(at)), p))


def make_problem(case: Case) -> Problem:
    params, _ = make_params(case, WIDTH)
    loss_fn = lambda params, batch: reduced(case, params, forward(case, params, batch["x"], batch), batch)
    create = jzero.TrainState.create if case.framework == "plain" else train_state.TrainState.create
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    flat = {path_str(path): x for path, x in leaves}
    plain_loss = lambda flat, batch: loss_fn(jax.tree.unflatten(treedef, list(flat.values())), batch)
    return Problem(create(apply_fn=None, params=params, tx=_tx(case)), loss_fn, flat, plain_loss)


def is_real(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


REFUSALS = ("`Weighted.weight` depends on parameters",)  # with micro-batches
"""How the errors begin that a draw may end in; all others are failures."""
IGNORED = (
    "The optimizer multiplies",
    "The mesh has one device",
    "`remat='cheap'` changes nothing",
    "A stack of shape",
    "`prefetch_bytes=",
)
"""Warnings that tell the truth about a draw."""


class Run(NamedTuple):
    losses: np.ndarray
    norms: np.ndarray
    params: dict[str, np.ndarray]
    aux: list[Any]


def cast(flat: dict[str, Any], dtype: Any) -> dict[str, Any]:
    return {path: x.astype(dtype) if dtype is not None and is_real(x) else x for path, x in flat.items()}


def scales_of(case: Case) -> list[float]:
    """The loss scale of each step, by DeepSpeed's rules."""
    if case.precision.loss_scale is None:
        return [1.0] * STEPS
    overflows = set() if case.poisoned is None else {case.poisoned}
    rules = {"initial": 2.0**8, "window": 1, "hysteresis": 1, "minimum": 1.0, "consecutive": False}
    return expected_scales(overflows, STEPS, **rules)


def make_reference(case: Case, problem: Problem) -> Any:
    """Returns `run(noise) -> Run`: one device and plain optax, with the casts of the precision policy.

    Gradients are those of the whole batch, unless rounding or the loss itself make the mean over slices another number:
    then slices are looped over. `noise` changes each slice's gradient by about as much, relative to its size.
    """
    policy, tx, clip_norm = case.precision, OPTIMIZERS[case.optimizer](), dict(case.step).get("clip_norm", np.inf)
    by_params = case.loss == "weighted_by_params"  # whose gradient takes the loss of the whole batch
    slices = case.parts if (case.depends_on_slices or policy.compute is not None) and not by_params else 1
    frozen = {p: x for p, x in problem.params.items() if is_frozen(p)}
    frozen_seen = cast(frozen, policy.compute)
    start = {p: x for p, x in problem.params.items() if p not in frozen}
    order = list(problem.params)

    def objective(trained, batch, scale):
        flat = {**trained, **frozen_seen}
        result = problem.plain_loss({path: flat[path] for path in order}, batch)
        loss, aux = result if case.aux else (result, {})
        loss = loss.sum / loss.weight if by_params else loss
        loss = loss if isinstance(loss, jzero.Weighted) else jzero.Weighted(loss, jnp.ones(()))
        aux = {k: x.value if isinstance(x, jzero.Summed | jzero.PerExample) else x for k, x in aux.items()}
        return loss.sum.astype(jnp.float32) * scale, (loss, aux)

    @jax.jit
    def step(masters, opt_state, batch, scale, noise):
        seen = cast(masters, policy.compute)
        alike = {k: x for k, x in batch.items() if not x.ndim}

        def one(parts):
            (_, (loss, aux)), grads = jax.value_and_grad(objective, has_aux=True)(seen, {**parts[0], **alike}, scale)
            return loss, aux, {p: _noisy(g, noise, parts[1]) for p, g in grads.items()}

        rows = {k: x.reshape(slices, -1, *x.shape[1:]) for k, x in batch.items() if x.ndim}
        loss, aux, grads = lax.map(one, (rows, jnp.arange(1.0, slices + 1)))
        weight = loss.weight.sum()
        grads = {p: g.sum(0) / (weight * scale).astype(g.dtype) for p, g in grads.items()}
        norm = jnp.sqrt(sum(jnp.square(jnp.abs(g)).sum() for g in grads.values()))
        clipped = {p: g * jnp.minimum(1, clip_norm / (norm + 1e-6)) for p, g in grads.items()}
        updates, new_state = tx.update({p: g.astype(masters[p].dtype) for p, g in clipped.items()}, opt_state, masters)
        new = optax.apply_updates(masters, updates), new_state
        if policy.skips:
            finite = jnp.isfinite(norm)
            new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (masters, opt_state))
        folded = {"mean": lambda x: x.mean(), "right": lambda x: x.sum(), "each": lambda x: x.reshape(-1)}
        return *new, loss.sum.sum() / weight, norm, {k: folded[k](x) for k, x in aux.items()}

    def run(noise: float) -> Run:
        masters = cast(start, policy.master)
        opt_state, losses, norms, auxes = tx.init(masters), [], [], []
        for i, scale in enumerate(scales_of(case)):
            batch = make_batch(case, WIDTH, i)
            masters, opt_state, loss, norm, aux = step(masters, opt_state, batch, np.float32(scale), np.float32(noise))
            losses.append(loss)
            norms.append(norm)
            auxes.append(jax.tree.map(np.asarray, aux))
        return Run(np.array(losses), np.array(norms), _host({**masters, **frozen}), auxes)

    return run


def _noisy(g: jax.Array, noise: jax.Array, slice_: jax.Array) -> jax.Array:
    """A gradient in fp32 or wider, of which elements that are not zero changed by up to `noise` of their size."""
    g = g.astype(jnp.float32 if is_real(g) else g.dtype)
    size = jnp.abs(g) + jnp.sqrt(jnp.square(jnp.abs(g)).sum() / max(g.size, 1))
    phase = 1e3 * (slice_ + jnp.arange(g.size, dtype=jnp.float32)).reshape(g.shape)
    chance = jnp.where(noise > 0, jnp.sin(phase), jnp.cos(phase))  # of either sign another one
    return g + jnp.where(g == 0, 0, noise * size * chance).astype(g.dtype)


def _host(flat: dict[str, Any]) -> dict[str, np.ndarray]:
    key = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return {path: np.asarray(key(x)) for path, x in flat.items()}


def _own_step(case: Case, loss_fn: Any, **kwargs: Any) -> Any:
    """A step of one's own, in the two ways that there are."""
    if case.entry == "value_and_grad":
        loss_and_grads = jzero.value_and_grad(loss_fn, **kwargs)

        def step(state, batch):
            value, grads = loss_and_grads(state, batch)
            loss, aux = value if kwargs["has_aux"] else (value, {})
            return state.apply_gradients(grads=grads), {"loss": loss, "aux": aux}

        return step

    @jax.jit
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(jzero.natural_params(state), batch)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return step


def run_jzero(case: Case, problem: Problem) -> Run:
    sizes = {"replica": case.replicas} if case.replicas > 1 else {}
    mesh = jzero.make_mesh(devices=jax.devices()[: case.num_devices], **sizes, data=-1)
    trainable = TRAINABLE if set(case.extras) & set(FROZEN) else None
    state = jzero.shard_train_state(problem.state, config=case.zero_config(), mesh=mesh, trainable=trainable)
    kwargs = {"has_aux": case.aux, "check_rows": not case.depends_on_slices, **dict(case.step)}
    make = jzero.make_train_step if case.entry == "train_step" else functools.partial(_own_step, case)
    step = make(problem.loss_fn, **kwargs)
    losses, norms, auxes = [], [], []
    for i, scale in enumerate(scales_of(case)):
        state, metrics = step(state, make_batch(case, WIDTH, i))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics.get("grad_norm", np.nan)))
        auxes.append(jax.tree.map(np.asarray, metrics.get("aux", {})))
        if case.entry == "train_step":
            assert bool(metrics["step_applied"]) == (i != case.poisoned), f"step {i}"
            assert float(metrics.get("loss_scale", 1)) == scale, f"loss scale of step {i}"
    params = jzero.gather_params(state, masters=True)
    flat = {path_str(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    return Run(np.array(losses), np.array(norms), _host(flat), auxes)


def unit(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps)


def narrowest(case: Case, problem: Problem) -> float:
    """The coarsest rounding step of what a gradient goes through."""
    dtypes = [x.dtype for path, x in problem.params.items() if is_real(x) and not is_frozen(path)]
    policy = case.precision
    found = [jnp.dtype(d) for d in (policy.compute, policy.reduce) if d is not None] or dtypes
    casts = [jnp.dtype(jnp.bfloat16)] if any(layer.kind == "casts" for layer in case.layers) else []
    return max(map(unit, [*found, *casts]))


def check(case: Case) -> bool:
    """Returns whether jzero trains the case, or refuses it as it may; raises unless it agrees with plain optax.

    How far rounding takes them apart depends on model and optimizer (the sign of lion, the products of muon), so it is
    measured: the reference runs again with its gradients changed by as much as rounding may.
    """
    problem = make_problem(case)
    run = make_reference(case, problem)
    rounding = narrowest(case, problem)
    noise = max(2 * rounding, 2e-6)
    # A sign flips or not: only more and larger changes tell which elements are about zero.
    noises = (noise, 8 * noise) if case.optimizer == "lion" else (noise,)
    want, controls = run(0.0), [run(sign * x) for x in noises for sign in (1, -1)]
    with warnings.catch_warnings():
        for start in IGNORED:
            warnings.filterwarnings("ignore", re.escape(start))
        try:
            got = run_jzero(case, problem)
        except (ValueError, TypeError) as error:
            if str(error).startswith(REFUSALS):
                return False
            raise
    _compare(case, got, want, controls, rounding)
    return True


def _compare(case: Case, got: Run, want: Run, controls: list[Run], rounding: float) -> None:
    floor = 4e-6 if rounding < 1e-6 else rounding / 4
    _assert_near("loss", got.losses, want.losses, [x.losses for x in controls], floor)
    if case.entry == "train_step":
        _assert_near("grad_norm", got.norms, want.norms, [x.norms for x in controls], floor)
    assert sorted(got.params) == sorted(want.params)
    for path, x in want.params.items():
        assert (got.params[path].dtype, got.params[path].shape) == (x.dtype, x.shape), path
        if not is_real(x) and not np.iscomplexobj(x):
            np.testing.assert_array_equal(got.params[path], x, err_msg=path)
        elif x.size:
            own = 2 * unit(x.dtype) if x.dtype.itemsize < 4 else 2e-6  # what storing rounds
            _assert_near(path, got.params[path], x, [x.params[path] for x in controls], own)
    for a, b, *others in zip(got.aux, want.aux, *(x.aux for x in controls), strict=True):
        assert set(a) == set(b)
        for name in a:
            if name == "right":  # an order of logits that rounding may change
                assert abs(int(a[name]) - int(b[name])) <= (0 if rounding < 1e-6 else 2), name
            else:
                _assert_near(f"aux/{name}", a[name], b[name], [x[name] for x in others], floor)


def _assert_near(name: str, got: Any, want: Any, controls: list[Any], floor: float) -> None:
    wide = lambda x: np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)
    got, want = wide(got), wide(want)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want), err_msg=name)
    finite = np.isfinite(want)
    if finite.any():
        size = np.abs(want[finite]).max()
        # Chance may make a control small, and the more so the smaller a leaf is: so ten times the larger of two.
        measured = max(np.abs(wide(x) - want)[finite].max() for x in controls)
        allowed = 10 * measured + floor * (size + 1e-2)
        off = np.abs(got - want)[finite].max()
        assert off <= allowed, f"{name}: off by {off:.3g}, allowed {allowed:.3g}, of {size:.3g}"


PLAINEST = Case(layers=(Layer("tanh", 3),), num_devices=1, rows=1, config=(("stage", 3), ("persistence_threshold", 0)))
"""What hypothesis draws first, whatever the seed."""


def drawn(draws: int, seed: int, run: Any, seconds: float = 180) -> None:
    """Calls `run` with that many cases, others for another seed, and shrinks one that fails for so many seconds."""
    failed: dict[str, Exception] = {}
    ends = float("inf")

    def once(case: Case) -> None:
        nonlocal ends
        hypothesis.assume(case != PLAINEST)
        if time.monotonic() > ends:  # all that was not found to fail counts as passed
            if repr(case) in failed:
                raise failed[repr(case)]
            return
        try:
            run(case)
        except Exception as error:
            ends = min(ends, time.monotonic() + seconds)
            failed[repr(case)] = error
            raise

    settings = hypothesis.settings(
        max_examples=draws,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        report_multiple_bugs=False,
    )
    hypothesis.seed(seed)(settings(hypothesis.given(cases())(once)))()


SMALL = Case(
    layers=(Layer("custom_vjp", 5), Layer("silu", 7)),
    extras=("frozen_16",),
    poisoned=1,
    optimizer="momentum",
    rows=1,
    step=(("accumulate_steps", 2), ("clip_norm", 0.2)),
    config=(("stage", 3), ("persistence_threshold", 20), ("precision", jzero.Precision(skip_nonfinite=True))),
)


def test_a_small_case_trains_like_plain_optax():
    assert check(SMALL)


def test_shares_draw_different_cases():
    seen: list[Case] = []
    for seed in range(3):
        drawn(4, seed, lambda case: seen.extend([case]))
    assert len(set(map(repr, seen))) == 12


def test_a_case_that_fails_is_shrunk_while_there_is_time():
    seen: list[Case] = []

    def fails(case):
        seen.append(case)
        assert not (case.num_devices == 8 and dict(case.config)["stage"] == 2 and case.extras)

    for seconds in (0, 60):
        with pytest.raises(AssertionError) as found:
            drawn(300, 0, fails, seconds)
        assert f"rows={seen[-1].rows}" in str(found.value.__notes__)
        small = dataclasses.replace(PLAINEST, num_devices=8, extras=("scalar",), config=seen[-1].config)
        assert (seen[-1] == small) == (seconds > 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("FUZZ_SEEDS", "4"))))
def test_draws_train_like_plain_optax(seed):
    refused = []
    drawn(4, seed, lambda case: refused.extend([] if check(case) else [case]))
    assert len(refused) <= 2
    jax.clear_caches()  # a long run would keep all programs
