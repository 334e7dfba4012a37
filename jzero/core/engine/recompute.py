"""Rewrites the loss before differentiation: adds checkpoints, and turns equal layers into calls of one function.

    recompute(jaxpr, remat, axis_env, *, fuses_products) -> ClosedJaxpr

Loops and blocks of the loss move inside of `checkpoint`. So

    a = scan[jaxpr={ ... dot_general ... tanh ... }] x ws

becomes, with `remat="cheap"`,

    a = scan[jaxpr={ ... checkpoint[jaxpr={ ... dot_general ... tanh ... } policy=keeps_heavy] ... }] x ws

Checkpoint policies see whole parameters, never a gather.

[Note: Repeated blocks]
The layers of an unrolled model repeat the same equations, see [Note: Blocks of unrolled models]. Equal layers become
calls of one `jax.jit`, with the `jax.checkpoint` of recomputed layers inside. So jax differentiates one layer, the walk
enters one, and jax lowers one; compilers inline the calls before anything else. Equal layers may differ in three ways:
in their scopes, which are entered around the call, so that profiles still tell layers apart; in the numbers that are
folded into random keys, which Flax derives from a layer's path, and which become inputs; and in source lines, which
are those of the first layer.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, TypeAlias

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr
from jzero.core.config.keep import Keep
from jzero.core.engine.kept_blocks import (
    KEPT_BLOCK,
    Apply,
    is_loop_of_blocks,
    keeping,
    naming_operands,
    num_blocks,
    recomputes,
    shardings_of,
)
from jzero.core.jaxpr.identity import IdDict
from jzero.core.jaxpr.interpret import Piece, evaluate, propagate
from jzero.core.jaxpr.primitives import CALLS, REMAT, called_jaxpr
from jzero.core.jaxpr.repeats import EquationRun, is_free, keeps_heavy, split_into_parts
from jzero.core.jaxpr.structure import CanonicalJaxpr, Structures, is_worth_a_call
from jzero.core.layout.mesh import HOST_MEMORY

LayerFunction: TypeAlias = Callable[..., list[jax.Array]]
Remat: TypeAlias = bool | Literal["cheap", "offload", "as_written"] | Keep
AxisEnv: TypeAlias = list[tuple[str, int]]
"""Names and sizes of the mesh axes that the loss may name."""
BOUNDARY = "jzero_block_boundary"
Treatment: TypeAlias = Literal["as_written", "cheap", "kept"]
"""What becomes of a repeated block."""


def offload_activations(names: str | Sequence[str], *, keep: str | Sequence[str] = ()) -> Callable[..., Any]:
    """Returns a policy for `jax.checkpoint` that keeps named activations in host memory until the backward pass.

    Everything else is recomputed. `jax.ad_checkpoint.checkpoint_name(x, name)` names an activation. The policy is for
    `jax.checkpoint(fn, policy=...)`, Flax's `nn.remat` and `nnx.remat`. As with any policy, gathered parameters are
    never kept. `make_train_step(remat="offload")` offloads the activations between the layers of scanned models.

    Args:
      names: Activations to keep on the host, one or several.
      keep: Activations to keep on the device.

    Returns:
      The policy.

    Raises:
      ValueError: There is no name, or a name is in both arguments.

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


def recompute(jaxpr: AnyJaxpr, remat: Remat, axis_env: AxisEnv, *, fuses_products: bool = False) -> ClosedJaxpr:
    """Returns a closed jaxpr of the same loss, with recomputation as `remat` says and repeated layers as calls.

    Enters `jit`, `cond`, `scan` and `jax.checkpoint`; other equations with jaxprs stay as they are.

    Args:
      jaxpr: A closed jaxpr.
      remat: True: every iteration of a scan saves only its inputs, unless the scan already recomputes something.
        "cheap": it also saves the results of heavy operations, and so does every repeated block of equations, see
        [Note: Blocks of unrolled models]; scans and blocks with side effects, such as printing, stay as they are, and
        so do those with an operation of `jax.experimental.hijax` that has no `jvp`, which `jax.checkpoint` asks for.
        "offload": every iteration of the outermost scans is recomputed, whatever the code says of it, and its carry
        waits in host memory. False: nothing is recomputed, whatever the code says. "as_written": as the code says.
        `Keep`: as its `remat`, but for the last blocks, see [Note: Kept blocks].
      axis_env: The names and sizes of the mesh axes that the loss may name.
      fuses_products: Whether the compiler does, see `PlatformFacts`.

    Example:
      >>> from jzero.core.engine.recompute import recompute
      >>> scanned = lambda w, x: jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0].sum()
      >>> jaxpr = jax.make_jaxpr(scanned)(jnp.ones((3, 8, 8)), jnp.ones((2, 8)))
      >>> "remat" in str(jaxpr) or "checkpoint" in str(jaxpr)
      False
      >>> new = str(recompute(jaxpr, "cheap", axis_env=[]))
      >>> "remat" in new or "checkpoint" in new
      True
    """
    shapes = list(map(compat.shape_struct_of, jaxpr.in_avals))
    before = None
    if isinstance(remat, Keep):
        total = num_blocks(jaxpr, fuses_products=fuses_products)
        before = max(0, total - remat.blocks) if remat.blocks else None
        remat = remat.remat
    rewrite = _Rewrite(remat, functions_of(jaxpr), before, fuses_products=fuses_products)
    return jax.make_jaxpr(lambda *inputs: rewrite(jaxpr, inputs), axis_env=axis_env)(*shapes)


def has_parts_to_recompute(jaxpr: AnyJaxpr) -> bool:
    """Whether `remat="cheap"` changes anything: whether some scan or repeated block has no checkpoint of its own."""
    opened, _ = compat.open_jaxpr(jaxpr)
    parts = split_into_parts(opened)
    if any(part.is_free for part in parts):
        return True
    return any(
        is_free([eqn]) if eqn.primitive.name == "scan" else any(map(has_parts_to_recompute, _rewritten_jaxprs(eqn)))
        for part in parts
        for eqn in part.eqns
    )


def _rewritten_jaxprs(eqn: JaxprEqn) -> Sequence[AnyJaxpr]:
    """Returns the jaxprs of an equation that the rewrite enters."""
    kind = eqn.primitive.name
    return eqn.params["branches"] if kind == "cond" else [called_jaxpr(eqn)] if kind in CALLS else []


class Functions:
    """The functions of a loss's layers and calls: `jax.jit` traces each once, and jax differentiates it once.

    Attributes:
      structures: Gives equal layers the same number.
      calls: The functions.
    """

    def __init__(self) -> None:
        self.structures = Structures()
        self.calls: dict[Hashable, Callable[..., Sequence[jax.Array]]] = {}
        self._common: IdDict[EquationRun, CanonicalJaxpr] = IdDict()

    def common(self, block: EquationRun) -> CanonicalJaxpr:
        """Returns what a block has in common with equal ones."""
        if block not in self._common:
            self._common[block] = CanonicalJaxpr.of(block)
        return self._common[block]

    def number(self, block: EquationRun) -> int:
        """Returns a number that equal blocks share."""
        return self.structures(self.common(block))

    def call_block(
        self, block: EquationRun, inputs: Sequence[jax.Array], how: Treatment, *, fuses_products: bool = False
    ) -> list[jax.Array]:
        """Calls the function of a block that is treated in a way; `fuses_products` as in `recompute`."""
        apply, wrap = keeping(block.eqns, fuses_products=fuses_products or how == "as_written")
        if how == "cheap":
            apply, wrap = compat.bind, functools.partial(jax.checkpoint, policy=keeps_heavy)
        return self.call(self.common(block), inputs, apply, wrap, (how, fuses_products))

    def call(
        self,
        common: CanonicalJaxpr,
        inputs: Sequence[jax.Array],
        apply: Apply,
        wrap: Callable[[LayerFunction], LayerFunction],
        key: tuple[Hashable, ...],
    ) -> list[jax.Array]:
        """Calls the function that all equal jaxprs of one key share."""
        name, key = KEPT_BLOCK if key[0] == "kept" else "layer", (*key, self.structures(common))
        if key not in self.calls:

            def layer(*inputs: jax.Array) -> list[jax.Array]:
                return evaluate(common, inputs, apply)

            layer.__name__ = name
            self.calls[key] = jax.jit(wrap(layer))  # one object, so that jax traces it once
        with compat.in_names(common.names):
            return list(self.calls[key](*inputs, *common.numbers))  # numbers: those folded into random keys


_FUNCTIONS: weakref.WeakKeyDictionary[Jaxpr, Functions] = weakref.WeakKeyDictionary()
"""The functions of each loss, while its jaxpr lives: what judges blocks has them traced and differentiated, too. Only
`functions_of` reads and writes it."""


def functions_of(jaxpr: AnyJaxpr) -> Functions:
    """Returns the functions of a loss."""
    return _FUNCTIONS.setdefault(compat.open_jaxpr(jaxpr)[0], Functions())


@dataclasses.dataclass
class _Rewrite:
    """Evaluates jaxprs, changed as `recompute` says.

    Attributes:
      remat: The option; `None`: loops are as written, nothing else is recomputed.
      functions: Those of the loss.
      before_kept: How many blocks come before the next kept one; `None`: none is kept.
      fuses_products: Whether the compiler does, see `PlatformFacts`.
      in_loop: Whether this is a loop body, where no layers are shared, since it is traced once.
    """

    remat: Remat | None
    functions: Functions
    before_kept: int | None = None
    fuses_products: bool = False
    in_loop: bool = False

    def __call__(self, jaxpr: AnyJaxpr, inputs: Sequence[jax.Array]) -> list[jax.Array]:
        """Evaluates a jaxpr part by part: repeated blocks, and the equations around them."""
        # A body is traced once, so sharing its layers gains nothing; "cheap" still adds checkpoints.
        if self.in_loop and self.remat != "cheap":
            return evaluate(jaxpr, inputs, self._apply)
        jaxpr, consts = compat.open_jaxpr(jaxpr)
        parts, is_cheap = split_into_parts(jaxpr), self.remat == "cheap"
        functions, fuses = self.functions, self.fuses_products
        shared = [] if self.in_loop else [x for x in parts if x.is_free and (is_cheap or is_worth_a_call(x))]
        numbers = IdDict((x, functions.number(x)) for x in shared)
        times = collections.Counter(numbers.values())

        def apply(part: EquationRun, values: list[jax.Array]) -> list[jax.Array]:
            if is_cheap and part.is_free and self._is_kept():
                return functions.call_block(part, values, "kept", fuses_products=fuses)
            if part in numbers and times[numbers[part]] > 1:  # a layer that occurs once stays in place
                return functions.call_block(part, values, "cheap" if is_cheap else "as_written")
            if is_cheap and part.is_free:
                layer = functools.partial(evaluate, part, apply=compat.bind)
                return jax.checkpoint(layer, policy=keeps_heavy)(values)
            return evaluate(part, values, self._apply)

        program = Piece(jaxpr.invars, jaxpr.outvars, parts, jaxpr.constvars)
        return propagate(program, [*consts, *inputs], apply, compat.value_of)

    def _is_kept(self) -> bool:
        """Whether the next block is kept; counts it."""
        if self.before_kept:
            self.before_kept -= 1
            return False
        return self.before_kept == 0

    def _apply(self, eqn: JaxprEqn, inputs: list[jax.Array]) -> list[jax.Array]:
        kind = eqn.primitive.name
        if kind in REMAT:
            return self._checkpoint(eqn, inputs)
        if kind in CALLS:
            return list(self._call(eqn)(*inputs))
        if kind == "cond" and self.remat != "as_written":
            inside = self._in_loop()
            branches = [lambda *xs, jaxpr=jaxpr: inside(jaxpr, xs) for jaxpr in eqn.params["branches"]]
            return list(lax.switch(inputs[0], branches, *inputs[1:]))
        if kind == "scan" and self._changes(eqn):
            may_stay = self.remat == "cheap" and not (self.in_loop or self.fuses_products)
            return self._scan(eqn, inputs, keeps=may_stay and is_loop_of_blocks(eqn) and self._is_kept())
        return compat.bind(eqn, inputs)

    def _in_loop(self) -> _Rewrite:
        return dataclasses.replace(self, in_loop=True, before_kept=None)

    def _changes(self, scan: JaxprEqn) -> bool:
        """Whether a scan is changed."""
        if self.remat == "cheap":
            return is_free([scan])
        return self.remat in ("offload", False) or (self.remat is True and not recomputes(scan))

    def _call(self, eqn: JaxprEqn) -> Callable[..., Sequence[jax.Array]]:
        jaxpr = called_jaxpr(eqn)
        in_shardings, out_shardings = shardings_of(eqn)
        inside = self
        if self.before_kept is not None:
            inside = dataclasses.replace(
                self, before_kept=min(self.before_kept, num_blocks(jaxpr, fuses_products=self.fuses_products))
            )
            self.before_kept -= inside.before_kept or 0
        key = self.remat, inside.before_kept, self.fuses_products, self.in_loop, id(jaxpr), in_shardings, out_shardings
        if key not in self.functions.calls:

            def call(*xs: jax.Array) -> tuple[jax.Array, ...]:
                return tuple(dataclasses.replace(inside)(jaxpr, xs))  # it counts blocks

            call.__name__ = eqn.params.get("name", "jit")
            self.functions.calls[key] = jax.jit(call, in_shardings=in_shardings, out_shardings=out_shardings)
        return self.functions.calls[key]

    def _checkpoint(self, eqn: JaxprEqn, inputs: list[jax.Array]) -> list[jax.Array]:
        setting, policy = eqn.params["prevent_cse"], eqn.params["policy"]
        prevent_cse = setting if isinstance(setting, bool) else any(setting)
        inside = self._in_loop()
        apply = compat.bind if self.remat in ("cheap", "as_written") else inside._apply

        def wrap(body: LayerFunction) -> LayerFunction:
            return jax.checkpoint(body, prevent_cse=prevent_cse, policy=policy) if self.remat else body

        if self.in_loop:
            return list(wrap(functools.partial(evaluate, eqn.params["jaxpr"], apply=apply))(inputs))
        common = CanonicalJaxpr.of(compat.open_jaxpr(eqn.params["jaxpr"])[0])
        return self.functions.call(common, inputs, apply, wrap, (self.remat, prevent_cse, id(policy)))

    def _scan(self, eqn: JaxprEqn, inputs: list[jax.Array], *, keeps: bool) -> list[jax.Array]:
        num_consts, num_carry = compat.scan_groups(eqn)
        jaxpr, _ = compat.open_jaxpr(eqn.params["jaxpr"])
        end = num_consts + num_carry
        consts, init, xs = inputs[:num_consts], inputs[num_consts:end], inputs[end:]
        # Values that are carried unchanged stay visibly unchanged.
        fixed = [v is out for v, out in zip(jaxpr.invars[num_consts:end], jaxpr.outvars, strict=False)]

        inner: Callable[[AnyJaxpr, Sequence[jax.Array]], list[jax.Array]]
        # With "offload" each turn of an outermost loop is recomputed as one piece; the loops in it are as written.
        inner = _Rewrite(None if self.remat == "offload" else self.remat, self.functions, in_loop=True)
        if self.remat == "cheap":  # one checkpoint is enough: its policy also decides for loops inside
            inner = functools.partial(evaluate, apply=naming_operands(()) if keeps else compat.bind)

        def run(consts: list[jax.Array], carry: list[jax.Array], x: list[jax.Array]) -> list[jax.Array]:
            named = [
                # A scalar is not worth a copy to the host, nor is a constant of the loop.
                checkpoint_name(c, BOUNDARY) if self.remat == "offload" and c.ndim and not same else c
                for c, same in zip(carry, fixed, strict=True)
            ]
            return inner(eqn.params["jaxpr"], [*consts, *named, *x])

        if self.remat:
            policies = {"offload": offload_activations(BOUNDARY), "cheap": keeps_heavy}
            run = jax.checkpoint(run, prevent_cse=False, policy=policies.get(str(self.remat)))

        def body(carry: list[jax.Array], x: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            outputs = run(consts, carry, x)
            new = [c if same else y for c, y, same in zip(carry, outputs, fixed, strict=False)]
            return new, outputs[num_carry:]

        # ys: [L, ...]
        carry, ys = lax.scan(body, init, xs, **{k: eqn.params[k] for k in ("length", "reverse", "unroll")})
        return [*carry, *ys]
