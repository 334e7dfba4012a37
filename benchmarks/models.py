"""The models of the benchmarks by name; the files named `..._models.py` have them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks import family_models, held_out_models, later_family_models, more_family_models, table_models
from benchmarks.family_models import Family

FAMILIES: dict[str, Callable[[], Family]] = {
    "gpt_scanned": functools.partial(family_models.gpt, scanned=True),
    "gpt_unrolled": functools.partial(family_models.gpt, scanned=False),
    "llama_1b": functools.partial(family_models.llama, family_models.LLAMA_1B, scanned=True, remat=True),
    "llama_125m": functools.partial(family_models.llama, family_models.LLAMA_125M, scanned=False, remat=False),
    "llama_125m_remat": functools.partial(family_models.llama, family_models.LLAMA_125M, scanned=False, remat=True),
    "t5": family_models.t5,
    "moe": family_models.moe,
    "mamba": family_models.mamba,
    "vit_l": family_models.vit,
    "unet": more_family_models.unet,
    "gnn": more_family_models.gnn,
    "dit": more_family_models.dit,
    "hybrid": more_family_models.hybrid,
    "perceiver": more_family_models.perceiver,
    "llama_128k": functools.partial(family_models.llama, family_models.LLAMA_128K, scanned=False, remat=False),
    "llama_8b": functools.partial(family_models.llama, family_models.LLAMA_8B, scanned=True, remat=True),
    "rssm": held_out_models.rssm,
    "mamba_2": held_out_models.mamba_2,
    "conformer": held_out_models.conformer,
    "mixture_of_depths": held_out_models.mixture_of_depths,
    "unet_attention": held_out_models.unet_attention,
    "clip": held_out_models.clip,
    "dlrm": table_models.small_dlrm,
    "dlrm_large": table_models.large_dlrm,
    "two_tower": table_models.two_tower,
    "rwkv_6": table_models.rwkv_6,
    "gpt_128k": functools.partial(family_models.gpt, vocab=128256, scanned=True, tied=False),
    "gpt_128k_tied": functools.partial(family_models.gpt, vocab=128256, scanned=True),
    "mmdit": later_family_models.mmdit,
    "xlstm": later_family_models.xlstm,
    "nerf": later_family_models.nerf,
    "deepseek": later_family_models.deepseek,
    "llama_in_pieces": functools.partial(later_family_models.llama_in_pieces, family_models.LLAMA_128K),
    "convnext": later_family_models.convnext,
}
UNTIED = functools.partial(family_models.gpt, tied=False, remat=True)


def mlp(*, width: int = 1024, layers: int = 4) -> Family:
    """Returns a perceptron that regresses."""
    shapes = {"layers": [{"w": (width, width), "b": (width,)} for _ in range(layers)]}
    block = lambda x, p: jax.nn.relu(x @ p["w"] + p["b"])
    loss = lambda params, batch, constrain: jnp.square(
        family_models.run(block, batch, params["layers"], constrain).astype(jnp.float32)
    ).mean()
    return Family(shapes, loss, lambda rows: jax.ShapeDtypeStruct((rows, width), jnp.bfloat16))


MORE: dict[str, Callable[[], Family]] = {
    "gpt_350m": functools.partial(UNTIED, layers=24, width=1024, scanned=False),
    "gpt_1_4b": functools.partial(UNTIED, layers=24, width=2048, scanned=True),
    "gpt_1_4b_unrolled": functools.partial(UNTIED, layers=24, width=2048, scanned=False),
    "gpt_7b": functools.partial(UNTIED, layers=32, width=4096, head=128, scanned=True),
    "gpt_24_layers": functools.partial(family_models.gpt, layers=24, scanned=False),
    "gpt_48_layers": functools.partial(family_models.gpt, layers=48, scanned=False),
    "gpt_2_layers": functools.partial(family_models.gpt, layers=2, scanned=False),
    "mlp": mlp,
}
"""Used if they are named: GPTs that recompute each block, without a tied embedding, and what is quick to compile."""
MODELS = {**FAMILIES, **MORE}
