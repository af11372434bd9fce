"""Published attacks on noise succeed on the usual mechanism, and are guesses on ours."""

import math

import pytest
import torch

from dpsur.mechanism import gaussian
from dpsur.mechanism.streams import NOISE, Streams
from reproduction.experiments import noise_attacks
from tests.statistics import STANDARD_ERRORS

TRIALS = 200


@pytest.mark.parametrize("attack", noise_attacks.ATTACKS)
def test_an_attack_finds_the_usual_mechanism_and_not_ours(attack, monkeypatch):
    monkeypatch.setattr(noise_attacks, "TRIALS", TRIALS)
    usual, ours = noise_attacks.ATTACKS[attack]()
    assert usual > (0.55 if attack == "time" else 0.95)
    assert abs(ours - 0.5) <= STANDARD_ERRORS * 0.5 / math.sqrt(TRIALS) + 0.01


def noise_in_floating_point(patch):
    patch.setattr(
        gaussian, "add_noise", lambda total, *_: {"": noise_attacks.in_float64(total.params[""], 1)}
    )


def an_address_used_again(patch):
    kept = Streams(None, torch.device("cpu"))
    real = gaussian.add_noise
    patch.setattr(gaussian, "add_noise", lambda total, s, _: real(total, s, kept.at(1)[NOISE]))


@pytest.mark.parametrize(
    ("attack", "mutant"),
    [
        (noise_attacks.last_bits, noise_in_floating_point),
        (noise_attacks.repeated_seed, an_address_used_again),
    ],
)
def test_mutants_of_ours_are_found(attack, mutant, monkeypatch):
    monkeypatch.setattr(noise_attacks, "TRIALS", 50)
    mutant(monkeypatch)
    assert attack(noise_attacks.ours) > 0.95
