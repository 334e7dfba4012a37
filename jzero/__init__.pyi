# Every public name: type checkers read this file, and `__init__.py` reads from it where to import a name from.
from jzero.analysis.analyze import analyze as analyze
from jzero.analysis.estimates import estimate_step_memory as estimate_step_memory
from jzero.analysis.fill import fill_memory as fill_memory
from jzero.analysis.fit import fit as fit
from jzero.analysis.fit_report import Fit as Fit
from jzero.analysis.report import AnalysisReport as AnalysisReport
from jzero.analysis.violations import PlanViolation as PlanViolation
from jzero.checkpoint.damage import CheckpointError as CheckpointError
from jzero.checkpoint.inspecting import CheckpointInfo as CheckpointInfo
from jzero.checkpoint.inspecting import inspect_checkpoint as inspect_checkpoint
from jzero.checkpoint.manager import CheckpointManager as CheckpointManager
from jzero.checkpoint.matching import RestoreReport as RestoreReport
from jzero.checkpoint.restoring import restore_checkpoint as restore_checkpoint
from jzero.checkpoint.saving import save_checkpoint as save_checkpoint
from jzero.core.config.keep import Keep as Keep
from jzero.core.config.offload import Offload as Offload
from jzero.core.config.offload import ZenFlow as ZenFlow
from jzero.core.config.precision import DynamicLossScale as DynamicLossScale
from jzero.core.config.precision import Precision as Precision
from jzero.core.config.zero import LeafRule as LeafRule
from jzero.core.config.zero import Quantization as Quantization
from jzero.core.config.zero import ZeroConfig as ZeroConfig
from jzero.core.disk.files import DiskError as DiskError
from jzero.core.engine.outputs import Max as Max
from jzero.core.engine.outputs import Min as Min
from jzero.core.engine.outputs import PerExample as PerExample
from jzero.core.engine.outputs import Summed as Summed
from jzero.core.engine.outputs import Weighted as Weighted
from jzero.core.engine.recompute import offload_activations as offload_activations
from jzero.core.layout.mesh import make_mesh as make_mesh
from jzero.core.plan.opt_state import ZeroOptState as ZeroOptState
from jzero.core.plan.plan import ZeroPlan as ZeroPlan
from jzero.core.state.access import apply_pending as apply_pending
from jzero.core.state.adapter import plan_of as plan_of
from jzero.core.state.disk_space import DiskStats as DiskStats
from jzero.core.state.disk_space import disk_stats as disk_stats
from jzero.core.state.disk_space import release_disk as release_disk
from jzero.core.state.gather import gather_params as gather_params
from jzero.core.state.gather import natural_params as natural_params
from jzero.core.state.gather import unshard_train_state as unshard_train_state
from jzero.core.state.gather import update_params as update_params
from jzero.core.state.init import init_train_state as init_train_state
from jzero.core.state.offload import offload_train_state as offload_train_state
from jzero.core.state.offload import reload_train_state as reload_train_state
from jzero.core.state.shard import abstract_train_state as abstract_train_state
from jzero.core.state.shard import plan_train_state as plan_train_state
from jzero.core.state.shard import shard_train_state as shard_train_state
from jzero.core.state.train_state import TrainState as TrainState
from jzero.core.step.eval_step import make_eval_step as make_eval_step
from jzero.core.step.overflow import LossScaleError as LossScaleError
from jzero.core.step.train_step import value_and_grad as value_and_grad
from jzero.debug.deviations import EquivalenceReport as EquivalenceReport
from jzero.debug.equivalence import check_equivalence as check_equivalence
from jzero.debug.inspect import get_full_grad as get_full_grad
from jzero.debug.inspect import get_full_opt_state as get_full_opt_state
from jzero.debug.inspect import get_full_param as get_full_param
from jzero.debug.inspect import set_full_opt_state as set_full_opt_state
from jzero.debug.inspect import set_full_param as set_full_param
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
from jzero.estimate.step_memory import StepMemory as StepMemory
from jzero.monitor.monitor import Monitor as Monitor
from jzero.monitor.sinks import Csv as Csv
from jzero.monitor.sinks import JsonLines as JsonLines
from jzero.monitor.sinks import TensorBoard as TensorBoard
from jzero.monitor.trackers import MLflow as MLflow
from jzero.monitor.trackers import WandB as WandB
from jzero.training import make_train_step as make_train_step
from jzero.weights.exporting import export_checkpoint as export_checkpoint
from jzero.weights.exporting import export_params as export_params
from jzero.weights.loading import load_params as load_params
from jzero.weights.mapping import From as From
from jzero.weights.mapping import Mapping as Mapping
from jzero.weights.safetensors_files import ExportReport as ExportReport

__version__: str
