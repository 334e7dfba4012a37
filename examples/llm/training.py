"""What fine-tuning and pretraining share: loss, optimizer, loop.

Shapes: B rows, S tokens.
"""

import argparse
import contextlib
import logging
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jzero
import jzero.data
import jzero.hf
from decoder import Decoder
from expert_parallel import EXPERTS, check_parts, cut_by_expert
from experts import WAYS
from jzero.attention import KERNELS, Choice, choose, own_part

Batch = Mapping[str, jax.Array]

CONTEXT = "context"
"""The mesh axis along which devices have parts of rows."""

KEPT = ("lora_rank", "lora_alpha", "lora_modules", "seq", "seed")
"""Options on which the parameters of a run depend, or the order of its data."""

LOG = "FILE.csv, FILE.jsonl, wandb:PROJECT or mlflow:EXPERIMENT"
FILES = {".csv": jzero.Csv, ".jsonl": jzero.JsonLines}
TRACKERS = {"wandb": jzero.WandB, "mlflow": jzero.MLflow}


def start(*, cluster: bool = False) -> None:
    """Connects this process with the others, if there are any; alone and without accelerators it gets eight devices."""
    if cluster:
        jax.distributed.initialize()
    elif "JAX_PROCESS_ID" in os.environ:  # from ../multi_process/launch_local.py
        count, index = map(number_of, ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
        jax.distributed.initialize(num_processes=count, process_id=index, cluster_detection_method="deactivate")
    else:
        os.environ.setdefault("PJRT_NPROC", "32")  # threads for two steps at once; see ../cpu_devices.py
        jax.config.update("jax_num_cpu_devices", 8)  # has no effect on accelerators
    if jax.process_index() == 0:
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("jzero").setLevel(logging.INFO)  # says what takes long


def number_of(variable: str) -> int:
    """Returns the number in an environment variable."""
    try:
        return int(os.environ.get(variable, ""))
    except ValueError as error:
        raise SystemExit(
            f"The environment variable {variable} must be a number: got {os.environ.get(variable)!r}."
        ) from error


def say(text: Any) -> None:
    """Prints, in the first process."""
    if jax.process_index() == 0:
        print(text, flush=True)


def mesh_axes(args: argparse.Namespace) -> dict[str, int]:
    """Returns the axes of `jzero.make_mesh`: devices along `context` have parts of the same rows."""
    return {"data": -1} if args.context == 1 else {"data": -1, CONTEXT: args.context}


def make_mesh(model: Decoder, args: argparse.Namespace) -> jax.sharding.Mesh:
    """Returns the mesh of a run: over nodes, tokens go between devices with different experts, which are more."""
    if args.experts == 1:
        return jzero.make_mesh(**mesh_axes(args))
    check_parts(model.config, args.experts)
    return jzero.make_mesh(**{EXPERTS: args.experts}, **mesh_axes(args))


def set_apart(params: Any, mesh: jax.sharding.Mesh) -> Any:
    """Returns parameters, those of experts cut over the mesh's axis for them, if there is one."""
    return cut_by_expert(params, mesh) if EXPERTS in mesh.shape else params


def of_parts(
    model: Decoder, args: argparse.Namespace, mesh: jax.sharding.Mesh | None = None, *, packed: bool = False
) -> Decoder:
    """Returns the model as a device computes it: its part of the rows, its experts, some of the logits at a time."""
    parts = {"context": None if args.context == 1 else CONTEXT, "loss_chunks": args.loss_chunks}
    apart = mesh if mesh is not None and EXPERTS in mesh.shape else None
    return model.clone(**parts, mesh=apart, attention=attention_of(model, args, packed=packed).kernel)


def attention_of(model: Decoder, args: argparse.Namespace, *, packed: bool) -> Choice:
    """Returns which attention a run on these devices takes, and why."""
    config, pieces = model.config, 1 if args.context == 1 else 2 * args.context
    has = {
        "windows": any(window is not None for window in config.windows),
        "segments": packed,
        "soft cap": config.attn_softcap is not None,
        "sinks": config.sinks,
        "parts of rows": pieces > 1,
    }
    how = {"platform": jax.devices()[0].platform, "tokens": args.seq, "wide": args.precision == "fp32"}
    try:
        return choose(args.attention, [name for name, is_needed in has.items() if is_needed], pieces=pieces, **how)
    except ValueError as error:
        raise SystemExit(f"--attention {args.attention}: {error}") from error


def next_token_losses(model: Decoder, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns the loss and the weight of each token, [B, S], and the routers' logits, [L, B, S, E] or `None`.

    A device with parts of rows computes its part of the losses; the batch has whole rows.
    """
    whole = {name: batch[name][:, :-1] for name in ("tokens", "positions", "segments") if name in batch}  # [B, T]
    whole["targets"] = batch["tokens"][:, 1:]
    whole.setdefault("positions", jnp.broadcast_to(jnp.arange(whole["tokens"].shape[1])[None], whole["tokens"].shape))
    own = {name: own_part(x, model.context) for name, x in whole.items()}
    losses, kept = model.apply({"params": params}, **own, mutable=["router"])
    learned = own_part(batch["learned"][:, 1:], model.context) if "learned" in batch else jnp.ones_like(losses)
    router = kept["router"]["layers"]["logits"][0].astype(jnp.float32) if kept else None
    return losses, learned * batch["weights"][:, None], router


def next_token_loss(model: Decoder) -> Callable[[Any, Batch], jzero.Weighted]:
    """Returns the mean loss of the learned tokens, as a function of parameters and a batch.

    A batch has tokens [B, S + 1] and the weights [B] of its rows, and may have positions, segments and learned. Each
    device computes the losses of its part of the rows, which are weighed over all of them.
    """

    def loss_fn(params: Any, batch: Batch) -> jzero.Weighted:
        losses, weights, _ = next_token_losses(model, params, batch)
        return jzero.Weighted((losses * weights).sum(), weights.sum())

    return loss_fn


def make_evaluate(model: Decoder) -> Callable[[Any, jzero.data.Loader], float]:
    """Returns a function from a state and held-out data to the mean loss of all its learned tokens."""
    loss_fn = next_token_loss(model)

    def sums(params: Any, batch: Batch) -> jzero.Summed:
        loss = loss_fn(params, batch)
        return jzero.Summed((loss.sum, loss.weight))

    eval_step = jzero.make_eval_step(sums)

    def evaluate(state: Any, loader: jzero.data.Loader) -> float:
        losses, weights = zip(*jax.device_get([eval_step(state, batch) for batch in loader]), strict=True)
        return float(sum(losses) / sum(weights))

    return evaluate


def make_optimizer(lr: float, num_steps: int) -> optax.GradientTransformation:
    """Returns AdamW with a warm-up over the first 3 % of the steps and a cosine decay to a tenth."""
    warmup = max(1, round(0.03 * num_steps))
    schedule = optax.warmup_cosine_decay_schedule(lr / warmup, lr, warmup, max(num_steps, warmup + 1), lr / 10)
    return optax.adamw(schedule, b2=0.95, weight_decay=0.01)


def zero_config(args: argparse.Namespace, *, quantize: str = "none") -> jzero.ZeroConfig:
    """Returns what is partitioned, and how; `quantize` says how to store what is not trained."""
    wide = {".*/scale": jzero.LeafRule(compute_dtype="float32")}  # of norms: small, and worth all digits
    quantization = jzero.Quantization(frozen=quantize)
    return jzero.ZeroConfig(
        stage=3,
        context_axis=None if args.context == 1 else CONTEXT,
        precision=args.precision,
        persistence_threshold=args.persistence_threshold,
        quantization=quantization,
        rules={} if args.precision == "fp32" else wide,
    )


def train(  # noqa: PLR0913  # what a loop has
    state: Any,
    step: Callable[[Any, Batch], Any],
    loader: jzero.data.Loader,
    args: argparse.Namespace,
    *,
    begin: Callable[[Any], Any],
    look: Callable[[Any], Mapping[str, float]],
    sinks: Sequence[Callable[..., Any]] = (),
) -> Any:
    """Returns the state after `args.steps` steps; resumes from the newest checkpoint if there is one.

    Args:
      state: A state of the right layout, whose values do not matter.
      step: The training step.
      loader: The data.
      args: The options of `add_options`.
      begin: Gives the state its first values.
      look: Called every `args.eval_every` steps; returns numbers to log.
      sinks: Sinks besides those of the options.
    """
    batches = iter(loader)
    with contextlib.ExitStack() as stack:
        manager, saved = None, {"step": 0}
        if args.checkpoints is not None:
            manager = jzero.CheckpointManager(args.checkpoints, max_to_keep=2, save_interval_steps=args.save_every)
            stack.enter_context(manager)
        if manager is not None and manager.latest_step() is not None:
            check_kept(manager.restore_extra().get("kept", {}), args)
            state = manager.restore(state, data_iterator=batches, donate=True)
            saved = manager.restore_extra()
            say(f"resuming from step {saved['step']}")
        else:
            state = begin(state)
        tracker = make_tracker(args, saved.get("run"))
        options = jax.tree.map(lambda x: str(x) if isinstance(x, pathlib.Path) else x, vars(args))
        monitor = jzero.Monitor(
            args.steps,
            sinks=[*([] if tracker is None else [tracker]), *sinks],
            tokens_per_step=args.batch * args.seq,
            start_step=saved["step"],
            show=("loss", "held_out"),
            config={"options": options, "plan": jzero.plan_of(state)},
        )
        stack.enter_context(monitor)
        for number in range(saved["step"] + 1, args.steps + 1):
            state, metrics = step(state, next(batches))
            monitor.log(metrics)
            if manager is not None:
                extra = {"step": number, "run": getattr(tracker, "run_id", None) or "", "kept": kept_options(args)}
                manager.save(state, step=number, data_iterator=batches, extra=extra, force=number == args.steps)
            if number % args.eval_every == 0 or number == args.steps:
                with monitor.pause():
                    monitor.write(look(state))
    return state


def kept_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the options that a run cannot change where it resumes."""
    return {name: x for name, x in vars(args).items() if name in KEPT}


def check_kept(saved: Mapping[str, Any], args: argparse.Namespace) -> None:
    """Ends the program if an option is not that of the run that it would resume."""
    for name, now in kept_options(args).items():
        if (was := saved.get(name, now)) != now:
            flag = f"--{name.replace('_', '-')}"
            raise SystemExit(
                f"{flag} {now}: the run in --checkpoints {args.checkpoints} has {flag} {was}. Pass that, or name a new "
                "folder."
            )


def make_tracker(args: argparse.Namespace, run_id: str | None) -> Any:
    """Returns the sink of `--log`, which continues the run of `run_id`, if given; `None` without `--log`."""
    if args.log is None:
        return None
    kind, _, name = args.log.partition(":")
    return TRACKERS[kind](name, run_id=run_id or None) if name else FILES[pathlib.Path(kind).suffix](kind)


def model_folder(text: str) -> pathlib.Path:
    """Checks a value of `--model` or `--config`, before anything takes a folder that is not there for a name."""
    try:
        jzero.hf.read_config(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return pathlib.Path(text)


def data_file(text: str) -> pathlib.Path:
    """Checks a file of data, before a model is loaded."""
    if not (path := pathlib.Path(text)).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return path


class Help(argparse.HelpFormatter):
    """Says the defaults of options."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        said = action.default in (None, False, argparse.SUPPRESS) or "default" in (action.help or "")
        return action.help if said else f"{action.help or ''} (default: %(default)s)".strip()


def log_target(text: str) -> str:
    """Checks a value of `--log`."""
    kind, _, name = text.partition(":")
    if kind not in TRACKERS if name else pathlib.Path(kind).suffix not in FILES:
        raise argparse.ArgumentTypeError(f"must be {LOG}: got {text!r}")
    return text


def add_options(parser: argparse.ArgumentParser, *, lr: float) -> None:
    """Adds the options of a run."""
    parser.add_argument("--seq", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step, over all devices")
    parser.add_argument("--context", type=int, default=1, help="devices that share each row")
    parser.add_argument("--experts", type=int, default=1, help="devices that share the experts of a mixture")
    parser.add_argument(
        "--attention",
        choices=["auto", "plain", "fused", *KERNELS],
        default="auto",
        help="a kernel that the model and the devices allow, plain products, or one by name",
    )
    parser.add_argument("--loss-chunks", type=int, default=1, help="parts of a row whose logits exist one at a time")
    parser.add_argument("--steps", type=int, help="one epoch by default")
    parser.add_argument("--lr", type=float, default=lr, help="the highest learning rate")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16", help="of products")
    parser.add_argument("--persistence-threshold", type=int, default=100_000, help="elements kept whole")
    parser.add_argument("--accumulate-steps", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--products", choices=[*WAYS], default="blocks", help="of experts; ragged on TPUs")
    parser.add_argument("--offload-activations", action="store_true", help="what goes between layers, to the host")
    parser.add_argument("--checkpoints", type=pathlib.Path, help="folder to save to, and to go on from")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--eval-every", type=int, default=50, help="steps between evaluations")
    parser.add_argument("--log", type=log_target, help=LOG)
    parser.add_argument("--seed", type=int, default=0, help="of the order of data, and of new parameters")
    parser.add_argument(
        "--cluster", action="store_true", help="one of many processes, which SLURM or Kubernetes started"
    )
