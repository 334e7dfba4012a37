"""Writes `deepspeed_golden.json`: the keys of DeepSpeed 0.19.8, and what it makes of schedules, optimizers and sizes.

The types and parameters of the schedules are those that the file has already.

Run with Python 3.11 and `pip install torch==2.13.0 numpy ninja && pip install deepspeed==0.19.8`:

    DS_ACCELERATOR=cpu python tests/data/make_deepspeed_golden.py
"""

import itertools
import json
import pathlib
import sys

import deepspeed.runtime.config as ds_config
import deepspeed.runtime.lr_schedules as ds_schedules
import numpy as np
import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

OUTPUT = pathlib.Path(__file__).with_name("deepspeed_golden.json")
STEPS = [*range(40), *range(40, 400, 5)]
LR = 2e-4  # of the optimizer, which WarmupLR and WarmupCosineLR may refer to

OPTIMIZERS = [  # (type, params) of the optimizer block; the class that the engine picks for it under CPU offload
    ("AdamW", {"lr": 1e-2, "betas": [0.8, 0.97], "eps": 1e-6, "weight_decay": 0.1}, DeepSpeedCPUAdam, True),
    ("Adam", {"lr": 1e-2, "weight_decay": 0.1}, DeepSpeedCPUAdam, True),
    ("Adam", {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False}, DeepSpeedCPUAdam, False),
    ("Adam", {"lr": 1e-2, "bias_correction": False}, DeepSpeedCPUAdam, True),
    ("AdamW", {"lr": 1e-2, "torch_adam": True}, torch.optim.AdamW, None),
    ("Adam", {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True, "adam_w_mode": False}, torch.optim.Adam, None),
    ("Lion", {"lr": 1e-3, "weight_decay": 0.1}, DeepSpeedCPULion, None),
    ("Adagrad", {"lr": 1e-2, "weight_decay": 0.01}, DeepSpeedCPUAdagrad, None),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}, torch.optim.SGD, None),
]
OPTIMIZER_STEPS = 12


def schedule(name, params):
    """The lr, and beta1 where it cycles, that the optimizer has in each of its steps."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = getattr(ds_schedules, name)(optimizer, **params)
    rates, betas = [], []
    for _ in range(max(STEPS) + 1):
        group = optimizer.param_groups[0]
        rates.append(float(group["lr"]))
        betas.append([float(x) for x in group["betas"]])
        optimizer.step()
        scheduler.step()  # as the engine does, after each step that is applied
    out = {"type": name, "params": params, "lr": [rates[i] for i in STEPS]}
    if len({tuple(x) for x in betas}) > 1:
        out["betas"] = [betas[i] for i in STEPS]
    return out


def inputs():
    rng = np.random.default_rng(0)
    return rng.normal(size=24).astype(np.float32), rng.normal(size=(OPTIMIZER_STEPS, 24)).astype(np.float32)


def optimizer(name, params, cls, adamw_mode):
    start, grads = inputs()
    weight = torch.nn.Parameter(torch.tensor(start))
    kwargs = {k: v for k, v in params.items() if k not in ("adam_w_mode", "torch_adam")}
    if adamw_mode is not None:
        kwargs["adamw_mode"] = adamw_mode
    made = cls([weight], **kwargs)
    history = []
    for grad in grads:
        weight.grad = torch.tensor(grad)
        made.step()
        history.append(weight.detach().numpy().astype(float).tolist())
    return {"type": name, "params": params, "weights": history[-1], "weights_after_2": history[1]}


def batch(sizes, num_devices):
    """DeepSpeed's three sizes for what is given, or the message of its refusal."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {name: size for name, size in zip(names, sizes, strict=True) if size is not None}
    ds_config.dist.get_rank = lambda: 0
    ds_config.dist.get_world_size = lambda: num_devices
    try:
        made = ds_config.DeepSpeedConfig(given)
    except (AssertionError, ValueError) as error:
        return [*sizes, num_devices, str(error)]
    return [*sizes, num_devices, [getattr(made, name) for name in names]]


def keys(prefix, cls):
    """Every name that one of DeepSpeed's strict blocks takes, with its default."""
    for name, field in cls.model_fields.items():
        default = field.get_default(call_default_factory=True)
        default = getattr(default, "value", default)
        for alias in {name, field.alias or name}:
            yield f"{prefix}.{alias}", default if isinstance(default, bool | int | float | str | None) else str(default)


STRICT = {
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
}


if __name__ == "__main__":
    start, grads = inputs()
    grid = itertools.product((None, 1, 6, 8, 24), (None, 1, 3, 4), (None, 1, 2, 3), (1, 2, 4))
    golden = {
        "steps": STEPS,
        "optimizer_lr": LR,
        "schedules": [schedule(row["type"], row["params"]) for row in json.loads(OUTPUT.read_text())["schedules"]],
        "keys": dict(sorted(pair for prefix, cls in STRICT.items() for pair in keys(prefix, cls))),
        "start": start.astype(float).tolist(),
        "grads": grads.astype(float).tolist(),
        "optimizers": [optimizer(*row) for row in OPTIMIZERS],
        "batches": [batch(sizes, n) for *sizes, n in grid],
    }
    OUTPUT.write_text(json.dumps(golden, indent=None, separators=(",", ":")) + "\n")
    sys.stdout.write(f"{OUTPUT}: {OUTPUT.stat().st_size} bytes\n")
