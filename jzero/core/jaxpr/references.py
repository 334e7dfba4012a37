"""References, `jax.new_ref`, which a user's function may make, but not hold from outside."""

from __future__ import annotations

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr


def check_references(jaxpr: AnyJaxpr, who: str) -> None:
    """Raises if a function reads or writes a reference that was made outside of it."""
    if compat.uses_references(jaxpr):
        raise ValueError(
            f"{who} reads or writes a reference (`jax.new_ref`) that was made outside of it. That lies on one device, "
            "and programs of jzero run on all. Make it inside, or keep its value in a field of the state, which a loss "
            "takes and returns: `make_train_step(loss_fn, has_aux=True, mutable=('extra',))`."
        )
