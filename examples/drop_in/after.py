"""Classifies scikit-learn's digits with an ordinary Flax training loop.

`diff before.py after.py` shows all the changes for training with ZeRO on every device.
"""

import argparse
import os

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import jzero

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch-size", type=int, default=64)
args = parser.parse_args()
# Without an accelerator: eight virtual devices, and enough threads for two steps at once.
jax.config.update("jax_num_cpu_devices", 8)
os.environ.setdefault("PJRT_NPROC", "32")

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)  # [1797, 64]
model = nn.Sequential([nn.Dense(args.width), nn.relu, nn.Dense(args.width), nn.relu, nn.Dense(10)])
params = model.init(jax.random.key(0), images[:1])["params"]
state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))
state = jzero.shard_train_state(state, stage=3)
print(jzero.plan_of(state))


def loss_fn(params, batch):
    logits = model.apply({"params": params}, batch["images"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


@jax.jit(donate_argnums=0)
def train_step(state, batch):
    loss, grads = jzero.value_and_grad(loss_fn)(state, batch)
    return state.apply_gradients(grads=grads), loss


rng = np.random.default_rng(0)
for step in range(1, args.steps + 1):
    rows = rng.choice(len(images), args.batch_size, replace=False)
    state, loss = train_step(state, {"images": images[rows], "labels": labels[rows]})
    if step % 10 == 0:
        print(f"step {step}: loss {loss:.6f}")
