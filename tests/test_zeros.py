"""`init_train_state(zeros=)`: parameters that a load replaces are not drawn."""

import jax
import numpy as np
import optax
import pytest

import jzero
from jzero.state.init import lower_init
from tests import shared

TX = optax.adam(1e-2)
CONFIG = jzero.ZeroConfig(stage=3, persistence_threshold=0)


def make_state(key):
    """Draws three large arrays."""
    names = ("embed", "w", "lora_a")
    params = {name: jax.random.normal(k, (61, 36)) for name, k in zip(names, jax.random.split(key, 3), strict=True)}
    return jzero.TrainState.create(params=params, tx=TX, extra={"copy": params["w"], "key": key})


def num_draws(make, **options):
    """Random numbers that the lowered programs draw."""
    programs, *_ = lower_init(make, jax.random.key(0), CONFIG, jzero.make_mesh(), **options)
    return sum(program.as_text().count("call @_normal") for program in programs)


@pytest.mark.smoke
def test_what_matches_is_zero_and_not_drawn():
    """What is made of it is made of zeros; the rest is as without."""
    plain = jax.jit(make_state)(jax.random.key(0))
    born = jzero.unshard_train_state(
        jzero.init_train_state(make_state, jax.random.key(0), config=CONFIG, zeros=r"(?!.*lora_a).*")
    )
    for name in ("embed", "w"):
        assert not np.any(born.params[name])
    assert not np.any(born.extra["copy"])
    np.testing.assert_allclose(born.params["lora_a"], plain.params["lora_a"], rtol=0, atol=6e-7)
    everything, one, none = (
        num_draws(make_state),
        num_draws(make_state, zeros=r"(?!.*lora_a).*"),
        num_draws(make_state, zeros=".*"),
    )
    assert everything > one > none == 0


def test_integers_of_zeros_are_made_by_the_program():
    """And not while it is compiled, where rounding 100M elements took 90 seconds."""
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0, quantization=jzero.Quantization(frozen="int8"))
    options = {"trainable": "lora_a", "zeros": "embed|w"}
    programs, *_ = lower_init(make_state, jax.random.key(0), config, jzero.make_mesh(), **options)
    assert any("round-nearest-even" in program.compile().as_text() for program in programs)


def test_shared_arrays():
    """One array of two names is zero only if both match."""

    def tied(key):
        w = jax.random.normal(key, (61, 36))
        return jzero.TrainState.create(params={"a": w, "b": w}, tx=shared.sgd(0.1))

    for zeros, is_drawn in (("a", True), ("a|b", False)):
        born = jzero.init_train_state(tied, jax.random.key(0), config=CONFIG, zeros=zeros)
        assert np.any(born.params["b"]) == is_drawn


def test_what_matches_nothing():
    with pytest.raises(ValueError, match="`zeros` 'W' matches no"):
        jzero.init_train_state(make_state, jax.random.key(0), config=CONFIG, zeros="W")
    with pytest.raises(ValueError, match=r"`zeros` must be .*'\('"):
        jzero.init_train_state(make_state, jax.random.key(0), config=CONFIG, zeros="(")
