"""The model of a request: a user's own, or a decoder by the sizes of a published one."""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.cli.decoder import ADAPTERS, CONTEXT, make_loss, make_state
from jzero.cli.request import SIZES, PlanRequest
from jzero.cli.sizes import model_sizes
from jzero.cli.user_model import UserModel, load_model
from jzero.core.base.extras import import_extra
from jzero.core.base.text import few
from jzero.core.state.init import state_shapes
from jzero.weights.config import CONFIG, ModelConfig, read_sizes


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model and its workload.

    Attributes:
      model: State, loss and batch.
      title: The model in words.
      batch: The global batch in words.
      sizes: The sizes of a decoder; `None` for a user's model.
    """

    model: UserModel
    title: str
    batch: str
    sizes: ModelConfig | None = None


def load_source(request: PlanRequest) -> ModelSource:
    """Returns the model that is asked for.

    Raises:
      ValueError: None is, or several are, or an option is not for this kind of model; or as `load_model`,
        `read_sizes` and `model_sizes` do.
    """
    models = {"MODULE:FUNCTION": request.model, "--model": request.folder, "--params": request.params}
    if len(named := [name for name, value in models.items() if value is not None]) != 1:
        got = " and ".join(named) or "none"
        raise ValueError(f"Pass one model, as MODULE:FUNCTION, `--model FOLDER` or `--params 7B`: got {got}.")
    if request.model is not None:
        return _of_user(request, request.model)
    if request.folder is None:
        assert request.params is not None
        return _decoder(request, request.params, model_sizes(request.params, request.sizes))
    if request.sizes:
        _refuse(request.sizes, f"`config.json` in {request.folder} says the sizes", "`--params`")
    return _decoder(request, pathlib.Path(request.folder).resolve().name, read_sizes(_folder(request.folder)))


def _folder(name: str) -> str:
    """Returns the folder of a model; for the name of one on the Hub, where that can be reached, one with its sizes."""
    if pathlib.Path(name).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return name
    try:
        hub = import_extra("huggingface_hub", "`pip install huggingface_hub`")
        logging.getLogger("jzero").info("Asking the Hub for %s.", name)
        return str(pathlib.Path(hub.hf_hub_download(name, CONFIG, etag_timeout=5)).parent)
    except (ImportError, OSError, ValueError) as error:
        logging.getLogger("jzero").info("The Hub has not given it: %s", error)
        return name


def _of_user(request: PlanRequest, name: str) -> ModelSource:
    unsupported = {"batch": request.batch, "seq": request.seq, "lora_rank": request.lora_rank or None, **request.sizes}
    unsupported |= {x: n for x in ("context", "loss_chunks", "experts") if (n := getattr(request, x)) > 1}
    if refused := [x for x, value in unsupported.items() if value is not None]:
        _refuse(refused, f"{name} returns its own state and batch", "`--model` and `--params`")
    if os.getcwd() not in sys.path:  # unlike `python -m`, scripts do not search it
        sys.path.insert(0, os.getcwd())
    logging.getLogger("jzero").info("Calling %s.", name)
    model = load_model(name)
    arrays = [f"{x.dtype}[{','.join(map(str, np.shape(x)))}]" for x in jax.tree.leaves(model.batch)]
    return ModelSource(model, name, few(arrays, 3))


def _refuse(names: Any, why: str, those: str) -> None:
    options = ", ".join(f"`{SIZES[x].option if x in SIZES else '--' + x.replace('_', '-')}`" for x in names)
    raise ValueError(f"This model does not take {options}: {why}. They are for {those}.")


def _decoder(request: PlanRequest, name: str, sizes: ModelConfig) -> ModelSource:
    batch, seq = request.sequences()
    rank = request.lora_rank
    if request.quantize != "none" and not rank:
        raise ValueError(
            f"`--quantize {request.quantize}` is for parameters that are not trained, and all are: pass `--lora-rank`, "
            "too."
        )
    if request.experts > 1 and (sizes.experts is None or sizes.experts.count % request.experts):
        count = 0 if sizes.experts is None else sizes.experts.count
        raise ValueError(f"`--experts {request.experts}` must divide the experts of the model: it has {count}.")
    mesh = request.mesh if request.experts > 1 else None
    # What is not trained keeps the dtype that it has, which is what the loss computes in if it was published so.
    base_dtype = request.config.policy.compute_dtype if rank else None
    state = state_shapes(make_state(sizes, rank=rank, base_dtype=base_dtype or "float32", mesh=mesh), mesh)
    tokens = jax.ShapeDtypeStruct((batch, seq + 1), jnp.int32)
    context = CONTEXT if request.context > 1 else None
    loss_fn = make_loss(sizes, context=context, loss_chunks=request.loss_chunks, mesh=mesh)
    model = UserModel(state, loss_fn, tokens, ADAPTERS if rank else None)
    return ModelSource(model, f"{name}: {_words(sizes)}", f"{batch} x {seq}", sizes)


def _words(sizes: ModelConfig) -> str:
    heads = f"{sizes.num_heads} heads"
    heads += f" ({sizes.num_kv_heads} of keys and values)" if sizes.num_kv_heads != sizes.num_heads else ""
    mixture = "" if sizes.experts is None else f"{sizes.experts.per_token} of {sizes.experts.count} experts, "
    return (
        f"{sizes.num_layers} layers, d_model {sizes.d_model}, {heads}, d_hidden {sizes.d_hidden}, "
        f"{mixture}vocabulary {sizes.vocab_size}"
    )
