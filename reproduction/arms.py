"""What is run for a cell of the accuracy table: methods, and arms that explain DPSUR's figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpsur.config import data_facts
from dpsur.methods import METHODS, Method
from dpsur.methods.dpsur import Dpsur
from dpsur.presets import AUTO, PAPER, TUNED, Preset, preset_named
from dpsur.tasks import TASKS
from reproduction.released_code import (
    FirstRejectionsKept,
    KeptMomentum,
    OtherDivisor,
    RandomAcceptance,
    RandomAcceptanceKept,
    ReleasedCode,
    StaleLoss,
)


@dataclass(frozen=True)
class Arm:
    """A method with a preset, by default the paper's, under one accounting.

    `preset_of` names the method whose settings are used, `changes` what is different from them.
    Plain DP-SGD on the features of DPSUR is DPSGD-HF, and DPSGD-TS for reviews.
    """

    name: str
    label: str
    method: type[Method]
    preset_of: str
    accounting: str
    changes: tuple[tuple[str, Any], ...] = ()
    preset_name: str = PAPER

    def preset(self, task: str, epsilon: float) -> Preset:
        """Features, network and hyper-parameters."""
        facts = data_facts(TASKS[task])
        preset = preset_named(self.preset_name, self.preset_of, task, epsilon, facts)
        return preset.changed(dict(self.changes))

    @property
    def sound(self) -> bool:
        """Whether it is a method, whose accountings hold; controls and faulty ones are not."""
        return self.method in METHODS.values()

    def build(self, options: Mapping[str, Any]) -> Method:
        """The method with these hyper-parameters."""
        return self.method(**options)


METHOD_ARMS = tuple(
    Arm(name, name, METHODS[name], name, "proven")
    for name in ("dpis", "dpsgd-hf", "dpsgd-ts", "dpagd", "dpsgd", "nonprivate")
)
DPSUR_ARMS = (
    Arm("published", "Algorithm 1, published accounting", Dpsur, "dpsur", "published"),
    Arm("proven", "Algorithm 1, proven accounting", Dpsur, "dpsur", "proven"),
    Arm("released-code", "released code, claimed epsilon", ReleasedCode, "dpsur", "published"),
    Arm(
        "every-trial",
        "every trial charged, momentum kept",
        Dpsur,
        "dpsur",
        "every-trial",
        (("on_reject", "keep-momentum"),),
    ),
    Arm("kept-momentum", "momentum kept, not charged", KeptMomentum, "dpsur", "published"),
    Arm("random", "acceptance by a coin", RandomAcceptance, "dpsur", "published"),
    Arm(
        "random-kept",
        "acceptance by a coin, momentum kept",
        RandomAcceptanceKept,
        "dpsur",
        "published",
    ),
)
# Faults of the released code, but for the momentum, which is a control.
FAULT_ARMS = (
    Arm("stale-loss", "compared with a stale loss", StaleLoss, "dpsur", "published"),
    Arm("other-divisor", "divided by another batch's size", OtherDivisor, "dpsur", "published"),
    Arm(
        "first-rejections",
        "rejected updates kept until one is accepted",
        FirstRejectionsKept,
        "dpsur",
        "published",
    ),
)
# DPSGD-HF by the accounting of the paper, whose number of updates is a reference point.
HF_PUBLISHED = Arm(
    "dpsgd-hf-published",
    "dpsgd-hf, published accounting",
    METHODS["dpsgd-hf"],
    "dpsgd-hf",
    "published",
)
BEST_ARMS = tuple(
    Arm(f"best-{name}", f"{name}, preset tuned", METHODS[name], name, "proven", preset_name=TUNED)
    for name in ("dpsgd", "dpsur")
)

# What is chosen from public facts.
AUTO_ARMS = (Arm("auto", "preset auto", Dpsur, "dpsur", "proven", preset_name=AUTO),)

ARMS = {
    arm.name: arm
    for arm in (*DPSUR_ARMS, *FAULT_ARMS, *METHOD_ARMS, HF_PUBLISHED, *BEST_ARMS, *AUTO_ARMS)
}
