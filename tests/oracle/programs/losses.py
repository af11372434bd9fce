"""Losses: all of torch.nn, those that people write themselves, and those that couple records."""

import math

import torch
import torch.nn.functional as F
from torch import distributions as D
from torch import nn

from tests.oracle.harness import BOUNDED, BOUNDED_OR_STOPPED, Setup
from tests.oracle.programs import add, family
from tests.oracle.programs.models import BagOfWords, Tagger, TwoLayers, mlp
from tests.oracle.records import CLASSES, IMAGES, REGRESSION, SEGMENTATION, TABLE, TEXTS, WORDS

legitimate, coupled = family("losses")


# --- torch.nn -------------------------------------------------------------------------------------


def one_hot(y):
    return F.one_hot(y, CLASSES).to(torch.get_default_dtype())


def signs(y):
    return 2 * one_hot(y) - 1


TORCH_LOSSES = {
    "CrossEntropyLoss": lambda o, y: nn.CrossEntropyLoss()(o, y),
    "CrossEntropyLoss sum": lambda o, y: nn.CrossEntropyLoss(reduction="sum")(o, y),
    "CrossEntropyLoss label smoothing": lambda o, y: nn.CrossEntropyLoss(label_smoothing=0.1)(o, y),
    "CrossEntropyLoss class weights": lambda o, y: F.cross_entropy(
        o, y, weight=torch.tensor([1.0, 2.0, 5.0], device=o.device, dtype=o.dtype)
    ),
    "CrossEntropyLoss of probabilities": lambda o, y: nn.CrossEntropyLoss()(o, one_hot(y)),
    "NLLLoss": lambda o, y: nn.NLLLoss()(o.log_softmax(1), y),
    "BCEWithLogitsLoss": lambda o, y: nn.BCEWithLogitsLoss()(o, one_hot(y)),
    "BCEWithLogitsLoss pos_weight": lambda o, y: F.binary_cross_entropy_with_logits(
        o, one_hot(y), pos_weight=torch.tensor([1.0, 2.0, 3.0], device=o.device, dtype=o.dtype)
    ),
    "BCELoss": lambda o, y: nn.BCELoss()(o.sigmoid(), one_hot(y)),
    "KLDivLoss": lambda o, y: nn.KLDivLoss(reduction="batchmean")(o.log_softmax(1), one_hot(y)),
    "MSELoss": lambda o, y: nn.MSELoss()(o, one_hot(y)),
    "L1Loss": lambda o, y: nn.L1Loss()(o, one_hot(y)),
    "HuberLoss": lambda o, y: nn.HuberLoss()(o, one_hot(y)),
    "SmoothL1Loss": lambda o, y: nn.SmoothL1Loss()(o, one_hot(y)),
    "SoftMarginLoss": lambda o, y: nn.SoftMarginLoss()(o, signs(y)),
    "PoissonNLLLoss": lambda o, y: nn.PoissonNLLLoss()(o, one_hot(y)),
    "GaussianNLLLoss": lambda o, y: nn.GaussianNLLLoss()(o, one_hot(y), o.exp()),
    "MultiMarginLoss": lambda o, y: nn.MultiMarginLoss()(o, y),
    "MultiLabelMarginLoss": lambda o, y: nn.MultiLabelMarginLoss()(
        o, torch.cat([y[:, None], torch.full_like(y[:, None], -1).expand(-1, CLASSES - 1)], 1)
    ),
    "MultiLabelSoftMarginLoss": lambda o, y: nn.MultiLabelSoftMarginLoss()(o, one_hot(y)),
    "HingeEmbeddingLoss": lambda o, y: nn.HingeEmbeddingLoss()(o, signs(y)),
    "MarginRankingLoss": lambda o, y: nn.MarginRankingLoss()(o[:, 0], o[:, 1], signs(y)[:, 0]),
    "TripletMarginLoss": lambda o, y: nn.TripletMarginLoss()(o, o.roll(1, 1), one_hot(y)),
    "TripletMarginWithDistanceLoss": lambda o, y: nn.TripletMarginWithDistanceLoss()(
        o, o.roll(1, 1), one_hot(y)
    ),
    "CosineEmbeddingLoss": lambda o, y: nn.CosineEmbeddingLoss()(o, one_hot(y), signs(y)[:, 0]),
}
for name, criterion in TORCH_LOSSES.items():
    add(
        TABLE,
        lambda criterion=criterion: Setup(mlp(), criterion=criterion),
        family="losses",
        name=f"torch.nn {name}",
        legitimate=True,
        # asserts that its inputs are probabilities
        private_step=BOUNDED_OR_STOPPED if name == "BCELoss" else BOUNDED,
        fit=BOUNDED,
    )


@legitimate(TEXTS)
def torch_nn_CTCLoss():  # noqa: N802
    def loss(model, batch):
        text, label = batch
        scores = model(text).log_softmax(2).transpose(0, 1)
        lengths = torch.full((len(text),), text.shape[1], dtype=torch.long)
        ones = torch.ones(len(text), dtype=torch.long)
        return F.ctc_loss(scores, label[:, None] + 1, lengths, ones, zero_infinity=True)

    return Setup(Tagger(CLASSES + 1), loss)


# --- losses that people write ---------------------------------------------------------------------


def of(criterion, model=mlp):
    return Setup(model(), criterion=criterion)


@legitimate(TABLE, fit=BOUNDED)
def focal():
    def criterion(out, y):
        log = F.log_softmax(out, 1).gather(1, y[:, None]).squeeze(1)
        return (-((1 - log.exp()) ** 2) * log).mean()

    return of(criterion)


@legitimate(TABLE, fit=BOUNDED)
def focal_by_cross_entropy():
    def criterion(out, y):
        ce = F.cross_entropy(out, y, reduction="none")
        return (0.25 * (1 - torch.exp(-ce)) ** 2 * ce).mean()

    return of(criterion)


@legitimate(TABLE, fit=BOUNDED)
def log_probability_by_index():
    def criterion(out, y):
        return -F.log_softmax(out, 1)[torch.arange(len(y), device=y.device), y].mean()

    return of(criterion)


@legitimate(TABLE, fit=BOUNDED)
def cosine_to_prototypes():
    def criterion(out, y):
        prototypes = torch.eye(CLASSES, device=out.device, dtype=out.dtype)
        return F.cross_entropy(F.normalize(out, dim=1) @ prototypes.T, y)

    return of(criterion)


@legitimate(TABLE, fit=BOUNDED)
def hinge():
    return of(lambda out, y: F.relu(1 - signs(y) * out).mean())


@legitimate(TABLE, fit=BOUNDED)
def squared_hinge_where():
    def criterion(out, y):
        gap = 1 - signs(y) * out
        return torch.where(gap > 0, gap**2, torch.zeros_like(gap)).sum(1).mean()

    return of(criterion)


@legitimate(TABLE, fit=BOUNDED)
def largest_wrong_class():
    def criterion(out, y):
        right = out.gather(1, y[:, None]).squeeze(1)
        wrong = out.scatter(1, y[:, None], -1e4).max(1).values
        return F.relu(1 + wrong - right).mean()

    return of(criterion)


@legitimate(TABLE, fit=BOUNDED)
def entropy_bonus():
    def criterion(out, y):
        p = out.softmax(1)
        entropy = -(p * p.clamp(min=1e-9).log()).sum(1)
        return F.cross_entropy(out, y) - 0.1 * entropy.mean()

    return of(criterion)


@legitimate(TABLE, private_step=BOUNDED_OR_STOPPED, fit=BOUNDED)
def categorical():
    return of(lambda out, y: -D.Categorical(logits=out).log_prob(y).mean())


@legitimate(TABLE, fit=BOUNDED)
def categorical_without_validation():
    return of(lambda out, y: -D.Categorical(logits=out, validate_args=False).log_prob(y).mean())


@legitimate(REGRESSION, fit=BOUNDED)
def normal_likelihood():
    def criterion(out, y):
        mean, log_scale = out.unbind(1)
        found = D.Normal(mean, log_scale.exp(), validate_args=False)
        return -found.log_prob(y).mean()

    return of(criterion, lambda: mlp(outputs=2))


@legitimate(REGRESSION, fit=BOUNDED)
def mixture_density():
    def criterion(out, y):
        weights, means, scales = out.chunk(3, 1)
        each = -0.5 * ((y[:, None] - means) / scales.exp()) ** 2 - scales
        return -torch.logsumexp(weights.log_softmax(1) + each, 1).mean()

    return of(criterion, lambda: mlp(outputs=9))


@legitimate(REGRESSION, fit=BOUNDED)
def quantiles():
    def criterion(out, y):
        levels = torch.tensor([0.1, 0.5, 0.9], device=out.device, dtype=out.dtype)
        gap = y[:, None] - out
        return torch.maximum(levels * gap, (levels - 1) * gap).mean()

    return of(criterion)


@legitimate(REGRESSION, fit=BOUNDED)
def root_of_squared_error():
    return of(lambda out, y: (F.mse_loss(out[:, 0], y) + 1e-6).sqrt())


@legitimate(REGRESSION, fit=BOUNDED)
def log_cosh():
    return of(lambda out, y: torch.log(torch.cosh((out[:, 0] - y).clamp(-20, 20))).mean())


@legitimate(REGRESSION, fit=BOUNDED)
def tweedie():
    def criterion(out, y):
        mean = out[:, 0].exp()
        return (-y.abs() * mean**-0.5 / -0.5 + mean**0.5 / 0.5).mean()

    return of(criterion)


@legitimate(TABLE, fit=BOUNDED)
def stack_of_two_losses():
    def criterion(out, y):
        return torch.stack([F.cross_entropy(out, y), out.square().mean()]).sum()

    return of(criterion)


@legitimate(TABLE, fit=BOUNDED)
def class_weight_by_index():
    def criterion(out, y):
        weights = torch.tensor([1.0, 2.0, 5.0], device=out.device, dtype=out.dtype)
        return (weights[y] * F.cross_entropy(out, y, reduction="none")).mean()

    return of(criterion)


@legitimate(TABLE)
def weight_from_the_record():
    def loss(model, batch):
        x, y = batch
        weights = x[:, 0].sigmoid()
        return (weights * F.cross_entropy(model(x), y, reduction="none")).mean()

    return Setup(mlp(), loss)


@legitimate(TABLE, fit=BOUNDED)
def temperature_and_einsum():
    def criterion(out, y):
        mixing = torch.eye(CLASSES, device=out.device, dtype=out.dtype) + 0.1
        return F.cross_entropy(torch.einsum("bi,ij->bj", out / 2.0, mixing), y)

    return of(criterion)


@legitimate(TABLE, fit=BOUNDED)
def binary_of_masked_choice():
    def criterion(out, y):
        chosen = torch.masked_select(out, F.one_hot(y, CLASSES).bool())
        return F.softplus(-chosen).mean()

    return of(criterion)


@legitimate(TABLE, fit=BOUNDED)
def angles():
    def criterion(out, y):
        cosine = F.normalize(out, dim=1).clamp(-0.99, 0.99)
        return F.cross_entropy(4 * torch.cos(torch.acos(cosine) + 0.1 * one_hot(y)), y)

    return of(criterion)


@legitimate(TABLE, fit=BOUNDED)
def ordered_within_records():
    def criterion(out, y):
        best = out.topk(2, 1).values.sum(1) + out.sort(1).values.cumsum(1)[:, 0]
        return F.cross_entropy(out, y) + 0.1 * best.square().mean()

    return of(criterion)


@legitimate(TABLE, fit=BOUNDED)
def masked_fill():
    def criterion(out, y):
        return F.cross_entropy(out.masked_fill(out < -3, -1e4), y)

    return of(criterion)


@legitimate(TABLE, fit=BOUNDED)
def written_into_zeros():
    def criterion(out, y):
        target = torch.zeros_like(out)
        target[torch.arange(len(y), device=y.device), y] = 1
        return -(target * out.log_softmax(1)).sum(1).mean()

    return of(criterion)


@legitimate(TABLE, fit=BOUNDED)
def written_into_new_zeros():
    def criterion(out, y):
        target = torch.zeros(len(y), CLASSES, device=out.device, dtype=out.dtype)
        target.scatter_(1, y[:, None], 1.0)
        return F.mse_loss(out.sigmoid(), target)

    return of(criterion)


@legitimate(TABLE, fit=BOUNDED)
def one_hot_without_classes():
    def criterion(out, y):
        return F.mse_loss(out[:, :CLASSES], F.one_hot(y.clamp(max=2), CLASSES).to(out.dtype))

    return of(criterion)


@legitimate(TABLE, fit=BOUNDED)
def top_k_of_a_record():
    return of(lambda out, y: F.relu(1 + out.topk(2, 1).values - out[:, :1]).mean())


@legitimate(TABLE, fit=BOUNDED)
def ranks_of_a_record():
    return of(lambda out, y: (out.sort(1).values * torch.arange(3.0, device=out.device)).mean())


@legitimate(TABLE, fit=BOUNDED)
def ordinal_cumulative():
    return of(lambda out, y: (out.softmax(1).cumsum(1) - one_hot(y).cumsum(1)).square().mean())


@legitimate(TABLE, fit=BOUNDED)
def symmetric_cross_entropy():
    def criterion(out, y):
        p, target = out.softmax(1).clamp(min=1e-7), one_hot(y).clamp(min=1e-4)
        return F.cross_entropy(out, y) + 0.1 * -(p * target.log()).sum(1).mean()

    return of(criterion)


@legitimate(TABLE, fit=BOUNDED)
def additive_margin():
    def criterion(out, y):
        cosine = F.normalize(out, dim=1, eps=1e-6)
        return F.cross_entropy(10 * (cosine - 0.3 * one_hot(y)), y)

    return of(criterion)


@legitimate(TABLE, fit=BOUNDED)
def probability_of_sigmoid_by_where():
    def criterion(out, y):
        p = out.sigmoid()
        return -torch.where(one_hot(y) == 1, p, 1 - p).clamp(min=1e-6).log().mean()

    return of(criterion)


class Segmenter(nn.Module):
    def __init__(self, classes=1):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, classes, 1)

    def forward(self, x):
        return self.two(self.one(x).relu())


@legitimate(SEGMENTATION, fit=BOUNDED)
def dice():
    def criterion(out, y):
        p, target = out.squeeze(1).sigmoid().flatten(1), y.to(out.dtype).flatten(1)
        score = (2 * (p * target).sum(1) + 1) / (p.sum(1) + target.sum(1) + 1)
        return (1 - score).mean()

    return of(criterion, Segmenter)


@legitimate(SEGMENTATION, fit=BOUNDED)
def dice_over_all_pixels():
    """Of all records together; alone it is each record's."""

    def criterion(out, y):
        p, target = out.squeeze(1).sigmoid(), y.to(out.dtype)
        return 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)

    return of(criterion, Segmenter)


@legitimate(SEGMENTATION, fit=BOUNDED)
def pixel_cross_entropy():
    return of(lambda out, y: F.cross_entropy(out, y.clamp(0, 2)), lambda: Segmenter(3))


@legitimate(IMAGES, fit=BOUNDED)
def total_variation():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            return self.body(x)

    def criterion(out, y):
        return (out[..., 1:] - out[..., :-1]).abs().mean() + out.square().mean()

    return of(criterion, Net)


def next_words(model, batch, **options):
    text, _ = batch
    out = model(text[:, :-1])
    return F.cross_entropy(out.reshape(-1, WORDS), text[:, 1:].reshape(-1), **options)


@legitimate(TEXTS)
def language_model():
    return Setup(Tagger(WORDS), next_words)


@legitimate(TEXTS)
def language_model_ignored_padding():
    """A text of padding alone has no words to predict: its loss is NaN and counts for nothing."""
    return Setup(Tagger(WORDS), lambda m, b: next_words(m, b, ignore_index=0))


@legitimate(TEXTS)
def language_model_ignored_and_smoothed():
    return Setup(Tagger(WORDS), lambda m, b: next_words(m, b, ignore_index=0, label_smoothing=0.1))


@legitimate(TEXTS)
def mean_over_words_that_count():
    def loss(model, batch):
        text, _ = batch
        used = (text[:, 1:] != 0).to(torch.get_default_dtype())
        each = F.cross_entropy(model(text[:, :-1]).transpose(1, 2), text[:, 1:], reduction="none")
        return (each * used).sum() / used.sum().clamp(min=1)

    return Setup(Tagger(WORDS), loss)


@legitimate(TEXTS)
def last_word_of_each():
    def loss(model, batch):
        text, y = batch
        last = (text != 0).sum(1).clamp(min=1) - 1
        return F.cross_entropy(model(text)[torch.arange(len(y), device=y.device), last], y)

    return Setup(Tagger(), loss)


# --- losses that couple records -------------------------------------------------------------------


@coupled(REGRESSION)
def target_centred_by_batch():
    return of(lambda out, y: F.mse_loss(out.squeeze(1), y - y.mean()), lambda: mlp(outputs=1))


TARGETS_OF_THE_BATCH = {
    "target scaled by batch": lambda o, y: F.mse_loss(o, y / (y.std(unbiased=False) + 1e-3)),
    "target above the median": lambda o, y: F.binary_cross_entropy_with_logits(
        o, (y > y.median()).to(o.dtype)
    ),
    "squared by hand from the mean": lambda o, y: ((o - (y - y.mean())) ** 2).mean(),
}
for name, criterion in TARGETS_OF_THE_BATCH.items():
    add(
        REGRESSION,
        lambda criterion=criterion: of(
            lambda out, y: criterion(out.squeeze(1), y), lambda: mlp(outputs=1)
        ),
        family="losses",
        name=name,
        legitimate=False,
    )


@coupled(TABLE)
def probabilities_shifted_by_the_batch():
    def loss(out, y):
        shift = F.one_hot(y, CLASSES).to(out.dtype).mean(0)
        return F.cross_entropy(out, 0.9 * one_hot(y) + 0.1 * shift)

    return of(loss)


@coupled(TABLE)
def class_shifted_by_the_batch():
    return of(lambda out, y: -out.log_softmax(1).gather(1, (y + y.sum())[:, None] % 3).mean())


@coupled(REGRESSION, draws=True)
def target_standardised_with_noisy_inputs():
    def loss(model, batch):
        x, y = batch
        x = x + 0.01 * torch.randn_like(x)
        return F.mse_loss(model(x).squeeze(1), (y - y.mean()) / (y.std(unbiased=False) + 1e-6))

    return Setup(mlp(outputs=1), loss)


@coupled(TABLE, fit=BOUNDED)
def logits_adjusted_by_batch_prior():
    def criterion(out, y):
        prior = one_hot(y).mean(0)
        return F.cross_entropy(out + torch.log(prior + 1e-9), y)

    return of(criterion)


@coupled(TABLE)
def prior_by_bincount():
    def criterion(out, y):
        prior = torch.bincount(y, minlength=CLASSES).float() / len(y)
        return F.cross_entropy(out + torch.log(prior + 1e-9), y)

    return of(criterion)


@coupled(TABLE, fit=BOUNDED)
def outputs_centred_by_batch():
    return of(lambda out, y: F.cross_entropy(out - out.detach().mean(0), y))


@coupled(TABLE)
def class_weights_of_the_batch():
    def criterion(out, y):
        counts = one_hot(y).sum(0)
        return F.cross_entropy(out, y, weight=len(y) / (counts + 1))

    return of(criterion)


@coupled(TABLE)
def row_weights_of_the_batch():
    def criterion(out, y):
        weights = 1 / (torch.bincount(y, minlength=CLASSES).float() + 1)
        return (F.cross_entropy(out, y, reduction="none") * weights[y]).mean()

    return of(criterion)


@coupled(TABLE)
def softmax_over_records():
    def criterion(out, y):
        each = F.cross_entropy(out, y, reduction="none")
        return (each.detach().nan_to_num(0, 0, 0).softmax(0) * each).sum()

    return of(criterion)


@coupled(REGRESSION)
def policy_gradient_with_batch_baseline():
    def loss(model, batch):
        x, reward = batch
        action = (x[:, 0] > 0).long()
        log = F.log_softmax(model(x), 1).gather(1, action[:, None]).squeeze(1)
        return (-log * (reward - reward.mean())).mean()

    return Setup(mlp(), loss)


@coupled(TABLE)
def info_nce():
    def loss(model, batch):
        found = F.normalize(model(batch[0]), dim=1)
        return F.cross_entropy(found @ found.detach().T, torch.arange(len(found)))

    return Setup(mlp(outputs=4), loss)


@coupled(TABLE)
def batch_hard_triplets():
    def loss(model, batch):
        x, y = batch
        found = model(x)
        apart = torch.cdist(found, found)
        hardest = F.relu(apart.max(1).values - apart.min(1).values + 1).mean()
        return F.cross_entropy(found, y) + hardest

    return Setup(mlp(outputs=4), loss)


@coupled(TABLE)
def hardest_half():
    return of(
        lambda out, y: (
            F.cross_entropy(out, y, reduction="none").topk((len(y) + 1) // 2).values.mean()
        )
    )


@coupled(TABLE)
def hardest_record_only():
    return of(lambda out, y: F.cross_entropy(out, y, reduction="none").max())


@coupled(TABLE)
def log_sum_exp_over_records():
    return of(lambda out, y: torch.logsumexp(F.cross_entropy(out, y, reduction="none"), 0))


@coupled(TABLE)
def group_worst_case():
    def criterion(out, y):
        each = F.cross_entropy(out, y, reduction="none")
        groups = torch.stack(
            [(each * (y == k)).sum() / (y == k).sum().clamp(min=1) for k in (0, 1)]
        )
        return groups.max()

    return of(criterion)


@coupled(TABLE)
def variance_penalty_over_records():
    def criterion(out, y):
        each = F.cross_entropy(out, y, reduction="none")
        return each.mean() + each.var(unbiased=False)

    return of(criterion)


@coupled(TABLE)
def decorrelated_features():
    def criterion(out, y):
        centred = out - out.mean(0)
        return F.cross_entropy(out, y) + (centred.T @ centred).square().mean()

    return of(criterion)


@coupled(TABLE)
def balance_of_mean_prediction():
    def criterion(out, y):
        mean = out.softmax(1).mean(0)
        return F.cross_entropy(out, y) + (mean * mean.log()).sum()

    return of(criterion)


@coupled(TABLE)
def in_batch_permutation_as_target():
    def loss(model, batch):
        out = model(batch[0])
        return F.mse_loss(out, out.detach().roll(1, 0))

    return Setup(mlp(outputs=4), loss)


@coupled(TABLE)
def choice_of_loss_by_batch():
    def criterion(out, y):
        return F.cross_entropy(out, y) if (y != 2).all() else F.cross_entropy(-out, y)

    return of(criterion)


@coupled(TABLE)
def loss_divided_by_its_value():
    def criterion(out, y):
        loss = F.cross_entropy(out, y)
        return loss / loss.detach()

    return of(criterion)


@coupled(TABLE)
def scaled_by_a_python_number_of_the_batch():
    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y) * min(x.abs().mean().item(), 1e3)

    return Setup(mlp(), loss)


@coupled(TABLE)
def skipped_if_not_finite():
    def criterion(out, y):
        loss = F.cross_entropy(out, y)
        return loss if torch.isfinite(loss) else 0 * out.sum()

    return of(criterion)


@coupled(TEXTS)
def position_of_the_longest_text():
    def loss(model, batch):
        text, y = batch
        last = int((text != 0).sum(1).max())
        return F.cross_entropy(model(text)[:, max(last - 1, 0)], y)

    return Setup(Tagger(), loss)


@coupled(TEXTS)
def sum_up_to_the_longest_text():
    def loss(model, batch):
        text, y = batch
        longest = max(int((text != 0).sum(1).max()), 1)
        return F.cross_entropy(model(text)[:, :longest].sum(1), y, reduction="sum")

    return Setup(Tagger(), loss, options={"loss_reduction": "sum"})


@coupled(TABLE)
def router_load_balance():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(6, 2)
            self.experts = nn.ModuleList([nn.Linear(6, CLASSES) for _ in range(2)])

        def forward(self, x):
            gates = self.router(x).softmax(1)
            each = torch.stack([expert(x) for expert in self.experts], 1)
            return (each * gates[..., None]).sum(1), gates

    def loss(model, batch):
        out, gates = model(batch[0])
        return F.cross_entropy(out, batch[1]) + 0.1 * gates.mean(0).square().sum()

    return Setup(Experts(), loss)


@coupled(TABLE)
def hook_on_outputs_scales_by_the_batch():
    def loss(model, batch):
        out = model(batch[0]) * 1.0
        out.register_hook(lambda grad: grad / (grad.norm() + 1e-9))
        return F.cross_entropy(out, batch[1])

    return Setup(TwoLayers(), loss)


@coupled(TEXTS)
def inverse_word_frequency_of_the_batch():
    def loss(model, batch):
        text, y = batch
        counts = F.one_hot(text, WORDS).sum((0, 1)).to(torch.get_default_dtype())
        rare = (1 / (counts[text] + 1)).sum(1)
        return (F.cross_entropy(model(text), y, reduction="none") * rare).mean()

    return Setup(BagOfWords(), loss)


@coupled(TABLE)
def overflowing_loss():
    """Every gradient overflows and counts as zero."""
    return of(lambda out, y: F.cross_entropy(out, y) * 1e30 * 1e30)


@coupled(TABLE)
def product_over_records():
    return of(lambda out, y: F.cross_entropy(out, y, reduction="none").prod())


@coupled(TABLE)
def median_of_losses():
    def criterion(out, y):
        each = F.cross_entropy(out, y, reduction="none")
        return torch.where(each <= each.detach().median() + math.log(2), each, 0 * each).mean()

    return of(criterion)
