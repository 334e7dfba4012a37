"""Writes adapters as a folder for PEFT."""

from __future__ import annotations

import itertools
import json
import math

import jax
import numpy as np
from etils import epath

from jzero.checkpoint.contents import absolute
from jzero.checkpoint.damage import CheckpointError
from jzero.core.base.types import State
from jzero.core.config.settings import check, integer, number
from jzero.core.processes.exchange import succeed_together
from jzero.core.state.adapter import plan_of
from jzero.weights.config import ADAPTER_CONFIG
from jzero.weights.draft import Form, shapes_there
from jzero.weights.exporting import export_form
from jzero.weights.families import ADAPTERS, WEIGHT, peft_mapping, resolve_mapping
from jzero.weights.mapping import Mapping
from jzero.weights.safetensors_files import ExportReport

ADAPTER_FILE = "adapter_model.safetensors"
ONE_FILE = 2**63


def export_peft(
    state: State,
    path: epath.PathLike,
    *,
    like: epath.PathLike,
    rank: int,
    alpha: float,
    mapping: Mapping | str = "auto",
) -> ExportReport:
    """Writes adapters as a folder that PEFT loads over the published model: no weights of the model itself.

    Adapters are parameters `lora_a` and `lora_b` beside a `kernel`, as for `jzero.lora.merged`.

    Args:
      state: A sharded train state.
      path: A new folder.
      like: The folder of the published model, which the adapters are compared with before anything is written.
      rank: The rank of the adapters: the columns of `lora_a`.
      alpha: That of the model's adapters.
      mapping: Of the kernels, as for `export_params`.

    Returns:
      The file with the adapters.

    Raises:
      ValueError: There are no adapters, they have another rank, or are not of that model; or the folder holds files.
      TypeError: The state was not sharded by jzero.
      CheckpointError: The files could not be written.

    Example:
      >>> import json
      >>> import jzero.hf
      >>> sizes = dict(vocab_size=61, hidden_size=36, intermediate_size=56, num_hidden_layers=3, num_attention_heads=6)
      >>> _ = (tmp / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
      >>> adapters = {"kernel": jnp.ones((3, 36, 36)), "lora_a": jnp.ones((3, 36, 2)), "lora_b": jnp.ones((3, 2, 36))}
      >>> lora = jzero.TrainState.create(params={"layers": {"q": adapters}}, tx=optax.adam(1e-3))
      >>> lora = jzero.shard_train_state(lora, stage=3)
      >>> jzero.hf.export_peft(lora, f"{tmp}/adapter", like=tmp, rank=2, alpha=4).num_tensors
      6
    """
    rank, alpha = check("rank", rank, integer(1)), check("alpha", alpha, number("a number", math.isfinite))
    params = {leaf.path: leaf.param.shape for leaf in plan_of(state).leaves}
    leaves = {path: shape for path, shape in params.items() if path.rpartition("/")[2] in ADAPTERS}
    if not leaves:
        raise ValueError("There are no adapters to export: no parameter is called `lora_a` or `lora_b`.")
    ranks = {shape[-1 if path.endswith("a") else -2] for path, shape in leaves.items()}
    if ranks != {rank}:
        raise ValueError(f"`rank` must be that of the adapters, {', '.join(map(str, sorted(ranks)))}: got {rank}.")
    kernels = resolve_mapping(mapping, like)
    assert kernels is not None
    ours = peft_mapping(like, kernels, rank=rank)
    modules, of_experts = succeed_together(lambda: _modules(kernels, leaves, like))
    shapes = {
        source.at((i,)): (shape[1] * rank, shape[2]) if path.endswith("a") else (shape[3], shape[1] * rank)
        for path, shape in leaves.items()
        for i, source in itertools.product(range(shape[0]), ours.of(path))
        if source.shape is not None  # of experts, so that no shape of a tensor follows from it
    }
    folder = absolute(path)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"An export never replaces files, and {folder} holds some: name a new folder.")
    file = folder / ADAPTER_FILE
    report = export_form(state, file, Form(mapping=ours, paths=r".*/lora_[ab]", shapes=shapes), ONE_FILE)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(like),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": modules,
        **({"target_parameters": of_experts} if of_experts else {}),
    }
    succeed_together(lambda: _write_config(folder, config) if jax.process_index() == 0 else None)
    return report


def _write_config(folder: epath.Path, config: dict[str, object]) -> None:
    """Writes the configuration that PEFT needs; if that fails, removes the adapters, too."""
    try:
        (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    except OSError as error:
        (folder / ADAPTER_FILE).unlink(missing_ok=True)
        raise CheckpointError(f"The adapters could not be written to {folder} ({error}).") from error


def _modules(kernels: Mapping, leaves: dict[str, tuple[int, ...]], like: epath.PathLike) -> tuple[list[str], list[str]]:
    """Returns the modules with adapters as PEFT names them, and kernels that are no modules, of experts.

    Raises:
      ValueError: The adapters are not those of the model.
    """
    there = shapes_there(like) or {}
    modules: set[str] = set()
    of_experts: set[str] = set()
    for path, shape in leaves.items():
        home, _, last = path.rpartition("/")
        for source in kernels.of(f"{home}/kernel"):
            names = [source.at(index) for index in np.ndindex(shape[: source.num_stacked])]
            is_module = source.name.endswith(WEIGHT)
            if is_module:
                modules.update(name.removesuffix(WEIGHT) for name in names)
            else:
                of_experts.add(".".join(source.name.split(".")[-3:]))
            size, dim = (shape[-2], 1) if last == "lora_a" else (shape[-1], 0 if is_module else 2)
            bad = [name for name in names if name not in there or there[name][dim] != size]
            if there and bad:
                raise ValueError(
                    f"{path}, of shape {list(shape)}, is no adapter of {bad[0]} in {like}, "
                    f"{list(there.get(bad[0], []))}: pass the model's own folder as `like`."
                )
    if len(of_experts) == 1:
        raise ValueError(
            f"Of experts only {of_experts.pop()} has adapters, and PEFT's names for one kernel depend on the other: "
            "adapt both, or merge the adapters, `decode=jzero.lora.merged(...)`."
        )
    short = {name.rpartition(".")[2] for name in modules}
    others = {name.removesuffix(WEIGHT) for name in there} - modules
    in_full = any(name.rpartition(".")[2] in short for name in others)
    return sorted(modules if in_full else short), sorted(of_experts)
