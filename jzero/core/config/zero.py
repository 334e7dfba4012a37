"""Frozen configuration of a ZeRO run, validated on construction."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, ParamSpec, TypeAlias, TypeVar

from jzero.core.config.offload import Offload, byte_count
from jzero.core.config.precision import DTYPE, STATE_DTYPE, DtypeName, Precision, resolve_precision
from jzero.core.config.settings import Setting, check_fields, integer, optional

Rounded: TypeAlias = Literal["int8", "int4"]
"""The kinds of blocks in which gradients can be summed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization:
    """What travels, or is stored, in blocks of integers, each with a scale: for slow links between devices.

    A block is up to 256 elements at one index of the dimension that is cut, so rounded parameters are the same bits on
    any number of devices that cut this dimension. NaN and infinity fill their block, so a loss scale still finds them.
    Vectors and a few other leaves stay as they are; `plan.unquantized` names each with its reason, and
    `LeafRule(quantize=False)` adds some.

    Attributes:
      gather: "int8": stage 3 rounds each parameter once per step, on its shard, and gathers the integers (ZeRO++'s
        qwZ). Forward, backward and recomputation see the same rounded parameter; masters stay exact.
      reduce: "int8" or "int4": gradients are rounded before they cross nodes, and summed in fp32 (ZeRO++'s qgZ). Sums
        within a node are exact. Without `ZeroConfig.node_axis`, all devices exchange rounded gradients.
      frozen: "int8" or "nf4": stage 3 stores parameters that are not trained so. A step gathers the integers. Their
        dimension of blocks follows from the shape alone, so any number of devices has the same bits. nf4 has 16 levels,
        quantiles of a normal distribution, and blocks of 64 (QLoRA).

    Raises:
      ValueError: A field has an impossible value.

    Example:
      >>> jzero.ZeroConfig(stage=3, quantization=jzero.Quantization(gather="int8")).quantization.reduce
      'none'

    References:
      Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model Training, 2023.
      Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023.
    """

    gather: Literal["none", "int8"] = "none"
    reduce: Literal["none", Rounded] = "none"
    frozen: Literal["none", "int8", "nf4"] = "none"

    def __post_init__(self) -> None:
        check_fields(self, prefix="Quantization.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafRule:
    """Overrides the default layout of the leaves that match one path.

    Attributes:
      dim: Dimension (of the natural shape) that the ZeRO axis cuts; padded if the axis size does
        not divide it. `None` lets the layout choose.
      persistent: `True` keeps the parameter whole at stage 3, whatever its size (its gradient and
        optimizer state are still cut); `False` cuts it, however small and odd. `None` lets
        `persistence_threshold` and `padding_threshold` decide.
      replicated: `True` keeps parameter, gradient and optimizer state whole at every stage.
      scan_dim: The dimension that a `lax.scan` runs over, which is never cut; -1 says that there
        is none. `None` lets the layout infer it from the tree.
      compute_dtype: The leaf's dtype in the loss, e.g. "float32" for a normalization scale in a
        16-bit model. `None`: `Precision.compute_dtype`.
      state_dtype: The stored dtype of optimizer state of the leaf's shape: "bfloat16" (rounded
        stochastically) or "float32". `None`: `Precision.state_dtype`.
      offload: `True` puts what `Offload` offloads of the leaf on the host or the disk, `False` keeps it on the device.
        `None` lets `Offload` decide. Scalars, vectors among parameters, and parameters that stage 3 keeps whole always
        stay.
      quantize: `False` keeps the leaf as it is, whatever `Quantization` says.

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
    quantize: Literal[False] | None = None

    def __post_init__(self) -> None:
        allowed = {
            "dim": optional(integer(0)),
            "scan_dim": optional(integer(-1)),
            "compute_dtype": DTYPE,
            "state_dtype": STATE_DTYPE,
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


PADDING_THRESHOLD = 16_384
"""Most elements of a leaf that stays whole by default if it cannot be cut evenly: 64 KiB in float32."""


def _axis_name(value: object, but: Sequence[str | None] = ()) -> str:
    if not isinstance(value, str) or value in ("", *but):
        raise ValueError
    return value


_NO_RULE = LeafRule()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """What is partitioned over the data-parallel devices, and how.

    Attributes:
      stage: 0 (nothing), 1 (optimizer state), 2 (and gradients), 3 (and parameters).
      axis: Mesh axis over which ZeRO partitions.
      node_axis: Mesh axis over nodes: ZeRO partitions over `axis` and this one, each its own collective, so that only
        the smaller one crosses nodes. The batch is split over it, too.
      secondary_params: Stage 3 gathers parameters between nodes once per step, before everything else, and keeps each
        device's share of its node (ZeRO++'s hpZ): all other gathers stay within nodes. It costs a share of 1/D of the
        parameters during the step, for D devices per node.
      secondary_grads: With micro-batches, stages 2 and 3 reduce gradients within nodes at each use, and between nodes
        once per step. It costs sums of 1/D of the gradients.
      context_axis: Mesh axis along which devices have the same rows of the batch: the loss takes each device's part of
        them, such as of a sequence, by `jax.lax.axis_index`, and exchanges what others need by collectives. ZeRO
        partitions over `axis` and this one together.
      replica_axis: Mesh axis over which the shards are replicated (hybrid sharding). The batch is split over it, too.
      persistence_threshold: Parameters of up to this many elements stay whole at stage 3
        (DeepSpeed's `param_persistence_threshold`). Their gradients and optimizer state are cut.
      model_persistence_threshold: Cap, in elements, on the sum of parameters kept whole by
        `persistence_threshold`; the smallest are kept first. `None`: no cap.
      padding_threshold: A leaf of up to this many elements that no dimension divides, by the number of devices that
        ZeRO partitions over, is not padded but stays whole at every stage: parameter, gradient and optimizer state.
        `None`: the smaller of 16,384 and `persistence_threshold`.
      reshard_after_forward: Stage 3 frees gathered parameters after their use in the forward pass
        and gathers them again in the backward pass. `False` keeps them, as FSDP2 does with the same
        option: one gather less, whole parameters alive between the passes.
      prefetch_bytes: Most bytes that stage 3 gathers ahead of their use, counted in whole parameters and the dtypes of
        their gathers (DeepSpeed's `prefetch_bucket_size`, in bytes). Scans (layers) gather parameters of the next
        iteration while they compute this one: as many as fit, in the order of use, but at most a 32nd of the scan's
        gathers, since those of the last iteration are wasted (a warning says if nothing is left). `None`: scans on GPUs
        gather up to a third of an iteration ahead, and the compiler decides the rest. 0: nothing is gathered ahead.
      reduce_scatter: `False` reduces gradients with an all-reduce and slices the result
        (DeepSpeed's key of this name): the same numbers, twice the communication.
      all_gather_bucket_bytes: Most bytes that the compiler combines into one gather, in this step's program only. GPUs
        only, and not if a step is called inside another `jax.jit`; `None` leaves it to the compiler.
      reduce_bucket_bytes: Most bytes of whole gradients, in the dtype of the reduction, that the compiler combines into
        one reduce-scatter (DeepSpeed's `reduce_bucket_size`, in bytes), with the same limits. `None`: 16 MiB on GPUs,
        or 256 KiB for each device if that is more; 8 MiB for each device where loops reduce between nodes.
      precision: "fp32" (every leaf keeps its dtype), "bf16" or "fp16" (16-bit parameters
        and gradients, fp32 masters; fp16 with a dynamic loss scale), or a `Precision`.
      quantization: What travels, or is stored, as integers, see `Quantization`.
      offload: The parts of the state in host memory or on a disk, see `Offload`.
      rules: Layout of single leaves by regular expression over their whole path, such as
        `{"decoder/.*/bias": LeafRule(persistent=True)}`; the first match counts.

    Raises:
      ValueError: A field has an impossible value; the message names the field, the value and what
        is allowed.

    Example:
      >>> jzero.ZeroConfig(stage=3, persistence_threshold=0).axis
      'data'
    """

    stage: Literal[0, 1, 2, 3] = 3
    axis: str = "data"
    node_axis: str | None = None
    secondary_params: bool = False
    secondary_grads: bool = False
    context_axis: str | None = None
    replica_axis: str | None = None
    persistence_threshold: int = 100_000
    model_persistence_threshold: int | None = None
    padding_threshold: int | None = None
    reshard_after_forward: bool = True
    prefetch_bytes: int | None = None
    reduce_scatter: bool = True
    all_gather_bucket_bytes: int | None = None
    reduce_bucket_bytes: int | None = None
    precision: Precision | Literal["fp32", "bf16", "fp16"] = "fp32"
    quantization: Quantization = dataclasses.field(default_factory=Quantization)
    offload: Offload = dataclasses.field(default_factory=Offload)
    rules: Mapping[str, LeafRule] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        name = Setting("the name of a mesh axis", _axis_name)
        other = Setting(
            f"a mesh axis other than `axis` ({self.axis!r:.80})", functools.partial(_axis_name, but=(self.axis,))
        )
        node = Setting(
            f"a mesh axis other than `axis` ({self.axis!r:.80}) and `replica_axis` ({self.replica_axis!r:.80})",
            functools.partial(_axis_name, but=(self.axis, self.replica_axis)),
        )
        context = Setting(
            f"a mesh axis other than those of the other fields {(self.axis, self.node_axis, self.replica_axis)!r:.200}",
            functools.partial(_axis_name, but=(self.axis, self.node_axis, self.replica_axis)),
        )
        elements = integer(0, says="a number of elements, an integer >= 0")
        allowed = {
            "axis": name,
            "node_axis": optional(node),
            "context_axis": optional(context),
            "replica_axis": optional(other),
            "persistence_threshold": elements,
            "model_persistence_threshold": optional(elements),
            "padding_threshold": optional(elements),
            "prefetch_bytes": optional(byte_count(0)),
            "all_gather_bucket_bytes": optional(byte_count(1)),
            "reduce_bucket_bytes": optional(byte_count(1)),
        }
        check_fields(self, allowed)
        object.__setattr__(self, "precision", resolve_precision(self.precision))
        if not isinstance(self.offload, Offload):
            raise ValueError(f"`offload` must be a `jzero.Offload`: got {self.offload!r}.")
        if not isinstance(self.quantization, Quantization):
            raise ValueError(f"`quantization` must be a `jzero.Quantization`: got {self.quantization!r}.")
        if self.offload.params != "none" and self.stage != 3:
            raise ValueError(
                f"`Offload(params={self.offload.params!r})` needs stage 3, which gathers parameters layer by layer: "
                f"got stage {self.stage}. Set `stage=3`, or `params='none'`."
            )
        self._check_levels()
        self._check_quantization()
        if self.prefetch_bytes is not None and not may_prefetch(self):
            raise ValueError(
                f"`prefetch_bytes={self.prefetch_bytes}` needs parameters on the device: got "
                f"Offload(params={self.offload.params!r}). Drop one of them."
            )
        self._check_rules()

    def _check_levels(self) -> None:
        if self.node_axis is not None and not self.reduce_scatter:
            raise ValueError(
                f"`node_axis={self.node_axis!r}` scatters sums in two hops, so `reduce_scatter=False` contradicts it: "
                "drop one of them."
            )
        for name, least in (("secondary_params", 3), ("secondary_grads", 2)):
            if getattr(self, name) and (self.node_axis is None or self.stage < least):
                raise ValueError(
                    f"`{name}=True` needs `node_axis` and stage {least} or more: got node_axis={self.node_axis!r}, "
                    f"stage {self.stage}. Name the mesh axis over nodes, or drop `{name}`."
                )
        if self.secondary_params and self.offload.params != "none":
            raise ValueError(
                "`secondary_params=True` keeps a share of all parameters on the devices, which "
                f"`Offload(params={self.offload.params!r})` is to avoid: drop one of them."
            )

    def _check_quantization(self) -> None:
        kinds = self.quantization
        for name, least in (("gather", 3), ("frozen", 3), ("reduce", 1)):
            kind = getattr(kinds, name)
            if kind != "none" and self.stage < least:
                raise ValueError(
                    f"`Quantization({name}={kind!r})` needs stage {least} or more, which has such "
                    f"{'sums' if name == 'reduce' else 'gathers'}: got stage {self.stage}. Raise `stage`, or drop "
                    f"`{name}`."
                )
        if kinds.reduce != "none" and not self.reduce_scatter:
            raise ValueError(
                f"`Quantization(reduce={kinds.reduce!r})` exchanges parts of gradients, so `reduce_scatter=False` "
                "contradicts it: drop one of them."
            )
        if kinds.gather != "none" and self.offload.params != "none":
            raise ValueError(
                f"`Quantization(gather={kinds.gather!r})` keeps rounded shards of all parameters on the devices, which "
                f"`Offload(params={self.offload.params!r})` is to avoid: drop one of them, or store frozen parameters "
                "as integers (`Quantization(frozen='int8')`)."
            )

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

    @property
    def policy(self) -> Precision:
        """`precision` as a `Precision`."""
        assert isinstance(self.precision, Precision)
        return self.precision

    @property
    def most_unpadded(self) -> int:
        """`padding_threshold` as a number of elements."""
        least = min(PADDING_THRESHOLD, self.persistence_threshold)
        return least if self.padding_threshold is None else self.padding_threshold

    def rule_for(self, path: str) -> LeafRule:
        """Returns the first rule whose pattern matches all of `path`, or the empty rule."""
        for pattern, rule in self.rules.items():
            if re.fullmatch(pattern, path):
                return rule
        return _NO_RULE


P = ParamSpec("P")
T = TypeVar("T")


def refers_to_config(takes: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Makes a function that is called with a field of `ZeroConfig` say where that field goes.

    Args:
      takes: The function that takes a configuration: itself, or the one that makes its state.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        fields = {f.name for f in dataclasses.fields(ZeroConfig)} - set(inspect.signature(function).parameters)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in fields.intersection(kwargs):
                value = repr(kwargs[name])
                raise TypeError(
                    f"`{name}` is a field of the configuration: pass "
                    f"`config=jzero.ZeroConfig(stage=..., {name}={value if len(value) < 30 else '...'})` to `{takes}`."
                )
            return function(*args, **kwargs)

        return call

    return decorate


def may_prefetch(config: ZeroConfig) -> bool:
    """Whether loops can gather ahead: only parameters that are on the devices."""
    return config.offload.params == "none"
