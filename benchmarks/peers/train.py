"""Trains the decoder by DeepSpeed or FSDP2 on CPUs, as one of four processes; `benchmarks.torch_peers` starts it.

Needs torch and deepspeed, not jax: `pip install torch numpy`, then `DS_ACCELERATOR=cpu DS_BUILD_OPS=0 pip install
deepspeed`. The first process prints its step times and the losses as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from typing import Any

import torch
import torch.distributed as td
import torch.nn.functional as F  # noqa: N812  # as all torch programs do
from torch import nn

from benchmarks import peers
from benchmarks.peers import ADAMW, CLIP, HEADS, LEARNING_RATE, WIDTH

NAMES = {"g": "weight", "b": "bias", "attn.wqkv": "qkv.weight", "attn.wo": "proj.weight", "attn.bo": "proj.bias",
         "mlp.w1": "fc1.weight", "mlp.b1": "fc1.bias", "mlp.w2": "fc2.weight", "mlp.b2": "fc2.bias"}  # fmt: skip


class Block(nn.Module):
    """A pre-norm decoder block."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, peers.HIDDEN), nn.Linear(peers.HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, S, D]
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (y.view(heads).transpose(1, 2) for y in self.qkv(self.ln1(x)).split(WIDTH, dim=-1))
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(heads[-1])
        keep = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        mixed = torch.softmax(scores.float().masked_fill(~keep, float("-inf")), dim=-1).to(v.dtype) @ v
        x = x + self.proj(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x)), approximate="tanh"))


class Decoder(nn.Module):
    """Tokens [B, S + 1] to the mean cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(peers.VOCAB, WIDTH), nn.Embedding(peers.LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(peers.LAYERS))
        self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, peers.VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens[:, :-1]) + self.wpe(torch.arange(tokens.shape[1] - 1))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.ln_f(x)).float().flatten(0, 1), tokens[:, 1:].flatten())


def make_model() -> Decoder:
    """Returns the decoder with the weights of `peers`; a linear layer of torch has its matrix transposed."""
    model, state = Decoder(), {}
    for name, x in peers.weights().items():
        block, leaf = re.findall(r"^(blocks\.\d+\.)?(.*)", name)[0]
        module, _, last = leaf.partition(".")
        found = NAMES.get(leaf) or f"{module}.{NAMES.get(last, 'weight')}"
        matrix = x.ndim == 2 and module not in ("wte", "wpe")
        state[block + found] = torch.from_numpy(x.T.copy() if matrix else x)
    model.load_state_dict(state)
    return model


def deepspeed_step(model: Any, optimizer: Any, options: argparse.Namespace) -> Any:
    """Returns what trains one batch by DeepSpeed and returns the loss."""
    import deepspeed

    # Training does not use the shared-memory operation, which takes minutes to compile and leaves files in /dev/shm.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    bucket = 200_000
    zero = {"stage": options.stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if options.stage == 3:
        names = ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")
        zero |= {f"stage3_{name}": bucket for name in names} | {"stage3_param_persistence_threshold": 0}
    config = {
        "train_batch_size": peers.ROWS,
        "gradient_clipping": CLIP,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": options.dtype == "bf16"},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(rows: torch.Tensor) -> torch.Tensor:
        loss = engine(rows)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def make_step(options: argparse.Namespace) -> Any:
    """Returns what trains one batch and returns the loss."""
    model = make_model()
    adamw = lambda: torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False, **ADAMW)
    if options.engine == "deepspeed":
        return deepspeed_step(model, adamw(), options)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    td.init_process_group("gloo")
    mesh, narrow = init_device_mesh("cpu", (peers.PROCESSES,)), options.dtype == "bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if narrow else MixedPrecisionPolicy()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = adamw()

    def step(rows: torch.Tensor) -> torch.Tensor:
        loss = model(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def main() -> None:
    """Trains, and prints what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=["deepspeed", "fsdp2"], required=True)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    step, times, losses = make_step(options), [], []
    for batch in torch.from_numpy(peers.tokens(options.steps)):
        td.barrier()
        started = time.perf_counter()
        loss = step(batch[peers.own_rows(td.get_rank())]).detach().double()
        value = loss.item()
        times.append(time.perf_counter() - started)
        total = torch.tensor([value / peers.PROCESSES], dtype=torch.float64)
        td.all_reduce(total)
        losses.append(total.item())
    if td.get_rank() == 0:
        print(json.dumps({"times": times, "losses": losses, "torch": torch.__version__}), flush=True)
    td.barrier()
    td.destroy_process_group()


if __name__ == "__main__":
    main()
