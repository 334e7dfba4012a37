"""Frozen configuration of a ZeRO run, validated on construction."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from jzero.config.precision import DTYPE, STATE_DTYPE, DtypeName, Precision, resolve_precision
from jzero.config.settings import FLAG, Setting, check_fields, number, one_of, optional, whole

if TYPE_CHECKING:
    from jzero.deepspeed.report import DeepSpeedReport

__all__ = ["LeafRule", "Offload", "ZeroConfig", "may_prefetch"]

STAGES = (0, 1, 2, 3)


def _num_bytes(least: int) -> Setting:
    return whole(least, says=f"a number of bytes, an integer >= {least}")


def _axis_name(value: Any, but: str = "") -> str:
    if not isinstance(value, str) or value in ("", but):
        raise ValueError
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offload:
    """What of a train state lives in the memory of the host, and how it travels.

    With `optimizer="host"` master copies and the optimizer state of a parameter's shape (moments) are kept in pinned
    memory of each device's host, cut as before. The update goes through them in chunks: to the device, update, back to
    the host. At stage 3 of a 16-bit precision the devices then hold 16-bit parameters, and masters are on the host.

    With `params="host"`, at stage 3, the shards of parameters are there too. Each is brought to its device where it is
    about to be gathered, in the body of the loop for scanned layers, and again for the backward pass; the update writes
    it back. Gradients go to the host as they are reduced, if all optimizer state is there and there are no
    micro-batches to sum. Such a state is trained by `make_train_step` alone.

    With `compute="host"` the update runs where its state is, on the host's CPU: gradients and parameters go down, and
    new parameters come back (of fp32 parameters, what is added to them). That is for slow links and for optimizers that
    treat each element alone (sums over a leaf, such as LAMB's norms, are fine); any other is refused when a step is
    traced. It saves traffic (for AdamW and 16-bit parameters 6 bytes per parameter in place of 24) and costs the time
    of a CPU.

    With `delay=1` a train step applies the gradients of the step before, so that the update on the host does not wait
    for the step's own gradients and can run beside them, where the compiler schedules it so: jax 0.12's does for GPUs
    with `make_train_step(compiler_options={"xla_gpu_enable_latency_hiding_scheduler": True})`, and for TPUs does not.
    These are other numbers than training without: each gradient is taken at parameters that lack the update before.
    See `apply_pending`.

    Attributes:
      optimizer: "host" or "none".
      params: "host" or "none". Vectors stay on the device, and so does what stage 3 keeps whole.
      ratio: Share of the trained parameters, in elements, whose optimizer state goes to the host, the largest leaves
        first; at least so much goes, as far as rules let it (DeepSpeed's `ratio`). `LeafRule(offload=...)` decides for
        single leaves.
      chunk_bytes: The most, in bytes of masters and optimizer state, that travels as one piece; the largest leaves are
        split. Each device holds up to about four pieces at a time.
      device_budget_bytes: What parameters and optimizer state may take of one device between steps, in bytes; the
        largest leaves' optimizer state goes to the host until the rest fits. Takes the place of `ratio`.
      compute: "device" or "host": where the update of what is on the host is computed.
      delay: 0, or 1 to update with the gradients of the step before; needs `compute="host"`. They are kept in fp32,
        4 bytes per parameter over the devices that share it, in the memory where its optimizer state is. Saving a
        checkpoint applies them to a second copy of the state.

    Raises:
      ValueError: A field has an impossible value, or two contradict each other.

    Example:
      >>> config = jzero.ZeroConfig(stage=3, offload=jzero.Offload(optimizer="host"))
      >>> jzero.shard_train_state(plain_state, config=config).opt_state[0].mu["w"].sharding.memory_kind
      'pinned_host'

    References:
      Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training, 2021 (the delay in section 5.2).
      DeepSpeed's `offload_optimizer` and `DeepSpeedCPUAdam`.
    """

    optimizer: Literal["none", "host"] = "none"
    params: Literal["none", "host"] = "none"
    ratio: float = 1.0
    chunk_bytes: int = 16 * 2**20
    device_budget_bytes: int | None = None
    compute: Literal["device", "host"] = "device"
    delay: Literal[0, 1] = 0

    def __post_init__(self) -> None:
        allowed = {
            "optimizer": one_of("none", "host"),
            "params": one_of("none", "host"),
            "ratio": number("a number from 0 to 1", lambda x: 0 <= x <= 1),
            "chunk_bytes": _num_bytes(1),
            "device_budget_bytes": optional(_num_bytes(0)),
            "compute": one_of("device", "host"),
            "delay": one_of(0, 1, says="0 or 1"),
        }
        check_fields(self, allowed, prefix="Offload.")
        if self.optimizer == "none" and (self.ratio != 1 or self.device_budget_bytes is not None):
            raise ValueError(
                "`Offload.ratio` and `Offload.device_budget_bytes` say how much of the optimizer state goes to the "
                f"host, but `optimizer` is 'none': got {self.ratio!r} and {self.device_budget_bytes!r}."
            )
        if self.compute == "host" and self.optimizer == "none":
            raise ValueError(
                "`Offload.compute='host'` updates optimizer state where it is, but `optimizer` is 'none': set "
                "`optimizer='host'` too."
            )
        if self.delay and self.compute == "device":
            raise ValueError(
                "`Offload.delay=1` lets the host's CPU update beside the devices, but `compute` is 'device': set "
                "`compute='host'` too, or `delay=0`."
            )
        if self.ratio != 1 and self.device_budget_bytes is not None:
            raise ValueError(
                f"`Offload.ratio={self.ratio!r}` and `Offload.device_budget_bytes={self.device_budget_bytes}` "
                "both say how much goes to the host: set one of them."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafRule:
    """How the leaves under one path are laid out, where the default choice is not wanted.

    Attributes:
      dim: Dimension (of the natural shape) that the ZeRO axis cuts; padded if the axis size does
        not divide it. `None` lets the layout choose.
      persistent: `True` keeps the parameter whole at stage 3 whatever its size (its gradient and
        optimizer state are still cut); `False` cuts it however small. `None` lets
        `persistence_threshold` decide.
      replicated: `True` keeps parameter, gradient and optimizer state whole at every stage.
      scan_dim: The dimension that a `lax.scan` runs over, which is never cut; -1 says that there
        is none. `None` lets the layout infer it from the tree.
      compute_dtype: What the loss sees of the leaf, e.g. "float32" for a normalisation scale in a
        16-bit model. `None`: `Precision.compute_dtype`.
      state_dtype: What optimizer state of the leaf's shape is stored in: "bfloat16" (rounded
        stochastically) or "float32". `None`: `Precision.state_dtype`.
      offload: What `Offload` puts on the host: `True` puts the leaf's there, `False` keeps it on the device. `None`
        lets `Offload` decide. Numbers, and of parameters vectors and what stage 3 keeps whole, stay in any case.

    Raises:
      ValueError: A field is out of range, or two fields contradict each other.

    Example:
      >>> jzero.ZeroConfig(stage=3, rules={"embed/.*": jzero.LeafRule(dim=0)}).stage
      3
    """

    dim: int | None = None
    persistent: bool | None = None
    replicated: bool = False
    scan_dim: int | None = None
    compute_dtype: DtypeName | None = None
    state_dtype: Literal["bfloat16", "float32"] | None = None
    offload: bool | None = None

    def __post_init__(self) -> None:
        allowed = {
            "dim": optional(whole(0)),
            "persistent": one_of(None, True, False, says="None, True or False"),
            "replicated": FLAG,
            "scan_dim": optional(whole(-1)),
            "compute_dtype": DTYPE,
            "state_dtype": STATE_DTYPE,
            "offload": one_of(None, True, False, says="None, True or False"),
        }
        check_fields(self, allowed, prefix="LeafRule.")
        if self.replicated and (self.dim is not None or self.persistent is False):
            raise ValueError(
                "`LeafRule(replicated=True)` keeps the leaf whole, so `dim` and `persistent=False` contradict "
                f"it: got dim={self.dim!r}, persistent={self.persistent!r}. Drop one of them."
            )
        if self.dim is not None and self.dim == self.scan_dim:
            raise ValueError(
                f"`LeafRule.dim` and `LeafRule.scan_dim` are both {self.dim}: a scanned dimension cannot be cut, "
                "since the loop would gather the whole stack. Cut another dimension."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """What is partitioned over the data-parallel devices, and how.

    Attributes:
      stage: 0 (nothing), 1 (optimizer state), 2 (and gradients), 3 (and parameters).
      axis: Mesh axis that ZeRO cuts over.
      replica_axis: Mesh axis over which the shards are replicated (hybrid sharding). The batch is
        split over both axes.
      persistence_threshold: Parameters of up to this many elements stay whole at stage 3
        (DeepSpeed's `param_persistence_threshold`). Their gradients and optimizer state are cut.
      model_persistence_threshold: Cap, in elements, on the sum of parameters kept whole by
        `persistence_threshold`; the smallest are kept first. `None`: no cap.
      reshard_after_forward: Stage 3 frees gathered parameters after their use in the forward pass
        and gathers them again in the backward pass. `False` keeps them, as FSDP2 does with the same
        option: one gather less, whole parameters alive between the passes.
      prefetch_bytes: The most, in bytes of whole parameters as they travel, that stage 3 gathers before it is needed.
        Scans (layers) then gather for the next turn while they compute on this one, the parameters that a turn uses
        first before others, as many as fit (DeepSpeed's `prefetch_bucket_size`, in bytes), but at most a 32nd of what
        the scan gathers, since its last turn does so in vain (a warning says where nothing is left). `None`: on GPUs
        scans gather up to a third of a turn ahead; all else is left to the compiler. 0: nothing is gathered ahead.
      reduce_scatter: `False` reduces gradients with an all-reduce and slices the result
        (DeepSpeed's key of this name): the same numbers, twice the communication.
      all_gather_bucket_bytes: The most that the compiler combines into one gather, for this step's program alone. GPUs
        only, and not where a step is called inside of another `jax.jit`; `None` leaves it to the compiler.
      reduce_bucket_bytes: The most, in bytes of whole gradients as they are reduced, that the compiler combines in one
        reduce-scatter (DeepSpeed's `reduce_bucket_size`, in bytes), likewise. `None`: 16 MiB on GPUs, or 256 KiB for
        each device if that is more.
      precision: "fp32" (every leaf keeps the dtype that it has), "bf16" or "fp16" (16-bit parameters
        and gradients, fp32 masters; fp16 with a dynamic loss scale), or a `Precision`.
      offload: What is kept in the memory of the host, see `Offload`.
      rules: Layout of single leaves by regular expression over their whole path, such as
        `{"decoder/.*/bias": LeafRule(persistent=True)}`; the first that matches counts.

    Raises:
      ValueError: A field has an impossible value; the message names the field, the value and what
        is allowed.

    Example:
      >>> jzero.ZeroConfig(stage=3, persistence_threshold=0).axis
      'data'
    """

    stage: Literal[0, 1, 2, 3] = 3
    axis: str = "data"
    replica_axis: str | None = None
    persistence_threshold: int = 100_000
    model_persistence_threshold: int | None = None
    reshard_after_forward: bool = True
    prefetch_bytes: int | None = None
    reduce_scatter: bool = True
    all_gather_bucket_bytes: int | None = None
    reduce_bucket_bytes: int | None = None
    precision: Precision | Literal["fp32", "bf16", "fp16"] = "fp32"
    offload: Offload = dataclasses.field(default_factory=Offload)
    rules: Mapping[str, LeafRule] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        name = Setting("the name of a mesh axis", _axis_name)
        other = Setting(
            f"a mesh axis other than `axis` ({self.axis!r:.80})", functools.partial(_axis_name, but=self.axis)
        )
        elements = whole(0, says="a number of elements, an integer >= 0")
        allowed = {
            "stage": one_of(*STAGES),
            "axis": name,
            "replica_axis": optional(other),
            "persistence_threshold": elements,
            "model_persistence_threshold": optional(elements),
            "reshard_after_forward": FLAG,
            "prefetch_bytes": optional(_num_bytes(0)),
            "reduce_scatter": FLAG,
            "all_gather_bucket_bytes": optional(_num_bytes(1)),
            "reduce_bucket_bytes": optional(_num_bytes(1)),
        }
        check_fields(self, allowed)
        object.__setattr__(self, "precision", resolve_precision(self.precision))
        if not isinstance(self.offload, Offload):
            raise ValueError(f"`offload` must be a `jzero.Offload`: got {self.offload!r}.")
        if self.offload.params == "host" and self.stage != 3:
            raise ValueError(
                "`Offload(params='host')` needs stage 3, which gathers parameters layer by layer: got stage "
                f"{self.stage}."
            )
        if self.prefetch_bytes is not None and not may_prefetch(self):
            raise ValueError(
                f"`prefetch_bytes={self.prefetch_bytes}` needs `reshard_after_forward=True` and parameters on the "
                f"device: got reshard_after_forward={self.reshard_after_forward}, "
                f"Offload(params={self.offload.params!r}). Drop one of them."
            )
        self._check_rules()

    def _check_rules(self) -> None:
        if not isinstance(self.rules, Mapping):
            raise ValueError(f"`rules` must map path patterns to `LeafRule`s: got {type(self.rules).__name__}.")
        for pattern, rule in self.rules.items():
            if not isinstance(pattern, str) or not isinstance(rule, LeafRule):
                raise ValueError(f"`rules` must map strings to `LeafRule`s: got {pattern!r}: {rule!r}.")
            if rule.compute_dtype is not None and self.policy.compute_dtype is None:
                raise ValueError(
                    f"`rules` key {pattern!r} has compute_dtype={rule.compute_dtype!r}, but `precision` leaves every "
                    "parameter as it is: set `precision` too."
                )
            if rule.offload and self.offload.optimizer == self.offload.params == "none":
                raise ValueError(
                    f"`rules` key {pattern!r} has offload=True, but nothing is offloaded: set "
                    "`offload=jzero.Offload(optimizer='host')` too."
                )
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"`rules` key {pattern!r} is not a regular expression: {error}.") from error

    def __hash__(self) -> int:
        fields = [getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "rules"]
        return hash((*fields, tuple(self.rules.items())))

    @classmethod
    def from_deepspeed(
        cls,
        source: str | os.PathLike[str] | Mapping[str, Any],
        *,
        num_devices: int | None = None,
        batch_size: int | None = None,
        optimizer: Any = None,
        precision: Precision | Literal["fp32", "bf16", "fp16"] | None = None,
        auto: Mapping[str, Any] | None = None,
    ) -> tuple[ZeroConfig, DeepSpeedReport]:
        """Reads a configuration of DeepSpeed (`ds_config.json`).

        What the file says about batches, clipping, optimizer and schedule is in the report: `step_arguments()` go into
        `make_train_step`, `optimizer` into the train state. A value that jzero cannot honour is left out, and a warning
        names its key. "auto", which a trainer of another library would fill in, is decided by the arguments, or left
        out and listed at the head of the report, `report.undecided`.

        Args:
          source: A path to JSON (or to Hjson, if the package `hjson` is there), or the dictionary itself.
          num_devices: Devices that the batch is split over, all axes of the mesh that shard it. `None` leaves open what
            depends on it.
          batch_size: Rows of a step, where `train_batch_size` is "auto" or left out.
          optimizer: An optax transformation in the place of the file's optimizer and schedule.
          precision: As for `ZeroConfig`, where `bf16.enabled` and `fp16.enabled` are "auto" or left out.
          auto: Values by key, such as `{"gradient_clipping": 1.0}`, for anything that is "auto".

        Returns:
          `(config, report)`. The report has a verdict on each key: honoured, left to the compiler, ignored or refused,
          with the reason. `report.verify()` raises if anything is refused.

        Raises:
          ValueError: The file cannot be read: a key of `zero_optimization`, `fp16`, `bf16`, or of the parameters of an
            optimizer or a schedule is not known, has a value of the wrong kind or is there twice, or batch sizes
            contradict each other. All such keys are named. Or an argument contradicts the file.
          TypeError: `optimizer` is no optax transformation.
          OSError: There is no such file.

        Example:
          >>> config, report = jzero.ZeroConfig.from_deepspeed(
          ...     {"train_batch_size": 64, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}, num_devices=8
          ... )
          >>> config.stage, config.policy.compute_dtype, report.micro_batch_size
          (2, 'bfloat16', 8)

        References:
          DeepSpeed 0.19's configuration. Its defaults hold for keys that the file lacks: gradients, for one, are
          clipped at a norm of 1.
        """
        from jzero.deepspeed.importing import import_config  # noqa: PLC0415  # which builds on all of jzero

        fields, report = import_config(
            source, num_devices, batch_size=batch_size, optimizer=optimizer, precision=precision, auto=auto
        )
        if report.refused:
            warnings.warn(
                f"jzero does not honour {', '.join(f'`{row.key}`' for row in report.refused)} of this DeepSpeed "
                "configuration. `print(report)` tells why, and what to do instead.",
                stacklevel=2,
            )
        return cls(**fields.config, offload=Offload(**fields.offload)), report

    @property
    def policy(self) -> Precision:
        """`precision` as the `Precision` that its name stands for."""
        assert isinstance(self.precision, Precision)
        return self.precision

    def rule_for(self, path: str) -> LeafRule:
        """Returns the first rule whose pattern matches the whole of `path`, or the empty rule."""
        for pattern, rule in self.rules.items():
            if re.fullmatch(pattern, path):
                return rule
        return LeafRule()


def may_prefetch(config: ZeroConfig) -> bool:
    """Whether loops can gather ahead: parameters that they gather again, and from the devices."""
    return config.reshard_after_forward and config.offload.params != "host"
