"""Updates from noisy sums of clipped gradients, as a procedure (Alg. 1, L3-8)."""

from torch import Tensor

from dpsur.functional.parameters import Params
from dpsur.functional.problem import Problem
from dpsur.mechanism.dp_gradient import noisy_mean_gradient
from dpsur.mechanism.state import State
from dpsur.mechanism.streams import BATCH, NOISE, Streams
from dpsur.methods.gradient_steps import GradientSteps
from dpsur.methods.noisy_steps import NoisySteps
from dpsur.privacy.events import SampledGaussian, Step
from dpsur.privacy.plans import AnyPlan, Plan


class NoisyGradientSteps(GradientSteps):
    """DP-SGD: every candidate is a step along a noisy sum of clipped gradients."""

    def __init__(
        self, method: NoisySteps, problem: Problem, plan: AnyPlan, streams: Streams
    ) -> None:
        super().__init__(method, problem, plan, streams)
        assert isinstance(plan, Plan)
        assert isinstance(plan.trial.update, SampledGaussian)
        self._trial = plan.trial
        self._event = plan.trial.update
        self._max_grad_norm = method.max_grad_norm

    def step(self, state: State) -> Step:  # noqa: ARG002
        """The same trial every time."""
        return self._trial

    def _gradient(self, state: State) -> tuple[Params, Tensor | None]:
        return self._noisy_gradient(state.params)

    def _noisy_gradient(self, params: Params) -> tuple[Params, Tensor | None]:
        event = self._event
        batch = self._draw(self._problem.train, event.sample_rate, self._streams[BATCH])
        with self._layer_randomness():
            gradient = noisy_mean_gradient(
                self._problem,
                params,
                batch,
                event.sample_rate,
                event.noise_multiplier,
                self._max_grad_norm,
                self._streams[NOISE],
            )
        return gradient, batch.overflow
