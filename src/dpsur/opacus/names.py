"""Every import path and name of Opacus 1.6: what stands for it here, or why nothing does.

Modules of this package that have no file are made from the table below. A name without a
counterpart can be imported, since many programs import what they never use, and is refused with its
remedy where it is called.
"""

import sys
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from dpsur.errors import InvalidInputError

ROOT = "dpsur.opacus"

GRADIENTS = (
    "models are not wrapped, and no record's gradient is stored; give make_private the model "
    "itself, and for gradients of each record use dpsur.per_example_gradients"
)
RULES = (
    "layers need no rule of yours: what has none of its own is differentiated by PyTorch, one "
    "record apart from another; leave the registration out"
)
OPTIMIZERS = (
    "the optimizer that you give to PrivacyEngine.make_private becomes private itself; call "
    "make_private, which returns it"
)
LOADERS = (
    "batches are drawn by the loader that PrivacyEngine.make_private returns, from secret random "
    "numbers; call make_private, and iterate over that loader"
)
SCHEDULES = (
    "noise and clipping norm are fixed in make_private, where the epsilon of the plan is computed; "
    "leave the schedule out"
)
CLIPPING = "clipping is flat: one norm over all parameters; leave clipping out"
ACCOUNTING = (
    "epsilon comes from privacy loss distributions that are rounded up; use "
    "dpsur.Account, or get_noise_multiplier and dpsur.calibrate for the noise"
)
GDP = "Gaussian DP can report too low an epsilon; use PRVAccountant or RDPAccountant"
SHARDING = (
    "PrivacyEngine.make_private takes modules of torch's fully_shard and DistributedDataParallel "
    "as they are; leave the wrapper out"
)
INTERNAL = "it is a part of the inside of Opacus, which is built differently here"
VALIDATION = "checks of models are dpsur.check, and repairs dpsur.fix; call those"
LIGHTNING = "use dpsur.integrations.lightning.PrivateTraining as a callback of the trainer"

# What works: its home in this package, and the names.
WORKS = {
    "privacy_engine": "PrivacyEngine",
    "accounting": "IAccountant PRVAccountant RDPAccountant create_accountant register_accountant "
    "get_noise_multiplier",
    "modules": "DPGRU DPLSTM DPRNN DPMultiheadAttention BatchMemoryManager ModelWithLoss "
    "DifferentiallyPrivateDistributedDataParallel has_trainable_params parametrized_modules "
    "trainable_modules trainable_parameters requires_grad clone_module get_submodule "
    "are_state_dict_equal check_per_sample_gradients_are_correct compute_microbatch_grad_sample "
    "compute_opacus_grad_sample compute_grad_samples_microbatch_and_opacus get_grad_sample_modes "
    "is_batch_empty",
    "validation": "ModuleValidator UnsupportedError UnsupportedModuleError "
    "UnsupportableModuleError NotYetSupportedModuleError ShouldReplaceModuleError "
    "IllegalModuleConfigurationError register_module_fixer register_module_validator",
}
# By why names without a counterpart are refused: paths of modules, each with what Opacus defines
# there. Other modules import such names too, and here every module has all of them.
_DEFINED = {
    ACCOUNTING: """
        accountants; accountants.accountant IAccountant; accountants.analysis;
        accountants.analysis.prv; accountants.analysis.prv.compose compose_heterogeneous;
        accountants.analysis.prv.domain Domain compute_safe_domain_size;
        accountants.analysis.prv.prvs PoissonSubsampledGaussianPRV TruncatedPrivacyRandomVariable
            DiscretePRV discretize;
        accountants.analysis.rdp compute_rdp get_privacy_spent;
        accountants.prv PRVAccountant; accountants.rdp RDPAccountant;
        accountants.registry register_accountant create_accountant;
        accountants.utils get_noise_multiplier""",
    GDP: """
        accountants.analysis.gdp compute_mu_uniform compute_mu_poisson delta_eps_mu eps_from_mu
            compute_eps_uniform compute_eps_poisson;
        accountants.gdp GaussianAccountant""",
    LOADERS: """
        data_loader CollateFnWithEmpty wrap_collate_with_empty shape_safe dtype_safe DPDataLoader
            switch_generator;
        utils.batch_memory_manager BatchSplittingSampler wrap_data_loader BatchMemoryManager;
        utils.uniform_sampler UniformWithReplacementSampler
            DistributedUniformWithReplacementSampler""",
    "gradients of all processes are added up in optimizer.step(); leave it out": """
        distributed average_gradients DifferentiallyPrivateDistributedDataParallel""",
    GRADIENTS: """
        grad_sample;
        grad_sample.functorch make_functional prepare_layer ft_compute_per_sample_gradient;
        grad_sample.grad_sample_module create_or_accumulate_grad_sample promote_current_grad_sample
            GradSampleHooks GradSampleModule;
        grad_sample.grad_sample_module_fast_gradient_clipping create_norm_sample
            GradSampleHooksFastGradientClipping GradSampleModuleFastGradientClipping;
        grad_sample.grad_sample_module_fast_gradient_clipping_fsdp
            GradSampleHooksFastGradientClippingFSDP GradSampleModuleFastGradientClippingFSDP;
        grad_sample.grad_sample_module_fast_gradient_clipping_tp
            GradSampleHooksFastGradientClippingTP GradSampleModuleFastGradientClippingTP;
        grad_sample.gsm_base AbstractGradSampleHooks AbstractGradSampleModule;
        grad_sample.gsm_exp_weights GradSampleModuleExpandedWeights;
        grad_sample.gsm_no_op GradSampleHooksNoOp GradSampleModuleNoOp;
        grad_sample.utils register_grad_sampler register_norm_sampler prepare_module wrap_model
            get_gsm_class get_hooks_class;
        utils.fast_gradient_clipping_utils DPTensorFastGradientClipping DPLossFastGradientClipping;
        utils.per_sample_gradients_utils is_batch_empty ModelWithLoss get_grad_sample_modes
            compute_microbatch_grad_sample compute_opacus_grad_sample
            check_torch_version_for_ew_sample check_per_sample_gradients_are_correct
            compute_microbatch_grad_sample_tensor_or_seq compute_grad_samples_microbatch_and_opacus
            unpack_packedsequences""",
    RULES: """
        grad_sample.conv compute_conv_grad_sample convolution2d_backward_as_a_convolution;
        grad_sample.dp_multihead_attention compute_sequence_bias_grad_sample;
        grad_sample.dp_rnn compute_rnn_linear_grad_sample;
        grad_sample.embedding compute_embedding_grad_sample compute_embeddingbag_gradsampler;
        grad_sample.embedding_norm_sample compute_embedding_norm_sample;
        grad_sample.group_norm compute_group_norm_grad_sample;
        grad_sample.instance_norm compute_instance_norm_grad_sample;
        grad_sample.layer_norm compute_layer_norm_grad_sample;
        grad_sample.linear compute_linear_grad_sample compute_linear_norm_sample;
        grad_sample.rms_norm compute_rms_norm_grad_sample""",
    INTERNAL: """
        layers; layers.dp_multihead_attention SequenceBias DPMultiheadAttention;
        layers.dp_rnn apply_permutation RNNLinear DPRNNCellBase DPRNNCell DPGRUCell DPLSTMCell
            DPRNNBase DPRNN DPGRU DPLSTM;
        layers.param_rename filter_out_old_keys RenameParamsMixin;
        utils; utils.packed_sequences compute_seq_lengths _gen_packed_data;
        utils.module_utils has_trainable_params parametrized_modules trainable_modules
            trainable_parameters requires_grad clone_module get_submodule are_state_dict_equal;
        utils.tensor_utils calc_sample_norms calc_sample_norms_one_layer
            sum_over_all_but_batch_and_last_n unfold2d unfold3d filter_dilated_rows;
        version""",
    LIGHTNING: "lightning DPLightningDataModule",
    OPTIMIZERS: """
        optimizers get_optimizer_class; optimizers.ddpoptimizer DistributedDPOptimizer;
        optimizers.ddpoptimizer_fast_gradient_clipping DistributedDPOptimizerFastGradientClipping;
        optimizers.fsdpoptimizer_fast_gradient_clipping FSDPOptimizerFastGradientClipping;
        optimizers.optimizer DPOptimizer _generate_noise; optimizers.utils params;
        optimizers.optimizer_fast_gradient_clipping DPOptimizerFastGradientClipping""",
    CLIPPING: """
        optimizers.adaclipoptimizer AdaClipDPOptimizer;
        optimizers.ddp_perlayeroptimizer SimpleDistributedPerLayerOptimizer
            DistributedPerLayerOptimizer;
        optimizers.perlayeroptimizer DPPerLayerOptimizer; utils.adaptive_clipping;
        utils.adaptive_clipping.adaptive_clipping_utils DPTensorFastGradientAdaptiveClipping
            DPLossFastGradientAdaptiveClipping PrivacyEngineAdaptiveClipping""",
    SCHEDULES: """
        schedulers;
        schedulers.grad_clip_scheduler ExponentialGradClip LambdaGradClip StepGradClip;
        schedulers.noise_scheduler ExponentialNoise LambdaNoise StepNoise""",
    SHARDING: "utils.fsdp_utils has_params iterate_submodules FSDP2Wrapper",
    VALIDATION: """
        validators; validators.batch_norm validate fix; validators.gru; validators.instance_norm;
        validators.lstm; validators.multihead_attention;
        validators.module_validator ModuleValidator;
        validators.utils register_module_validator register_module_fixer;
        validators.errors UnsupportedError UnsupportedModuleError UnsupportableModuleError
            NotYetSupportedModuleError ShouldReplaceModuleError IllegalModuleConfigurationError""",
}
_HOMES = {name: home for home, names in WORKS.items() for name in names.split()}
PATHS: dict[str, list[str]] = {}  # of modules, and the names that are defined there
REMEDIES: dict[str, str] = {}  # for names without a counterpart
for _remedy, _modules in _DEFINED.items():
    for _path, *_names in map(str.split, _modules.split(";")):
        PATHS[_path] = _names
        REMEDIES |= {name: _remedy for name in _names if name not in _HOMES}


class MissingError(InvalidInputError, AttributeError):
    """An attribute of a name without a counterpart."""


class _Refuse(type):
    remedy: str

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingError(f"{cls.__name__}.{name} has no counterpart: {cls.remedy}")


class Refused(metaclass=_Refuse):
    """A name of Opacus without a counterpart: it can be imported, and is refused where used."""

    remedy = ""

    def __new__(cls, *_: Any, **__: Any) -> "Refused":
        raise InvalidInputError(f"{cls.__name__} has no counterpart: {cls.remedy}")


@cache
def find(name: str) -> Any:
    """What a name of Opacus stands for; AttributeError if it is no name of it."""
    if name in _HOMES:
        return getattr(import_module(f"{ROOT}.{_HOMES[name]}"), name)
    if name not in REMEDIES:
        raise AttributeError(f"{name!r} is no public name of Opacus 1.6; see docs/from_opacus.md")
    return type(name, (Refused,), {"remedy": REMEDIES[name], "__module__": ROOT})


for _path in sorted(PATHS):  # a package before what is in it
    _module: Any = ModuleType(f"{ROOT}.{_path}", f"Names of Opacus's module {_path}.")
    _below = (names for other, names in PATHS.items() if f"{other}.".startswith(f"{_path}."))
    _module.__all__ = [name for names in _below for name in names if not name.startswith("_")]
    _module.__getattr__, _module.__path__ = find, []
    sys.modules[_module.__name__] = _module
    _parent, _, _own = _module.__name__.rpartition(".")
    setattr(sys.modules[_parent], _own, _module)
