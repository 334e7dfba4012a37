"""The order in which parameters are used outside of loops, and how far ahead of their use they may be gathered.

[Note: Gathering ahead outside of loops]
Compilers start gathers as early as they can, or merge them into one: in a model without loops all parameters may be
whole at once. With a bound, a gather waits until enough of the uses before it are done, so that what is gathered and
not yet used stays within the bound. In the backward pass a gather waits until the gradient has passed the use that the
bound makes it wait for; without a bound, or if one parameter is more than that, until it reaches its own use. For that
each use hands on a token, a number without a meaning: its gradient comes once the later use is done with its own, and
what waits for it depends on it, see [Note: Holding gathers back].
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero._lazy import Bundle, Lazy, after, first_elements, is_free, is_lazy
from jzero._placement import is_on_host

__all__ = ["Block", "Blocks", "Use", "Uses", "arrived_tokens"]


@dataclasses.dataclass
class Mark:
    """Whether something later takes a token. A gradient looks at it, and must not hold arrays of the forward pass."""

    is_set: bool = False


@dataclasses.dataclass
class Use:
    """One use of parameters that are gathered for it.

    Attributes:
      size: What is gathered, in bytes.
      results: What it computed.
      token: The number that it hands on; `None` if it does not gather again by itself.
      taken: Whether a later use takes the token.
    """

    size: int
    results: Sequence[jax.Array] = ()
    token: jax.Array | None = None
    taken: Mark = dataclasses.field(default_factory=Mark)


class Uses:
    """The uses so far of one sequence of equations.

    Attributes:
      limit: The most that is gathered ahead, in bytes; a parameter beyond it is gathered when it is used.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._all: list[Use] = []

    def add(self, inputs: Sequence[Any]) -> list[Any]:
        """Notes the use of what is to be gathered of some lazy values; returns them, waiting for their time."""
        bundle = Bundle.of(inputs)
        found = {id(x): x for x in bundle.leaves if not is_free(x)}
        size = sum(math.prod(x.shape) * jnp.dtype(x.wire_dtype).itemsize for x in found.values())
        fence = self._before(size)
        self._all.append(Use(size))
        if not fence:
            return list(inputs)
        waiting = after(dict(enumerate(found.values())), fence)
        new = dict(zip(found, waiting.values(), strict=True))
        return bundle.map(lambda x: new.get(id(x), x)).values()

    def finish(self, results: Sequence[Any]) -> None:
        """Notes what the last use has computed."""
        self._all[-1].results = [x for x in results if not is_lazy(x) and jnp.issubdtype(x.dtype, jnp.inexact)]

    def last_with_tokens(self) -> tuple[Use, list[jax.Array]]:
        """Returns the last use and the tokens of those that may gather again once the gradient has passed it."""
        last = self._all[-1]
        taken, ahead = [], last.size
        for use in reversed(self._all[:-1]):
            ahead += use.size
            if use.token is not None and not use.taken.is_set and use.size <= self.limit < ahead:
                use.taken.is_set = True
                taken.append(use.token)
        return last, taken

    def end(self, outputs: list[Any]) -> list[Any]:
        """Returns the outputs; uses whose token nobody took may gather again once a gradient of these is there."""
        waiting = [
            use for use in self._all if use.token is not None and not use.taken.is_set and use.size <= self.limit
        ]
        at = next((i for i, x in enumerate(outputs) if not is_lazy(x) and jnp.issubdtype(x.dtype, jnp.inexact)), None)
        if not waiting or at is None:
            return outputs
        for use in waiting:
            use.taken.is_set = True
        return [*outputs[:at], _with_tokens(outputs[at], [use.token for use in waiting]), *outputs[at + 1 :]]

    def _before(self, size: int) -> list[jax.Array]:
        """Returns what has to be computed before `size` bytes more may be gathered."""
        ahead = size
        for use in reversed(self._all):
            ahead += use.size
            if ahead > self.limit:
                return list(use.results[:1])
        return []


@dataclasses.dataclass
class Block:
    """A recomputed block.

    Attributes:
      size: What it gathers, in bytes.
      token: The number that it hands on.
      taken: Whether something later takes the token.
    """

    size: int
    token: jax.Array | None = None
    taken: Mark = dataclasses.field(default_factory=Mark)


class Blocks:
    """The recomputed blocks so far of one sequence of equations.

    Attributes:
      limit: The most that is gathered ahead, in bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._all: list[Block] = []
        self._loop: list[jax.Array] = []
        self._late: list[list[jax.Array]] = []

    def add_loop(self, results: Sequence[jax.Array], num_carry: int) -> list[jax.Array]:
        """Notes a loop and returns its results: the first `num_carry` of them get their gradients late.

        Its backward pass begins when all that comes after it, up to the next loop, has reduced its gradients.
        """
        carried, tokens = _late_gradients(results[:num_carry])
        self._loop = tokens or self._loop
        return [*carried, *results[num_carry:]]

    def add_late(self, results: Sequence[jax.Array]) -> list[jax.Array]:
        """Notes a recomputed block that gathers nothing again, and returns its results, which get their gradients late.

        Its backward pass begins when what comes after the next block, up to the one after that, has reduced its own.
        """
        results, tokens = _late_gradients(results)
        self._late.append(tokens)
        return results

    def waited_for(self, values: Sequence[Any], *, free: bool) -> list[Any]:
        """Returns values that are about to be used: what gets its gradients late waits for theirs.

        Args:
          values: Arrays or lazy values.
          free: Whether it waits for parameters, too, that every device holds whole.
        """
        tokens = [*self._loop, *itertools.chain(*self._late[-2:-1])]
        if not tokens:
            return list(values)

        def waited(x: Any) -> Any:
            if not isinstance(x, Lazy) or x.slot is None or is_on_host(x.slot) or (is_free(x) and not free):
                return x
            return dataclasses.replace(x, slot=_with_tokens(x.slot, tokens))

        return Bundle.of(values).map(waited).values()

    def add(self, block: Block) -> None:
        """Notes a block."""
        self._all.append(block)

    def taken(self) -> list[jax.Array]:
        """Returns the token of the block before the last, or of one before it by as much as may be gathered ahead.

        Its gradient arrives when all that take the token have reduced their gradients; only then that block gathers.
        The token of the last loop is there, too.
        """
        ahead = 0
        for block in self._all[-2::-1]:
            ahead += block.size
            if ahead > self.limit:
                assert block.token is not None
                block.taken.is_set = True
                return [*self._loop, block.token]
        return self._loop


def _late_gradients(values: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns values, and a token for each that may have a gradient: it is there when that of the token is.

    One by one: what depends on the batch alone must not seem to be differentiated because something beside it is.
    """
    tokens, new = [], []
    for x in values:
        late = x
        if jnp.issubdtype(x.dtype, jnp.inexact):
            late, token = _with_late_gradient(x)
            tokens.append(token)
        new.append(late)
    return new, tokens


@jax.custom_vjp
def _with_late_gradient(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a value and a token: what gradient the value has is there when that of the token is."""
    return x, jnp.zeros(())


def _late(_: None, cotangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array]:
    of_value, of_token = cotangents
    return (after({0: of_value}, [of_token])[0],)


_with_late_gradient.defvjp(lambda x: (_with_late_gradient(x), None), _late)


@jax.custom_vjp
def _with_tokens(x: jax.Array, tokens: list[jax.Array]) -> jax.Array:
    return x


# The value beside its gradient, which may be known in advance: that of a loss is 1.
_with_tokens.defvjp(
    lambda x, tokens: (x, (x, len(tokens))), lambda kept, grad: (grad, arrived_tokens(kept[1], [grad, kept[0]]))
)


def arrived_tokens(num_tokens: int, cotangents: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the gradients of tokens, which are there when `cotangents` are; what they are does not matter."""
    firsts = [x.reshape(()).astype(jnp.float32) for x in first_elements(cotangents)]
    return [sum(firsts, jnp.zeros(()))] * num_tokens
