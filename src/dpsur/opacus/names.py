"""Every import path and name of Opacus 1.6: what stands for it here, or why nothing does.

Modules of this package that have no file are made from the table below when they are imported. A
name without a counterpart can be imported, since many programs import what they never use, and is
refused with its remedy where it is called.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
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

_LAYERS = "DPGRU DPLSTM DPRNN DPMultiheadAttention"
_ERRORS = (
    "UnsupportedError UnsupportedModuleError UnsupportableModuleError NotYetSupportedModuleError "
    "ShouldReplaceModuleError IllegalModuleConfigurationError"
)
_MODULE_UTILS = (
    "has_trainable_params parametrized_modules trainable_modules trainable_parameters "
    "requires_grad clone_module get_submodule are_state_dict_equal"
)
_VALIDATOR = "register_module_fixer register_module_validator"

# What works: its home in this package, and the names.
WORKS = {
    "privacy_engine": "PrivacyEngine",
    "accounting": "IAccountant PRVAccountant RDPAccountant create_accountant register_accountant "
    "get_noise_multiplier",
    "modules": f"{_LAYERS} {_MODULE_UTILS} DifferentiallyPrivateDistributedDataParallel "
    "BatchMemoryManager check_per_sample_gradients_are_correct compute_microbatch_grad_sample "
    "compute_opacus_grad_sample compute_grad_samples_microbatch_and_opacus get_grad_sample_modes "
    "is_batch_empty ModelWithLoss",
    "validation": f"ModuleValidator {_ERRORS} {_VALIDATOR}",
}
# The module paths of Opacus, their names, and why those that do not work are refused.
_GSM = "grad_sample_module_fast_gradient_clipping"
PATHS: dict[str, tuple[str, str]] = {
    "accountants": (
        "IAccountant GaussianAccountant PRVAccountant RDPAccountant create_accountant "
        "register_accountant",
        ACCOUNTING,
    ),
    "accountants.accountant": ("IAccountant DPOptimizer", ACCOUNTING),
    "accountants.analysis": ("", ACCOUNTING),
    "accountants.analysis.gdp": (
        "compute_mu_uniform compute_mu_poisson delta_eps_mu eps_from_mu compute_eps_uniform "
        "compute_eps_poisson",
        GDP,
    ),
    "accountants.analysis.prv": (
        "compose_heterogeneous Domain compute_safe_domain_size DiscretePRV discretize "
        "PoissonSubsampledGaussianPRV TruncatedPrivacyRandomVariable",
        ACCOUNTING,
    ),
    "accountants.analysis.prv.compose": ("compose_heterogeneous DiscretePRV", ACCOUNTING),
    "accountants.analysis.prv.domain": (
        "Domain compute_safe_domain_size RDPAccountant",
        ACCOUNTING,
    ),
    "accountants.analysis.prv.prvs": (
        "PoissonSubsampledGaussianPRV TruncatedPrivacyRandomVariable DiscretePRV discretize Domain",
        ACCOUNTING,
    ),
    "accountants.analysis.rdp": ("compute_rdp get_privacy_spent", ACCOUNTING),
    "accountants.gdp": ("GaussianAccountant IAccountant", GDP),
    "accountants.prv": (
        "PRVAccountant IAccountant Domain PoissonSubsampledGaussianPRV compose_heterogeneous "
        "TruncatedPrivacyRandomVariable compute_safe_domain_size discretize",
        ACCOUNTING,
    ),
    "accountants.rdp": ("RDPAccountant IAccountant", ACCOUNTING),
    "accountants.registry": (
        "register_accountant create_accountant IAccountant GaussianAccountant PRVAccountant "
        "RDPAccountant",
        ACCOUNTING,
    ),
    "accountants.utils": ("get_noise_multiplier create_accountant", ACCOUNTING),
    "data_loader": (
        "CollateFnWithEmpty wrap_collate_with_empty shape_safe dtype_safe DPDataLoader "
        "switch_generator DistributedUniformWithReplacementSampler UniformWithReplacementSampler",
        LOADERS,
    ),
    "distributed": (
        "average_gradients DifferentiallyPrivateDistributedDataParallel",
        "gradients of all processes are added up in optimizer.step(); leave it out",
    ),
    "grad_sample": (
        "GradSampleModule GradSampleHooks GradSampleModuleExpandedWeights GradSampleHooksNoOp "
        "GradSampleModuleNoOp GradSampleModuleFastGradientClipping AbstractGradSampleModule "
        "AbstractGradSampleHooks GradSampleHooksFastGradientClipping get_gsm_class prepare_module "
        "GradSampleModuleFastGradientClippingFSDP GradSampleHooksFastGradientClippingFSDP "
        "GradSampleModuleFastGradientClippingTP GradSampleHooksFastGradientClippingTP wrap_model "
        "create_or_accumulate_grad_sample register_grad_sampler register_norm_sampler "
        "compute_conv_grad_sample compute_sequence_bias_grad_sample compute_linear_grad_sample "
        "compute_rnn_linear_grad_sample compute_embedding_grad_sample compute_rms_norm_grad_sample "
        "compute_embedding_norm_sample compute_group_norm_grad_sample "
        "compute_instance_norm_grad_sample compute_layer_norm_grad_sample",
        GRADIENTS,
    ),
    "grad_sample.conv": (
        "compute_conv_grad_sample convolution2d_backward_as_a_convolution unfold2d unfold3d "
        "register_grad_sampler",
        RULES,
    ),
    "grad_sample.dp_multihead_attention": (
        "compute_sequence_bias_grad_sample SequenceBias register_grad_sampler",
        RULES,
    ),
    "grad_sample.dp_rnn": (
        "compute_rnn_linear_grad_sample RNNLinear register_grad_sampler",
        RULES,
    ),
    "grad_sample.embedding": (
        "compute_embedding_grad_sample compute_embeddingbag_gradsampler "
        "compute_embedding_norm_sample register_grad_sampler register_norm_sampler",
        RULES,
    ),
    "grad_sample.embedding_norm_sample": ("compute_embedding_norm_sample", RULES),
    "grad_sample.functorch": (
        "make_functional prepare_layer ft_compute_per_sample_gradient RNNLinear",
        GRADIENTS,
    ),
    "grad_sample.grad_sample_module": (
        "GradSampleModule GradSampleHooks create_or_accumulate_grad_sample prepare_layer "
        "promote_current_grad_sample ft_compute_per_sample_gradient AbstractGradSampleHooks "
        "AbstractGradSampleModule RNNLinear DPGRU DPLSTM DPRNN has_trainable_params requires_grad "
        "trainable_modules trainable_parameters",
        GRADIENTS,
    ),
    f"grad_sample.{_GSM}": (
        "create_norm_sample GradSampleHooksFastGradientClipping GradSampleHooks "
        "GradSampleModuleFastGradientClipping ft_compute_per_sample_gradient requires_grad "
        "create_or_accumulate_grad_sample promote_current_grad_sample AbstractGradSampleModule "
        "DPGRU DPLSTM DPRNN trainable_modules trainable_parameters",
        GRADIENTS,
    ),
    f"grad_sample.{_GSM}_fsdp": (
        "GradSampleHooksFastGradientClippingFSDP GradSampleModuleFastGradientClippingFSDP "
        "ft_compute_per_sample_gradient GradSampleHooksFastGradientClipping requires_grad "
        "AbstractGradSampleModule trainable_parameters",
        GRADIENTS,
    ),
    f"grad_sample.{_GSM}_tp": (
        "GradSampleHooksFastGradientClippingTP GradSampleModuleFastGradientClippingTP "
        "GradSampleHooksFastGradientClipping AbstractGradSampleModule",
        GRADIENTS,
    ),
    "grad_sample.group_norm": ("compute_group_norm_grad_sample register_grad_sampler", RULES),
    "grad_sample.gsm_base": (
        "AbstractGradSampleHooks AbstractGradSampleModule trainable_parameters",
        GRADIENTS,
    ),
    "grad_sample.gsm_exp_weights": (
        "GradSampleModuleExpandedWeights AbstractGradSampleModule",
        GRADIENTS,
    ),
    "grad_sample.gsm_no_op": (
        "GradSampleHooksNoOp GradSampleModuleNoOp AbstractGradSampleHooks AbstractGradSampleModule",
        GRADIENTS,
    ),
    "grad_sample.instance_norm": ("compute_instance_norm_grad_sample register_grad_sampler", RULES),
    "grad_sample.layer_norm": (
        "compute_layer_norm_grad_sample register_grad_sampler sum_over_all_but_batch_and_last_n",
        RULES,
    ),
    "grad_sample.linear": (
        "compute_linear_grad_sample compute_linear_norm_sample register_grad_sampler "
        "register_norm_sampler",
        RULES,
    ),
    "grad_sample.rms_norm": (
        "compute_rms_norm_grad_sample register_grad_sampler sum_over_all_but_batch_and_last_n",
        RULES,
    ),
    "grad_sample.utils": (
        "register_grad_sampler register_norm_sampler prepare_module wrap_model get_gsm_class "
        "get_hooks_class GradSampleModule GradSampleHooks GradSampleHooksFastGradientClipping "
        "GradSampleModuleFastGradientClipping GradSampleHooksFastGradientClippingFSDP "
        "GradSampleModuleFastGradientClippingFSDP GradSampleHooksFastGradientClippingTP "
        "AbstractGradSampleModule GradSampleModuleExpandedWeights GradSampleHooksNoOp "
        "GradSampleModuleNoOp",
        GRADIENTS,
    ),
    "layers": (f"{_LAYERS} SequenceBias RenameParamsMixin", INTERNAL),
    "layers.dp_multihead_attention": ("SequenceBias DPMultiheadAttention", INTERNAL),
    "layers.dp_rnn": (
        "apply_permutation RNNLinear DPRNNCellBase DPRNNCell DPGRUCell DPLSTMCell DPRNNBase DPRNN "
        "DPGRU DPLSTM compute_seq_lengths RenameParamsMixin",
        INTERNAL,
    ),
    "layers.param_rename": ("filter_out_old_keys RenameParamsMixin", INTERNAL),
    "lightning": ("DPLightningDataModule DPDataLoader", LIGHTNING),
    "optimizers": (
        "AdaClipDPOptimizer SimpleDistributedPerLayerOptimizer DistributedDPOptimizer "
        "DistributedDPOptimizerFastGradientClipping FSDPOptimizerFastGradientClipping DPOptimizer "
        "DPOptimizerFastGradientClipping DPPerLayerOptimizer get_optimizer_class",
        OPTIMIZERS,
    ),
    "optimizers.adaclipoptimizer": ("AdaClipDPOptimizer DPOptimizer", CLIPPING),
    "optimizers.ddp_perlayeroptimizer": (
        "SimpleDistributedPerLayerOptimizer DistributedPerLayerOptimizer DistributedDPOptimizer "
        "DPOptimizer DPPerLayerOptimizer",
        CLIPPING,
    ),
    "optimizers.ddpoptimizer": ("DistributedDPOptimizer DPOptimizer", OPTIMIZERS),
    "optimizers.ddpoptimizer_fast_gradient_clipping": (
        "DistributedDPOptimizerFastGradientClipping DPOptimizerFastGradientClipping",
        OPTIMIZERS,
    ),
    "optimizers.fsdpoptimizer_fast_gradient_clipping": (
        "FSDPOptimizerFastGradientClipping DPOptimizerFastGradientClipping",
        OPTIMIZERS,
    ),
    "optimizers.optimizer": ("DPOptimizer params _generate_noise", OPTIMIZERS),
    "optimizers.optimizer_fast_gradient_clipping": (
        "DPOptimizerFastGradientClipping DPOptimizer",
        OPTIMIZERS,
    ),
    "optimizers.perlayeroptimizer": ("DPPerLayerOptimizer DPOptimizer params", CLIPPING),
    "optimizers.utils": ("params", OPTIMIZERS),
    "schedulers": (
        "ExponentialGradClip LambdaGradClip StepGradClip ExponentialNoise LambdaNoise StepNoise",
        SCHEDULES,
    ),
    "schedulers.grad_clip_scheduler": (
        "ExponentialGradClip LambdaGradClip StepGradClip DPOptimizer",
        SCHEDULES,
    ),
    "schedulers.noise_scheduler": (
        "ExponentialNoise LambdaNoise StepNoise DPOptimizer",
        SCHEDULES,
    ),
    "utils": ("", INTERNAL),
    "utils.adaptive_clipping": (
        "DPLossFastGradientAdaptiveClipping DPTensorFastGradientAdaptiveClipping "
        "PrivacyEngineAdaptiveClipping",
        CLIPPING,
    ),
    "utils.adaptive_clipping.adaptive_clipping_utils": (
        "DPLossFastGradientAdaptiveClipping DPTensorFastGradientAdaptiveClipping "
        "PrivacyEngineAdaptiveClipping GradSampleHooksFastGradientClipping GradSampleModule "
        "GradSampleModuleFastGradientClipping DPOptimizerFastGradientClipping PrivacyEngine "
        "DPLossFastGradientClipping DPTensorFastGradientClipping",
        CLIPPING,
    ),
    "utils.batch_memory_manager": (
        "BatchSplittingSampler wrap_data_loader BatchMemoryManager DPOptimizer "
        "DistributedUniformWithReplacementSampler UniformWithReplacementSampler",
        LOADERS,
    ),
    "utils.fast_gradient_clipping_utils": (
        "DPTensorFastGradientClipping DPLossFastGradientClipping DPOptimizerFastGradientClipping "
        "GradSampleHooksFastGradientClipping GradSampleModuleFastGradientClipping",
        GRADIENTS,
    ),
    "utils.fsdp_utils": (
        "has_params iterate_submodules FSDP2Wrapper has_trainable_params "
        "GradSampleModuleFastGradientClippingFSDP",
        SHARDING,
    ),
    "utils.module_utils": (_MODULE_UTILS, INTERNAL),
    "utils.packed_sequences": ("_gen_packed_data compute_seq_lengths", INTERNAL),
    "utils.per_sample_gradients_utils": (
        "clone_module is_batch_empty ModelWithLoss compute_microbatch_grad_sample "
        "compute_opacus_grad_sample check_torch_version_for_ew_sample get_grad_sample_modes "
        "check_per_sample_gradients_are_correct compute_microbatch_grad_sample_tensor_or_seq "
        "compute_grad_samples_microbatch_and_opacus unpack_packedsequences wrap_model "
        "trainable_parameters compute_seq_lengths",
        GRADIENTS,
    ),
    "utils.tensor_utils": (
        "calc_sample_norms calc_sample_norms_one_layer sum_over_all_but_batch_and_last_n unfold2d "
        "unfold3d filter_dilated_rows",
        INTERNAL,
    ),
    "utils.uniform_sampler": (
        "UniformWithReplacementSampler DistributedUniformWithReplacementSampler",
        LOADERS,
    ),
    "validators": (f"ModuleValidator {_VALIDATOR} fix validate", VALIDATION),
    "validators.batch_norm": (f"validate fix {_ERRORS} {_VALIDATOR}", VALIDATION),
    "validators.errors": (_ERRORS, VALIDATION),
    "validators.gru": (f"validate fix DPGRU {_ERRORS} {_VALIDATOR}", VALIDATION),
    "validators.instance_norm": (f"validate fix clone_module {_ERRORS} {_VALIDATOR}", VALIDATION),
    "validators.lstm": (f"validate fix DPLSTM {_ERRORS} {_VALIDATOR}", VALIDATION),
    "validators.module_validator": (
        f"ModuleValidator clone_module get_submodule trainable_modules {_ERRORS}",
        VALIDATION,
    ),
    "validators.multihead_attention": (
        f"validate fix DPMultiheadAttention {_ERRORS} {_VALIDATOR}",
        VALIDATION,
    ),
    "validators.utils": (f"ModuleValidator {_VALIDATOR}", VALIDATION),
    "version": ("", INTERNAL),
}
_HOMES = {name: home for home, names in WORKS.items() for name in names.split()}


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
        """Refuse the call."""
        raise InvalidInputError(f"{cls.__name__} has no counterpart: {cls.remedy}")


def find(path: str, name: str) -> Any:
    """What a name of Opacus stands for; AttributeError if it is no name of it."""
    names, remedy = PATHS[path]
    if name not in names.split():
        raise AttributeError(
            f"{ROOT}.{path} has no {name!r}, which is no public name of Opacus 1.6; see "
            "docs/from_opacus.md"
        )
    if name in _HOMES:
        return getattr(import_module(f"{ROOT}.{_HOMES[name]}"), name)
    if name.startswith("Gaussian"):
        remedy = GDP
    return type(name, (Refused,), {"remedy": remedy, "__module__": f"{ROOT}.{path}"})


class _Modules(MetaPathFinder, Loader):
    """Makes the modules of the table when they are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A module of the table."""
        del path, target
        name = fullname.removeprefix(f"{ROOT}.")
        if name == fullname or name not in PATHS:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> None:
        """The usual one."""
        del spec

    def exec_module(self, module: ModuleType) -> None:
        """Names are looked up when they are asked for."""
        path = module.__name__.removeprefix(f"{ROOT}.")
        names = [name for name in PATHS[path][0].split() if not name.startswith("_")]
        kept: dict[str, Any] = {}

        def lookup(name: str) -> Any:
            if name not in kept:
                kept[name] = find(path, name)
            return kept[name]

        module.__doc__ = f"Names of Opacus's module {path}."
        module.__dict__.update(__getattr__=lookup, __all__=names)


def install() -> None:
    """Let the modules of the table be imported."""
    if not any(isinstance(finder, _Modules) for finder in sys.meta_path):
        sys.meta_path.append(_Modules())
