"""Attacks bite where there is something to bite, and not where membership is shuffled."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpsur.attacks.metrics import Scores, measure
from dpsur.attacks.suite import (
    SHUFFLED,
    Models,
    as_many,
    gap_attack,
    join,
    lira_offline,
    lira_online,
    log_odds,
    random_parts,
    relative_likelihood,
    rmia_scores,
    split_pool,
    target_log_odds,
    train_shadows,
    true_probability,
)
from dpsur.errors import InvalidInputError
from dpsur.functional.records import Examples
from reproduction.learned_attacks import (
    ATTACKS,
    Fitting,
    attack_target,
    fit_committee,
    last_layer_gradients,
    learn_from_shadow,
    seeded,
    shadow_attack,
    white_box_attack,
)
from reproduction.plain_targets import ManyModels, Recipe, standardised
from tests.statistics import FALSE_ALARM

CLASSES, WIDTH, SIZE = 4, 30, 900


def apart(scores, is_member):
    return Scores.halved(scores[is_member], scores[~is_member])


def network(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, CLASSES))


@pytest.fixture(scope="module")
def pool() -> Examples:
    """Labels that follow the inputs but for noise, which a network can learn by heart."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SIZE, WIDTH, generator=generator)
    labels = (inputs[:, :CLASSES] + 0.7 * torch.randn(SIZE, CLASSES, generator=generator)).argmax(1)
    return Examples(inputs, labels)


@pytest.fixture(scope="module")
def trainer() -> ManyModels:
    return ManyModels(network, F.cross_entropy, Recipe(epochs=60, batch_size=50, learning_rate=0.1))


@pytest.fixture(scope="module")
def split(pool):
    return split_pool(pool, seed=1)


@pytest.fixture(scope="module")
def models(trainer, split):
    return trainer(split.pool, [split.target_train, split.shadow_train], seed=2)


@pytest.fixture(scope="module")
def sides(split):
    """As many members as others."""
    members = as_many(split.target_train, len(split.target_test), seed=3)
    return split.examples(members), split.examples(split.target_test)


def test_the_split(split):
    parts = (split.target_train, split.target_test, split.shadow_train, split.shadow_test)
    assert [len(part) for part in parts] == [300, 150, 300, 150]
    assert len(torch.cat(parts).unique()) == SIZE
    with pytest.raises(InvalidInputError, match="four parts"):
        split_pool(split.pool.select(torch.arange(5)), seed=0)


def test_many_at_once_are_trained_as_one_by_one(pool):
    """Against torch.optim.SGD on whole batches, where the order of records plays no part."""
    rows = [torch.arange(40), torch.arange(100, 140)]
    recipe = Recipe(epochs=7, batch_size=40, learning_rate=0.1, weight_decay=0.01)
    trained = ManyModels(network, F.cross_entropy, recipe)(pool, rows, seed=5)
    start = ManyModels(network, F.cross_entropy, Recipe(epochs=1, learning_rate=1e-30, momentum=0))
    initial = start(pool, rows, seed=5)
    for index, part in enumerate(rows):
        module = initial.modules[index]
        optimizer = torch.optim.SGD(
            module.parameters(), lr=0.1, momentum=recipe.momentum, weight_decay=0.01
        )
        for _ in range(7):
            optimizer.zero_grad()
            F.cross_entropy(module(pool.inputs[part]), pool.targets[part]).backward()
            optimizer.step()
        expected = dict(module.named_parameters())
        for name, value in trained.modules[index].named_parameters():
            assert torch.allclose(value, expected[name], atol=1e-5)
    assert not torch.allclose(*(module.network[0].weight for module in trained.modules))


def test_models_need_equally_many_records(trainer, pool):
    with pytest.raises(InvalidInputError, match="equally many"):
        trainer(pool, [torch.arange(3), torch.arange(4)], seed=0)


def moved(pool: Examples) -> Examples:
    """The same records in other units, each input in its own."""
    units = torch.linspace(0.01, 100.0, WIDTH)
    return Examples(units * pool.inputs + 30 * units, pool.targets)


def test_standardised_models_take_raw_inputs(pool):
    """Units make no difference; without standardising they do."""
    rows = [torch.arange(100), torch.arange(100, 200)]
    answers = {}
    for standardise in (True, False):
        recipe = Recipe(epochs=5, batch_size=50, learning_rate=0.1, standardise=standardise)
        trainer = ManyModels(network, F.cross_entropy, recipe)
        answers[standardise] = []
        for records in (pool, moved(pool)):
            models = trainer(records, rows, seed=4)
            found = models.outputs(records.inputs)
            assert torch.allclose(found[1], models.modules[1](records.inputs), atol=1e-5)
            answers[standardise].append(found)
    assert torch.allclose(*answers[True], atol=0.02)
    assert not torch.allclose(*answers[False], atol=1.0)


def test_words_are_not_standardised():
    assert standardised(network, torch.arange(6).view(2, 3)) is network
    inputs = torch.stack([torch.tensor([1.0, 7.0]), torch.tensor([3.0, 7.0])])
    module = standardised(nn.Identity, inputs)()
    assert module(inputs).tolist() == [[-1.0, 0.0], [1.0, 0.0]]  # one of the two never differs


@pytest.mark.parametrize("tf32", [True, False])
def test_products_are_rounded_only_where_the_recipe_says_so(pool, tf32):
    seen = set()

    def loss(outputs, targets):
        seen.add((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))
        return F.cross_entropy(outputs, targets)

    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    ManyModels(network, loss, Recipe(epochs=1, tf32=tf32))(pool, [torch.arange(9)], seed=0)
    assert seen == {(tf32, tf32)}
    assert before == (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)


def test_a_committee_is_trained_by_adam():
    """Against torch.optim.AdamW on whole batches, with a rate that falls to zero."""
    generator = torch.Generator().manual_seed(0)
    members, others = (torch.randn(n, 3, generator=generator) for n in (20, 10))
    fitting = Fitting(networks=2, epochs=9, batch_size=100, learning_rate=0.05, least_steps=15)

    def make():
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))

    learned = fit_committee(make, [members], [others], fitting, seed=3)
    with seeded(3, torch.device("cpu")):
        networks = [make() for _ in range(2)]
    labels = torch.cat([torch.ones(20), torch.zeros(10)]).long()
    for module in networks:
        optimizer = torch.optim.AdamW(module.parameters(), weight_decay=fitting.weight_decay)
        for step in range(15):
            optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 15)
            optimizer.zero_grad()
            scores = module(torch.cat([members, others]))
            F.cross_entropy(scores, labels, weight=torch.tensor([1.5, 0.75])).backward()
            optimizer.step()
    answers = torch.stack([module(members) for module in networks]).double()
    expected = (answers[..., 1] - answers[..., 0]).mean(0)
    assert torch.allclose(learned.scores([members]), expected, atol=1e-4)


def test_last_layer_gradients_are_each_records_own(pool):
    module = network()
    examples = pool.select(torch.arange(6))
    outputs, gradients = last_layer_gradients(module, examples)
    assert torch.allclose(outputs, module(examples.inputs))
    for row in range(6):
        loss = F.cross_entropy(
            module(examples.inputs[row : row + 1]), examples.targets[row].view(1)
        )
        weight, bias = torch.autograd.grad(loss, [module[2].weight, module[2].bias])
        assert torch.allclose(gradients[row, :, :-1], weight, atol=1e-6)
        assert torch.allclose(gradients[row, :, -1], bias, atol=1e-6)
    with pytest.raises(InvalidInputError, match="no linear layer"):
        last_layer_gradients(nn.Sequential(nn.Tanh()), examples)


def test_log_odds_do_not_saturate():
    outputs = torch.tensor([[50.0, 0.0], [2.0, 1.0]])
    expected = torch.tensor([50.0, -1.0], dtype=torch.float64)
    assert torch.allclose(log_odds(outputs, torch.tensor([0, 1])), expected)


def accuracy(scores: Scores):
    return measure(scores, confidence=1 - FALSE_ALARM).balanced_accuracy


def shadow(models, split, sides):
    one, two = (Models([models.modules[index]]) for index in (0, 1))
    learned = learn_from_shadow(
        two, split.examples(split.shadow_train), split.examples(split.shadow_test)
    )
    return shadow_attack(one, learned, *sides)


def halves(examples):
    """Rows that the adversary of the white-box attack holds, and rows that it guesses about."""
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))
    return order[: len(order) // 2], order[len(order) // 2 :]


def white_box(models, sides):
    members, others = sides
    known, rest = halves(members)
    return white_box_attack(
        models.modules[0],
        known_members=members.select(known),
        known_others=others.select(known),
        members=members.select(rest),
        others=others.select(rest),
    )


def by_lot(sides):
    """The same numbers of records, members drawn by lot."""
    both = join(*sides)
    lots = torch.randperm(len(both), generator=torch.Generator().manual_seed(9))
    return both.select(lots[: len(sides[0])]), both.select(lots[len(sides[0]) :])


def test_the_target_is_overfitted(models, split, sides):
    right = models.outputs(split.pool.inputs)[0].argmax(1) == split.pool.targets
    train, test = right[split.target_train].float().mean(), right[split.target_test].float().mean()
    assert train > 0.95
    assert test < 0.75
    gap = accuracy(gap_attack(models, *sides))
    assert gap.value == pytest.approx(0.5 + (train - test).item() / 2, abs=0.03)


@pytest.fixture(scope="module")
def sure():
    """A target that answers many others rightly, but is surer of its members.

    Labels have no noise, and there are so many inputs that chance tells members apart.
    """
    width = 200
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1800, width, generator=generator)
    split = split_pool(Examples(inputs, inputs[:, :CLASSES].argmax(1)), seed=1)
    recipe = Recipe(epochs=60, batch_size=50, learning_rate=0.1)
    trainer = ManyModels(lambda: network(width), F.cross_entropy, recipe)
    rows = [split.target_train, split.shadow_train]
    return trainer(split.pool, rows, seed=2), split


def lead(scores: Scores, gap: Scores) -> float:
    """By how many standard errors an attack is right oftener than the gap attack on its records."""
    right = [
        np.concatenate([part.members > part.threshold, part.others <= part.threshold])
        for part in (scores, gap)
    ]
    difference = right[0].astype(float) - right[1]
    return float(difference.sum() / np.sqrt(max(1.0, (difference**2).sum())))


@pytest.mark.slow
def test_attacks_beat_the_gap_attack(sure):
    models, split = sure
    members = as_many(split.target_train, len(split.target_test), seed=3)
    sides = split.examples(members), split.examples(split.target_test)
    gap = gap_attack(models, *sides)
    assert lead(shadow(models, split, sides), gap) > 5
    guessed = tuple(part.select(halves(part)[1]) for part in sides)
    gap_there = gap_attack(models, *guessed)
    assert lead(white_box(models, sides), gap_there) > 5
    # the control: of a membership by lot nothing is learned, and the gap attack is as good
    lots = by_lot(sides)
    gap_by_lot = gap_attack(models, *(part.select(halves(part)[1]) for part in lots))
    assert abs(lead(white_box(models, lots), gap_by_lot)) < 5


def test_shuffled_membership_is_not_found(models, split, sides):
    shuffled = by_lot(sides)
    for scores in (shadow(models, split, shuffled), white_box(models, shuffled)):
        figure = accuracy(scores)
        assert figure.low < 0.5 < figure.high


@pytest.fixture(scope="module")
def lira(trainer, pool, split, models):
    candidates = torch.cat([split.target_train[:150], split.target_test])
    shadows = train_shadows(trainer, pool, candidates, 300, models=16, seed=11)
    member = np.arange(300) < 150
    target = Models([models.modules[0]])
    odds = target_log_odds(target, split.examples(candidates))
    return candidates, shadows, member, odds


def test_likelihood_ratios(lira):
    _, shadows, member, odds = lira
    online = measure(replace(apart(lira_online(odds, shadows), member), threshold=0.0))
    offline = measure(apart(lira_offline(odds, shadows), member))
    assert online.auc.low > 0.75
    assert offline.auc.low > 0.65
    lots = np.random.default_rng(0).permutation(member)
    shuffled = replace(apart(lira_online(odds, shadows), lots), threshold=0.0)
    control = measure(shuffled, confidence=1 - FALSE_ALARM)
    assert control.auc.low < 0.5 < control.auc.high


def test_rmia(lira, split, models):
    candidates, shadows, member, _ = lira
    examples = split.examples(candidates)
    target = true_probability(models.outputs(examples.inputs)[0], examples.targets)
    reference = true_probability(shadows.outputs, examples.targets)
    known = torch.from_numpy(shadows.member)
    for online in (True, False):
        ratio = relative_likelihood(target, reference, known, online=online)
        scores = rmia_scores(ratio, ratio)
        found = measure(apart(scores, member))
        assert found.auc.low > 0.6
    with pytest.raises(InvalidInputError, match="train more"):
        relative_likelihood(target, reference, torch.ones_like(known), online=False)


def test_parts_cover_all_records_alike():
    for pool, size, count in ((90, 30, 7), (100, 30, 16), (10, 7, 5)):
        parts = random_parts(pool, size, count, seed=0)
        assert [len(part.unique()) for part in parts] == [size] * count
        times = torch.bincount(torch.cat(parts), minlength=pool)
        assert times.max() - times.min() <= 1 + (pool % size > 0)


@pytest.mark.slow
def test_all_attacks_at_once(trainer, split):
    found = attack_target(split, trainer, list(ATTACKS), seed=0, shadow_models=6)
    controls = {name + SHUFFLED for name in ATTACKS if name != "gap"}
    assert set(found.scores) == {*ATTACKS, *controls}
    assert found.train_accuracy > 0.95 > found.test_accuracy + 0.2
    for guessed in (found.scores["white-box"], found.scores["white-box, shuffled"]):
        assert len(guessed.members) == len(guessed.others) == len(split.target_test) // 2
    for name, scores in found.scores.items():
        area = measure(scores, confidence=1 - FALSE_ALARM).auc
        assert (area.low < 0.5 < area.high) == (name in controls), name
    with pytest.raises(InvalidInputError, match="unknown attack"):
        attack_target(split, trainer, ["nope"], seed=0)


def test_a_memorising_model_is_an_open_book():
    """Labels at random: whoever answers right has seen the record."""
    generator = torch.Generator().manual_seed(0)
    pool = Examples(
        torch.randn(600, WIDTH, generator=generator),
        torch.randint(CLASSES, (600,), generator=generator),
    )
    split = split_pool(pool, seed=0)
    recipe = Recipe(epochs=150, batch_size=50, learning_rate=0.1)
    trainer = ManyModels(network, F.cross_entropy, recipe)
    models = trainer(pool, [split.target_train, split.shadow_train], seed=0)
    sides = tuple(split.examples(rows) for rows in (split.target_train[:100], split.target_test))
    assert accuracy(shadow(models, split, sides)).value > 0.9
    assert accuracy(white_box(models, sides)).value > 0.9
