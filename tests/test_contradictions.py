"""Settings that each have a value but do not go together, or whose value has a bound, are refused: by which message.

What is no value of a setting at all is in `test_settings.py`.
"""

from __future__ import annotations

import numpy as np
import pytest

import jzero
from jzero import DynamicLossScale, LeafRule, Offload, Precision, Quantization, ZeroConfig

INT8, NODE, HOST = Quantization(gather="int8"), {"node_axis": "node"}, Offload(optimizer="host", params="host")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ZeroConfig(node_axis="data"), "`node_axis` .*other than `axis`"),
        (lambda: ZeroConfig(node_axis="replica", replica_axis="replica"), "`node_axis` must be"),
        (lambda: ZeroConfig(**NODE, stage=3, reduce_scatter=False), "`reduce_scatter=False` contradicts"),
        (lambda: ZeroConfig(stage=3, secondary_params=True), "needs `node_axis` and stage 3"),
        (lambda: ZeroConfig(**NODE, stage=2, secondary_params=True), "got node_axis='node', stage 2"),
        (lambda: ZeroConfig(**NODE, stage=1, secondary_grads=True), "`secondary_grads=True` needs"),
        (lambda: ZeroConfig(**NODE, stage=3, secondary_params=True, offload=HOST), "which `Offload.params='host'.`"),
        (lambda: ZeroConfig(stage=2, quantization=INT8), "gather='int8'.* needs stage 3"),
        (lambda: ZeroConfig(stage=2, quantization=Quantization(frozen="int8")), "frozen='int8'.* needs stage 3"),
        (lambda: ZeroConfig(stage=0, quantization=Quantization(reduce="int4")), "reduce='int4'.* needs stage 1"),
        (
            lambda: ZeroConfig(stage=3, quantization=Quantization(reduce="int8"), reduce_scatter=False),
            "`reduce_scatter=False` contradicts it",
        ),
        (
            lambda: ZeroConfig(stage=3, quantization=INT8, offload=Offload(params="host")),
            "keeps rounded shards of all",
        ),
        (lambda: Quantization(gather="int4"), r"Quantization.gather` .*'int4'"),
        (lambda: LeafRule(quantize=True), r"`LeafRule.quantize` .*got True"),
        (lambda: ZeroConfig(quantization="int8"), r"`quantization` .*got 'int8'"),
        (lambda: Offload(compute="host"), r"compute='host'.*`optimizer` is 'none'"),
        (lambda: Offload(optimizer="host", delay=1), r"delay=1.*`compute` is 'device'"),
        (lambda: Offload(ratio=0.5), r"`optimizer` is 'none'"),
        (lambda: Offload(optimizer="host", chunk_bytes=0), r"`Offload.chunk_bytes` must be .* >= 1: got 0"),
        (lambda: Offload(optimizer="host", ratio=0.5, device_budget_bytes=9), r"set one of them"),
        (lambda: ZeroConfig(rules={"w": LeafRule(offload=True)}), r"offload=True, but nothing is offloaded"),
        (lambda: ZeroConfig(stage=2, offload=Offload(params="host")), r"params='host'.*got stage 2"),
        (lambda: jzero.offload_activations([]), "at least one activation"),
        (lambda: jzero.offload_activations(["a", "b"], keep=["a"]), r"\['a'\] cannot be offloaded and kept"),
        (lambda: Precision(master_dtype="float32"), "set `compute_dtype` too"),
        (lambda: Precision(compute_dtype="float16", master_dtype="bfloat16"), "goes with"),
        (lambda: ZeroConfig(rules={"a": LeafRule(compute_dtype="float32")}), "set `precision` too"),
        (lambda: DynamicLossScale(initial=1e39), "`DynamicLossScale.initial`"),
        (lambda: DynamicLossScale(minimum=2.0, initial=1.0), "above `initial`"),
        (lambda: DynamicLossScale(window=0), "`DynamicLossScale.window`"),
    ],
)
def test_what_contradicts_itself_is_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


POLICIES = {
    "compute_dtype": ["int8", 3],
    "reduce_dtype": ["float64"],
    "state_dtype": ["float16"],
    "loss_scale": [0, 2**2000, True, "static", np.array([0, 1])],
    "master_dtype": ["float16"],
    "skip_nonfinite": [1],
}
"""What each field of a policy cannot be."""


def test_policies_that_are_none_are_refused():
    for field, value in ((field, value) for field, values in POLICIES.items() for value in values):
        with pytest.raises(ValueError, match=f"`Precision.{field}`"):
            Precision(**{"compute_dtype": "bfloat16", field: value})
