"""ZeRO for JAX: partitions optimizer state, gradients and parameters over the data-parallel devices of any loop."""

import difflib
import importlib
import inspect
from typing import TYPE_CHECKING, Any

from jzero._version import __version__ as __version__

if TYPE_CHECKING:
    from jzero.analysis.analyze import analyze as analyze
    from jzero.analysis.candidates import Fit as Fit
    from jzero.analysis.fill import fill_memory as fill_memory
    from jzero.analysis.fit import fit as fit
    from jzero.analysis.report import AnalysisReport as AnalysisReport
    from jzero.analysis.step_memory import StepMemory as StepMemory
    from jzero.analysis.step_memory import estimate_step_memory as estimate_step_memory
    from jzero.analysis.violations import PlanViolation as PlanViolation
    from jzero.checkpoint.damage import CheckpointError as CheckpointError
    from jzero.checkpoint.exporting import export_checkpoint as export_checkpoint
    from jzero.checkpoint.exporting import export_params as export_params
    from jzero.checkpoint.inspecting import CheckpointInfo as CheckpointInfo
    from jzero.checkpoint.inspecting import inspect_checkpoint as inspect_checkpoint
    from jzero.checkpoint.loading import load_params as load_params
    from jzero.checkpoint.manager import CheckpointManager as CheckpointManager
    from jzero.checkpoint.matching import RestoreReport as RestoreReport
    from jzero.checkpoint.restoring import restore_checkpoint as restore_checkpoint
    from jzero.checkpoint.safetensors_files import ExportReport as ExportReport
    from jzero.checkpoint.saving import save_checkpoint as save_checkpoint
    from jzero.config.keep import Keep as Keep
    from jzero.config.leaf_rule import LeafRule as LeafRule
    from jzero.config.offload import Offload as Offload
    from jzero.config.offload import ZenFlow as ZenFlow
    from jzero.config.precision import DynamicLossScale as DynamicLossScale
    from jzero.config.precision import Precision as Precision
    from jzero.config.quantization import Quantization as Quantization
    from jzero.config.zero import ZeroConfig as ZeroConfig
    from jzero.deepspeed.conversion import from_deepspeed as from_deepspeed
    from jzero.deepspeed.estimator import estimate_zero1_model_states_mem_needs as estimate_zero1_model_states_mem_needs
    from jzero.deepspeed.estimator import estimate_zero2_model_states_mem_needs as estimate_zero2_model_states_mem_needs
    from jzero.deepspeed.estimator import (
        estimate_zero2_model_states_mem_needs_all_cold as estimate_zero2_model_states_mem_needs_all_cold,
    )
    from jzero.deepspeed.estimator import (
        estimate_zero2_model_states_mem_needs_all_live as estimate_zero2_model_states_mem_needs_all_live,
    )
    from jzero.deepspeed.estimator import estimate_zero3_model_states_mem_needs as estimate_zero3_model_states_mem_needs
    from jzero.deepspeed.estimator import (
        estimate_zero3_model_states_mem_needs_all_cold as estimate_zero3_model_states_mem_needs_all_cold,
    )
    from jzero.deepspeed.estimator import (
        estimate_zero3_model_states_mem_needs_all_live as estimate_zero3_model_states_mem_needs_all_live,
    )
    from jzero.deepspeed.formulas import MemoryEstimate as MemoryEstimate
    from jzero.deepspeed.report import DeepSpeedReport as DeepSpeedReport
    from jzero.disk.files import DiskError as DiskError
    from jzero.engine.outputs import PerExample as PerExample
    from jzero.engine.outputs import Summed as Summed
    from jzero.engine.outputs import Weighted as Weighted
    from jzero.engine.recompute import offload_activations as offload_activations
    from jzero.layout.mesh import make_mesh as make_mesh
    from jzero.monitor.monitor import Monitor as Monitor
    from jzero.monitor.sinks import Csv as Csv
    from jzero.monitor.sinks import JsonLines as JsonLines
    from jzero.monitor.sinks import TensorBoard as TensorBoard
    from jzero.monitor.trackers import MLflow as MLflow
    from jzero.monitor.trackers import WandB as WandB
    from jzero.plan.opt_state import ZeroOptState as ZeroOptState
    from jzero.plan.plan import ZeroPlan as ZeroPlan
    from jzero.pretrained.mapping import From as From
    from jzero.pretrained.mapping import Mapping as Mapping
    from jzero.state.adapter import plan_of as plan_of
    from jzero.state.disk_space import DiskStats as DiskStats
    from jzero.state.disk_space import disk_stats as disk_stats
    from jzero.state.disk_space import release_disk as release_disk
    from jzero.state.gather import gather_params as gather_params
    from jzero.state.gather import natural_params as natural_params
    from jzero.state.gather import unshard_train_state as unshard_train_state
    from jzero.state.gather import update_params as update_params
    from jzero.state.init import init_train_state as init_train_state
    from jzero.state.inspect import get_full_grad as get_full_grad
    from jzero.state.inspect import get_full_opt_state as get_full_opt_state
    from jzero.state.inspect import get_full_param as get_full_param
    from jzero.state.inspect import set_full_opt_state as set_full_opt_state
    from jzero.state.inspect import set_full_param as set_full_param
    from jzero.state.offload import offload_train_state as offload_train_state
    from jzero.state.offload import reload_train_state as reload_train_state
    from jzero.state.pending import apply_pending as apply_pending
    from jzero.state.shard import abstract_train_state as abstract_train_state
    from jzero.state.shard import plan_train_state as plan_train_state
    from jzero.state.shard import shard_train_state as shard_train_state
    from jzero.state.train_state import TrainState as TrainState
    from jzero.step.deviations import EquivalenceReport as EquivalenceReport
    from jzero.step.equivalence import check_equivalence as check_equivalence
    from jzero.step.eval_step import make_eval_step as make_eval_step
    from jzero.step.overflow import LossScaleError as LossScaleError
    from jzero.step.train_step import make_train_step as make_train_step
    from jzero.step.train_step import value_and_grad as value_and_grad

_HOMES = {
    "jzero.engine.outputs": ("PerExample", "Summed", "Weighted"),
    "jzero.config.offload": ("Offload", "ZenFlow"),
    "jzero.config.leaf_rule": ("LeafRule",),
    "jzero.config.zero": ("ZeroConfig",),
    "jzero.step.deviations": ("EquivalenceReport",),
    "jzero.step.equivalence": ("check_equivalence",),
    "jzero.state.init": ("init_train_state",),
    "jzero.state.inspect": (
        "get_full_grad",
        "get_full_opt_state",
        "get_full_param",
        "set_full_opt_state",
        "set_full_param",
    ),
    "jzero.layout.mesh": ("make_mesh",),
    "jzero.state.offload": ("offload_train_state", "reload_train_state"),
    "jzero.plan.opt_state": ("ZeroOptState",),
    "jzero.step.overflow": ("LossScaleError",),
    "jzero.plan.plan": ("ZeroPlan",),
    "jzero.config.precision": ("DynamicLossScale", "Precision"),
    "jzero.config.keep": ("Keep",),
    "jzero.config.quantization": ("Quantization",),
    "jzero.state.adapter": ("plan_of",),
    "jzero.state.train_state": ("TrainState",),
    "jzero.state.disk_space": ("DiskStats", "disk_stats", "release_disk"),
    "jzero.state.pending": ("apply_pending",),
    "jzero.state.gather": ("gather_params", "natural_params", "unshard_train_state", "update_params"),
    "jzero.state.shard": ("abstract_train_state", "plan_train_state", "shard_train_state"),
    "jzero.step.eval_step": ("make_eval_step",),
    "jzero.step.train_step": ("make_train_step", "value_and_grad"),
    "jzero.analysis.analyze": ("analyze",),
    "jzero.analysis.candidates": ("Fit",),
    "jzero.analysis.fill": ("fill_memory",),
    "jzero.analysis.fit": ("fit",),
    "jzero.analysis.report": ("AnalysisReport",),
    "jzero.analysis.step_memory": ("StepMemory", "estimate_step_memory"),
    "jzero.analysis.violations": ("PlanViolation",),
    "jzero.checkpoint.damage": ("CheckpointError",),
    "jzero.checkpoint.exporting": ("export_checkpoint", "export_params"),
    "jzero.checkpoint.inspecting": ("CheckpointInfo", "inspect_checkpoint"),
    "jzero.checkpoint.loading": ("load_params",),
    "jzero.checkpoint.manager": ("CheckpointManager",),
    "jzero.checkpoint.matching": ("RestoreReport",),
    "jzero.checkpoint.restoring": ("restore_checkpoint",),
    "jzero.checkpoint.safetensors_files": ("ExportReport",),
    "jzero.checkpoint.saving": ("save_checkpoint",),
    "jzero.deepspeed.conversion": ("from_deepspeed",),
    "jzero.deepspeed.report": ("DeepSpeedReport",),
    "jzero.disk.files": ("DiskError",),
    "jzero.engine.recompute": ("offload_activations",),
    "jzero.deepspeed.estimator": (
        "estimate_zero1_model_states_mem_needs",
        "estimate_zero2_model_states_mem_needs",
        "estimate_zero2_model_states_mem_needs_all_cold",
        "estimate_zero2_model_states_mem_needs_all_live",
        "estimate_zero3_model_states_mem_needs",
        "estimate_zero3_model_states_mem_needs_all_cold",
        "estimate_zero3_model_states_mem_needs_all_live",
    ),
    "jzero.deepspeed.formulas": ("MemoryEstimate",),
    "jzero.monitor.monitor": ("Monitor",),
    "jzero.monitor.sinks": ("Csv", "JsonLines", "TensorBoard"),
    "jzero.monitor.trackers": ("MLflow", "WandB"),
    "jzero.pretrained.mapping": ("From", "Mapping"),
}
"""The names of each module, again: type checkers read imports alone, and a name is imported when it is first used, so
that `import jzero` takes no time, and a program loads only what it uses."""

_HOME = dict(sorted((name, module) for module, names in _HOMES.items() for name in names))
__all__ = list(_HOME)

_ROOMS_OF_STATES = ("jzero.analysis", "jzero.checkpoint", "jzero.state", "jzero.step")
"""Their functions do not depend on the mesh that the program has set, see [Note: The mesh that is set]."""

if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            near = [x for x in _HOME if x.startswith(name)] or difflib.get_close_matches(name, _HOME, n=1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
        value = getattr(importlib.import_module(_HOME[name]), name)
        if inspect.isfunction(value) and _HOME[name].startswith(_ROOMS_OF_STATES):
            value = importlib.import_module("jzero.layout.set_mesh").public(value)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
