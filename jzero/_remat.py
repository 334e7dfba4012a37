"""Recomputation of a traced loss: what of its loops and blocks is computed again in the backward pass."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from jzero import _compat
from jzero._blocks import keeps_heavy, parts_of
from jzero._mesh import HOST_MEMORY

__all__ = ["REMAT", "Remat", "has_parts_to_recompute", "offload_activations", "recomputes", "with_remat"]

REMAT = frozenset(["remat", "remat2", "checkpoint"])
Remat: TypeAlias = bool | Literal["cheap", "offload", "as_written"]
BOUNDARY = "jzero_block_boundary"


def offload_activations(names: str | Sequence[str], *, keep: str | Sequence[str] = ()) -> Callable[..., Any]:
    """Returns a policy for `jax.checkpoint` that keeps named activations in host memory until the backward pass.

    Everything else is recomputed. Activations get names by `jax.ad_checkpoint.checkpoint_name(x, name)`. The policy is
    for `jax.checkpoint(fn, policy=...)`, Flax's `nn.remat` and `nnx.remat`; gathered parameters are never kept, as with
    any policy. `make_train_step(remat="offload")` does it for what goes from layer to layer of scanned models.

    Args:
      names: Activations that go to the host, one or several.
      keep: Activations that are kept on the device.

    Returns:
      The policy.

    Raises:
      ValueError: There is no name, or a name is in both.

    Example:
      >>> def layer(w, x):
      ...     return jax.ad_checkpoint.checkpoint_name(jnp.tanh(x @ w), "hidden")
      >>> policy = jzero.offload_activations("hidden")
      >>> loss = lambda params, batch: jax.checkpoint(layer, policy=policy)(params["w"], batch).mean()
      >>> step = jzero.make_train_step(loss)
      >>> bool(step(jzero.shard_train_state(plain_state, stage=3), jnp.ones((8, 512)))[1]["step_applied"])
      True
    """
    names, keep = ([x] if isinstance(x, str) else list(x) for x in (names, keep))
    if not names or not all(isinstance(name, str) for name in (*names, *keep)):
        raise ValueError(f"Name at least one activation to offload: got {names!r} and keep={keep!r}.")
    if set(names) & set(keep):
        raise ValueError(f"{sorted(set(names) & set(keep))} cannot be offloaded and kept: name each once.")
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=keep,
        names_which_can_be_offloaded=names,
        offload_src="device",
        offload_dst=HOST_MEMORY,
    )


def recomputes(eqn: Any) -> bool:
    """Whether an equation, or anything in it, is recomputed in the backward pass."""
    return eqn.primitive.name in REMAT or any(
        recomputes(inner) for jaxpr in _compat.contained_jaxprs(eqn) for inner in jaxpr.eqns
    )


def with_remat(jaxpr: Any, inputs: Sequence[Any], *, remat: Remat) -> list[Any]:
    """Evaluates a jaxpr, with recomputation as `remat` says.

    Looks into `jit`, `cond`, `scan` and `jax.checkpoint`; whatever else holds code is evaluated as it is.

    Args:
      jaxpr: A closed jaxpr.
      inputs: Its inputs.
      remat: True: every pass of every scan that recomputes nothing yet keeps only what it is called with. "cheap": it
        also keeps the results of heavy operations, and so does every block of equations that repeat, see [Note: Blocks
        of unrolled models]; what does more than return its results, such as printing, is left as it is. "offload":
        every pass of the outermost scans is recomputed, whatever the code says, and what it gets from the pass before
        is kept in host memory. False: nothing is recomputed, whatever the code says.

    Returns:
      Its outputs.
    """
    return _Rewrite(remat)(jaxpr, inputs)


def has_parts_to_recompute(jaxpr: Any) -> bool:
    """Whether `with_remat(remat="cheap")` changes anything: a scan, or a block that repeats, says nothing itself."""
    opened, _ = _compat.open_jaxpr(jaxpr)
    parts = parts_of(opened)
    if any(part.is_block and _is_free(part.eqns) for part in parts):
        return True
    return any(
        _is_free([eqn]) if eqn.primitive.name == "scan" else any(map(has_parts_to_recompute, _entered(eqn)))
        for part in parts
        for eqn in part.eqns
    )


def _is_free(eqns: Sequence[Any]) -> bool:
    """Whether equations may be recomputed, and say nothing about that themselves."""
    return not any(recomputes(eqn) or _compat.has_side_effects(eqn) for eqn in eqns)


def _entered(eqn: Any) -> Sequence[Any]:
    """The jaxprs of an equation that are looked into."""
    kind = eqn.primitive.name
    return eqn.params["branches"] if kind == "cond" else [eqn.params["jaxpr"]] if kind in ("jit", "pjit") else []


@dataclasses.dataclass
class _Rewrite:
    """Evaluates jaxprs; calls stay calls, one function per jaxpr, which `jax.jit` caches."""

    remat: Remat
    calls: dict[Any, Callable[..., Any]] = dataclasses.field(default_factory=dict)

    def __call__(self, jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
        if self.remat == "cheap":
            return self._in_blocks(jaxpr, inputs)
        return _compat.evaluate(jaxpr, inputs, self._apply)

    def _in_blocks(self, jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
        jaxpr, consts = _compat.open_jaxpr(jaxpr)
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
        for part in parts_of(jaxpr):
            is_new = part.is_block and _is_free(part.eqns)
            run = functools.partial(_compat.evaluate, part, apply=_compat.bind if is_new else self._apply)
            body = jax.checkpoint(run, policy=keeps_heavy) if is_new else run
            env |= zip(part.outvars, body([env[v] for v in part.invars]), strict=True)
        return [_compat.value_of(v) if _compat.is_literal(v) else env[v] for v in jaxpr.outvars]

    def _apply(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        kind = eqn.primitive.name
        if kind in REMAT and self.remat != "cheap":
            return self._checkpoint(eqn, inputs)
        if kind in ("jit", "pjit"):
            return list(self._call(eqn)(*inputs))
        if kind == "cond":
            branches = [lambda *xs, branch=branch: self(branch, xs) for branch in eqn.params["branches"]]
            return list(lax.switch(inputs[0], branches, *inputs[1:]))
        if kind == "scan" and self._changes(eqn):
            return self._scan(eqn, inputs)
        return _compat.bind(eqn, inputs)

    def _changes(self, scan: Any) -> bool:
        """Whether a scan is changed."""
        if self.remat == "cheap":
            return _is_free([scan])
        return self.remat == "offload" or not (self.remat and recomputes(scan))

    def _call(self, eqn: Any) -> Callable[..., Any]:
        jaxpr = eqn.params["jaxpr"]
        given, returned = (
            tuple(s if isinstance(s, NamedSharding) else None for s in eqn.params[k])
            for k in ("in_shardings", "out_shardings")
        )
        key = (id(jaxpr), given, returned)
        if key not in self.calls:

            def call(*xs: Any) -> tuple[Any, ...]:
                return tuple(self(jaxpr, xs))

            call.__name__ = eqn.params.get("name", "jit")
            self.calls[key] = jax.jit(call, in_shardings=given, out_shardings=returned)
        return self.calls[key]

    def _checkpoint(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        def body(*xs: Any) -> list[Any]:
            return self(eqn.params["jaxpr"], xs)

        if self.remat:
            body = jax.checkpoint(body, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
        return list(body(*inputs))

    def _scan(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        num_consts, num_carry = _compat.scan_groups(eqn)
        jaxpr, _ = _compat.open_jaxpr(eqn.params["jaxpr"])
        end = num_consts + num_carry
        consts, init, xs = inputs[:num_consts], inputs[num_consts:end], inputs[end:]
        # What is carried unchanged stays so in plain sight.
        fixed = [v is out for v, out in zip(jaxpr.invars[num_consts:end], jaxpr.outvars, strict=False)]
        stays = list(itertools.islice(fixed, num_carry))

        inner: Callable[[Any, Sequence[Any]], list[Any]]
        inner = _Rewrite(remat=False) if self.remat == "offload" else self
        if self.remat == "cheap":  # one checkpoint is enough: its policy is asked about loops inside, too
            inner = functools.partial(_compat.evaluate, apply=_compat.bind)

        def run(consts: list[Any], carry: list[Any], x: list[Any]) -> list[Any]:
            if self.remat == "offload":
                carry = [
                    c if same or not c.ndim else checkpoint_name(c, BOUNDARY)
                    for c, same in zip(carry, stays, strict=True)
                ]
            return inner(eqn.params["jaxpr"], [*consts, *carry, *x])

        if self.remat:
            policies = {"offload": offload_activations(BOUNDARY), "cheap": keeps_heavy}
            policy = policies.get(str(self.remat))
            run = jax.checkpoint(run, prevent_cse=False, policy=policy)

        def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            outputs = run(consts, carry, x)
            new = [c if same else y for c, y, same in zip(carry, outputs, fixed, strict=False)]
            return new, outputs[num_carry:]

        carry, ys = lax.scan(body, init, xs, **{k: eqn.params[k] for k in ("length", "reverse", "unroll")})
        return [*carry, *ys]
