"""Layers with public functions of jax, each `[B, F] -> [B, F]`: what tests try all of them with."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, nn
from jax import random as jr
from jax import scipy as jsp
from jax.experimental.ode import odeint
from jax.scipy.optimize import minimize

ROWS, WIDTH = 8, 16  # of one device
KEY, EDGES = jr.key(0), np.linspace(-3, 3, 8, dtype=np.float32)
WIDE = np.eye(WIDTH, dtype=np.float32) * 9
fixed = lax.stop_gradient


def positive(x):
    """[B, F] -> [F, F], positive definite."""
    return x.T @ x + WIDE


def by_rows(fn, x):
    """A sum of something over each row."""
    return x + jax.vmap(fn)(x).reshape(len(x), -1).sum(-1, keepdims=True)


def drawn(draw):
    """A layer with random numbers, whose parameters are positive."""
    return lambda x: x + draw(KEY, nn.softplus(x)).reshape(-1)[0]


@jax.custom_vjp
def rounded(x):
    return jnp.round(x)


rounded.defvjp(lambda x: (rounded(x), None), lambda _, g: (g,))


@jax.custom_jvp
def steep(x):
    return jnp.sign(x)


steep.defjvp(lambda x, t: (steep(*x), t[0] * nn.sigmoid(x[0])))


def while_loop(x):
    return x + lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.9), (0, fixed(x)))[1]


def custom_root(x):
    def solve(f, y):
        return lax.fori_loop(0, 5, lambda i, z: z - f(z), y)

    return lax.custom_root(lambda y: y - 0.5 * jnp.sin(y) - x, x, solve, lambda g, y: y)


def custom_solve(x):
    scale = 1 + jnp.square(x)
    return lax.custom_linear_solve(lambda y: scale * y, x, lambda _, b: b / scale, symmetric=True)


def attend(x):
    q, k, v = jnp.split(jnp.tile(x, 3).reshape(1, len(x), 12, 4), 3, axis=2)
    return nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)


def convolved(x):
    return lax.conv_general_dilated(x[:, :, None], x[:3, :4, None].reshape(3, 1, 4), (1,), "SAME", **OF_ROWS).sum(-1)


OF_ROWS = {"dimension_numbers": ("NWC", "WIO", "NWC")}

# Layers, [B, F] -> [B, F], or what broadcasts to it.
NUMPY = {
    "searchsorted": lambda x: x * jnp.searchsorted(EDGES, x),
    "interp": lambda x: jnp.interp(x, EDGES, EDGES**2),
    "histogram": lambda x: x * jnp.histogram(x, bins=4)[0].sum(),
    "digitize": lambda x: x * jnp.digitize(x, EDGES),
    "bincount": lambda x: x * jnp.bincount(jnp.digitize(x[0], EDGES), length=9)[0],
    "sort": jnp.sort,
    "argsort": lambda x: x * jnp.argsort(x),
    "lexsort": lambda x: x * jnp.lexsort((x[0], x[1])),
    "partition": lambda x: jnp.partition(x, 3),
    "unique": lambda x: x + jnp.unique(x, size=4)[0],
    "nonzero": lambda x: x * jnp.nonzero(x[0], size=WIDTH)[0],
    "isin": lambda x: x * jnp.isin(x, EDGES),
    "take_along_axis": lambda x: jnp.take_along_axis(x, jnp.argsort(x), 1),
    "put_along_axis": lambda x: jnp.put_along_axis(x, jnp.argmax(x, 1, keepdims=True), 0.0, 1, inplace=False),
    "percentile": lambda x: x - jnp.percentile(x, 50),
    "median": lambda x: x - jnp.median(x, 1, keepdims=True),
    "nanmean": lambda x: x - jnp.nanmean(x),
    "cov": lambda x: x @ jnp.cov(x.T),
    "corrcoef": lambda x: x @ jnp.corrcoef(x.T),
    "cumsum": lambda x: jnp.cumsum(x, 1),
    "cumprod": lambda x: jnp.cumprod(nn.sigmoid(x), 1),
    "gradient": lambda x: jnp.gradient(x, axis=1),
    "convolve": jax.vmap(lambda r: jnp.convolve(r, r[:3], "same")),
    "einsum": lambda x: jnp.einsum("bi,ij->bj", x, positive(x)),
    "kron": lambda x: by_rows(lambda r: jnp.kron(r, r[:2]), x),
    "polyval": lambda x: jnp.polyval(EDGES[:3], x),
    "piecewise": lambda x: jnp.piecewise(x, [x < 0, x >= 0], [jnp.sin, jnp.cos]),
    "select": lambda x: jnp.select([x < 0, x < 1], [x, 2 * x], 0.0),
    "ldexp": lambda x: jnp.ldexp(x, jnp.full(x.shape, 2)),
    "frexp": lambda x: jnp.frexp(x)[0],
    "i0": jnp.i0,
    "unwrap": jnp.unwrap,
    "apply_along_axis": lambda x: jnp.apply_along_axis(jnp.flip, 1, x),
    "block": lambda x: jnp.block([[x[:, :8], x[:, 8:]]]),
    "fft.fft": lambda x: jnp.fft.fft(x).real,
    "fft.rfft": lambda x: jnp.fft.irfft(jnp.fft.rfft(x) * 1j, WIDTH),
    "fft.rfft2": lambda x: jnp.fft.irfft2(jnp.fft.rfft2(x) * 1j, x.shape),
    "linalg.cholesky": lambda x: x @ jnp.linalg.cholesky(positive(x)),
    "linalg.det": lambda x: x / jnp.linalg.det(positive(x)),
    "linalg.eigh": lambda x: x + jnp.linalg.eigh(positive(x))[0],
    "linalg.inv": lambda x: x @ jnp.linalg.inv(positive(x)),
    "linalg.lstsq": lambda x: x + jnp.linalg.lstsq(positive(x), x[0])[0],
    "linalg.norm": lambda x: x / jnp.linalg.norm(x, 2),
    "linalg.pinv": lambda x: x + jnp.linalg.pinv(x).T,
    "linalg.qr": lambda x: jnp.linalg.qr(x.T)[0].T,
    "linalg.slogdet": lambda x: x - jnp.linalg.slogdet(positive(x))[1],
    "linalg.solve": lambda x: jnp.linalg.solve(positive(x), x.T).T,
    "linalg.svd": lambda x: x + jnp.linalg.svd(x, compute_uv=False).sum(),
}
LAX = {
    "approx_max_k": lambda x: x + lax.approx_max_k(x, 4)[0].sum(-1, keepdims=True),
    "associative_scan": lambda x: lax.associative_scan(jnp.add, x, axis=1),
    "cond": lambda x: lax.cond(x.sum() > 0, jnp.sin, lambda x: x * jnp.searchsorted(EDGES, x), x),
    "conv_general_dilated": convolved,
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x, 1),
    "custom_linear_solve": custom_solve,
    "custom_root": custom_root,
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:1], (jnp.argmax(x[0]) % 8, 0)),
    "fori_loop": lambda x: lax.fori_loop(0, 3, lambda i, c: c * 0.9 + jnp.interp(c, EDGES, EDGES), x),
    "igamma": lambda x: lax.igamma(nn.softplus(x), nn.softplus(x)),
    "map": lambda x: lax.map(jnp.sort, x),
    "ragged_dot": lambda x: lax.ragged_dot(x, jnp.stack([positive(x)] * 2), jnp.array([1, ROWS - 1])),
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 7),
    "reduce_window": lambda x: x + lax.reduce_window(x, -jnp.inf, lax.max, (1, 4), (1, 4), "SAME").sum(),
    "scan": lambda x: lax.scan(lambda c, r: (c + r, c * r), x[0], x)[1],
    "sort_key_val": lambda x: lax.sort_key_val(x, x * 2)[1],
    "switch": lambda x: lax.switch(jnp.argmax(x[0]) % 3, [jnp.sin, jnp.cos, jnp.tanh], x),
    "top_k": lambda x: x + lax.top_k(x, 4)[0].sum(-1, keepdims=True),
    "while_loop": while_loop,
    "linalg.lu": lambda x: x @ lax.linalg.lu(positive(x))[0],
    "scatter": lambda x: x.at[jnp.arange(2)].add(1.0).at[0].multiply(x[1]),
}
NN = {
    **{name: getattr(nn, name) for name in "celu elu gelu glu leaky_relu log_softmax mish relu6 selu silu".split()},
    "dot_product_attention": attend,
    "glu": lambda x: jnp.tile(nn.glu(x), 2),
    "logsumexp": lambda x: x - nn.logsumexp(x, -1, keepdims=True),
    "one_hot": lambda x: x * nn.one_hot(jnp.argmax(x, -1), WIDTH),
    "softmax": nn.softmax,
    "standardize": nn.standardize,
}
SCIPY = {
    **{f"special.{name}": getattr(jsp.special, name) for name in "erf entr expi i0e i1e ndtr".split()},
    "special.betainc": lambda x: jsp.special.betainc(1.5, 2.5, nn.sigmoid(x)),
    "special.digamma": lambda x: jsp.special.digamma(nn.softplus(x)),
    "special.gammainc": lambda x: jsp.special.gammainc(nn.softplus(x), 1.5),
    "special.gammaln": lambda x: jsp.special.gammaln(nn.softplus(x)),
    "special.ndtri": lambda x: jsp.special.ndtri(nn.sigmoid(x)),
    "fft.dct": jsp.fft.dct,
    "integrate.trapezoid": lambda x: x - jsp.integrate.trapezoid(x)[:, None],
    "linalg.expm": lambda x: x @ jsp.linalg.expm(positive(x) / 99),
    "linalg.solve_triangular": lambda x: jsp.linalg.solve_triangular(positive(x), x.T).T,
    "ndimage.map_coordinates": lambda x: x + jsp.ndimage.map_coordinates(x, [x[0], x[1]], order=1),
    "signal.stft": lambda x: x + jnp.abs(jsp.signal.stft(x, nperseg=8)[2]).sum(),
    "stats.gamma.logpdf": lambda x: jsp.stats.gamma.logpdf(nn.softplus(x), 2.0),
    "stats.multivariate_normal.logpdf": lambda x: x - jsp.stats.multivariate_normal.logpdf(x, x[0], WIDE)[:, None],
    "optimize.minimize": lambda x: x + minimize(lambda y: y @ y, fixed(x[0]), method="BFGS").x,
}
RANDOM = {
    "bernoulli": lambda x: x * jr.bernoulli(KEY, 0.9, x.shape),
    "beta": drawn(lambda key, x: jr.beta(key, x, x)),
    "categorical": lambda x: x + jr.categorical(KEY, x)[:, None],
    "choice": lambda x: jr.choice(KEY, x, (ROWS,)),
    "dirichlet": drawn(jr.dirichlet),
    "fold_in": lambda x: x * jr.uniform(jr.fold_in(KEY, jnp.argmax(x))),
    "gamma": drawn(jr.gamma),
    "gumbel": drawn(lambda key, x: jr.gumbel(key, x.shape)),
    "multivariate_normal": lambda x: jr.multivariate_normal(KEY, x, WIDE),
    "normal": drawn(lambda key, x: jr.normal(key, x.shape)),
    "orthogonal": lambda x: x @ jr.orthogonal(KEY, WIDTH),
    "permutation": lambda x: jr.permutation(KEY, x, axis=1),
    "poisson": drawn(lambda key, x: jr.poisson(key, fixed(x))),
    "randint": drawn(lambda key, x: jr.randint(key, x.shape, 0, 9)),
    "truncated_normal": drawn(lambda key, x: jr.truncated_normal(key, -x, x)),
}
JAX = {
    "custom_jvp": steep,
    "custom_vjp": rounded,
    "hessian": lambda x: x + jax.vmap(jax.hessian(lambda r: jnp.sin(r).prod()))(x).sum(-1),
    "jacfwd": lambda x: x + jax.vmap(jax.jacfwd(lambda r: jnp.sin(r).sum()))(x),
    "jit": jax.jit(lambda x: jax.jit(lambda y: y * jnp.searchsorted(EDGES, y))(x) + 1),
    "jvp": lambda x: jax.jvp(jnp.tanh, (x,), (x,))[1],
    "ops.segment_sum": lambda x: x + jax.ops.segment_sum(x, jnp.arange(ROWS) % 2, 2)[0],
    "experimental.ode.odeint": lambda x: odeint(lambda y, t: -y, x, jnp.array([0.0, 1.0]))[-1],
}
MODULES = {
    "jax.numpy": NUMPY,
    "jax.lax": LAX,
    "jax.nn": NN,
    "jax.scipy": SCIPY,
    "jax.random": RANDOM,
    "jax": JAX,
}


def broadcasting(fn):
    """A layer whose result has the shape of its input, and which may add vectors to matrices."""

    def layer(x):
        with jax.numpy_rank_promotion("allow"):
            return jnp.broadcast_to(fn(x), x.shape)

    return layer


FUNCTIONS = {f"{module}.{name}": broadcasting(fn) for module, fns in MODULES.items() for name, fn in fns.items()}
