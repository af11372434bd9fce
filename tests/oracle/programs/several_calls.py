"""Several calls of the model, several models, penalties on weights and gradients in the loss."""

import copy

import torch
import torch.nn.functional as F
from torch import distributions as D
from torch import nn

from tests.oracle.harness import Setup, limit, refused
from tests.oracle.programs import family
from tests.oracle.programs.models import TwoLayers, mlp
from tests.oracle.records import CLASSES, FEATURES, TABLE

legitimate, coupled = family("several calls")
bce = F.binary_cross_entropy_with_logits


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@legitimate(TABLE)
def siamese():
    return Setup(mlp(outputs=4), lambda m, b: F.mse_loss(m(b[0]), m(b[0] + 0.1)))


@legitimate(TABLE)
def siamese_module_of_two_inputs():
    class Pairs(TwoLayers):
        def forward(self, one, two):
            return super().forward(one), super().forward(two)

    def loss(model, batch):
        one, two = model(batch[0], batch[0].roll(1, 1))
        return F.cross_entropy(one, batch[1]) + (one - two).pow(2).sum(1).mean()

    return Setup(Pairs(), loss)


@legitimate(TABLE)
def triplet_of_three_calls():
    def loss(model, batch):
        x = batch[0]
        return F.triplet_margin_loss(model(x), model(x + 0.1), model(-x))

    return Setup(mlp(outputs=4), loss)


@legitimate(TABLE)
def same_call_twice():
    return Setup(mlp(), lambda m, b: cross_entropy(m, b) + cross_entropy(m, b))


@legitimate(TABLE)
def five_calls_of_one_layer():
    class Deep(TwoLayers):
        def __init__(self):
            super().__init__()
            self.shared = nn.Linear(16, 16)

        def forward(self, x):
            h = self.first(x)
            for _ in range(5):
                h = self.shared(h).tanh()
            return self.second(h)

    return Setup(Deep(), cross_entropy)


@legitimate(TABLE)
def two_views_consistency():
    def loss(model, batch):
        x, y = batch
        one, two = model(x), model(x.flip(1))
        drift = F.kl_div(one.log_softmax(1), two.softmax(1), reduction="batchmean")
        return F.cross_entropy(one, y) + drift

    return Setup(mlp(), loss)


@legitimate(TABLE)
def stop_gradient_between_two_calls():
    def loss(model, batch):
        target = model(batch[0].flip(1)).detach()
        return -F.cosine_similarity(model(batch[0]), target).mean()

    return Setup(mlp(outputs=4), loss)


@legitimate(TABLE)
def virtual_adversarial_direction():
    """The inner gradient by torch.func: of the input alone."""

    def loss(model, batch):
        x, y = batch

        def inner(point):
            return F.cross_entropy(model(point), y)

        push = torch.func.grad(inner)(x)
        return F.cross_entropy(model(x + 0.1 * push.detach().sign()), y)

    return Setup(mlp(), loss)


@legitimate(TABLE)
def gradient_penalty_by_func_grad():
    def loss(model, batch):
        x, y = batch
        slope = torch.func.grad(lambda point: model(point).sum())(x)
        return F.cross_entropy(model(x), y) + (slope.norm(dim=1) - 1).pow(2).mean()

    return Setup(mlp(), loss)


@legitimate(TABLE)
def gradient_penalty_by_autograd_grad():
    def loss(model, batch):
        x, y = batch
        x = x.detach().clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, y) + (slope.norm(dim=1) - 1).pow(2).mean()

    return Setup(mlp(), loss)


@legitimate(TABLE)
def jacobian_penalty():
    def loss(model, batch):
        x, y = batch
        rows = torch.func.jacrev(lambda point: model(point).sum(0))(x)
        return F.cross_entropy(model(x), y) + 0.01 * rows.square().sum()

    return Setup(mlp(), loss)


@legitimate(TABLE)
def twins_that_the_loader_yields():
    """Rows of two calls belong together, because both are given what the loader has yielded."""

    return Setup(mlp(outputs=4), lambda m, b: (m(b[0]) * m(b[0])).sum(1).mean())


@legitimate(TABLE)
def parts_of_an_autoencoder_by_its_methods():
    class Parts(Autoencoder):
        def code_of(self, x):
            return self.encode(x).chunk(2, 1)

        def found_for(self, code):
            return self.decode(code.tanh())

    def loss(model, batch):
        mean, log_variance = model.code_of(batch[0])
        return F.mse_loss(model.found_for(mean), batch[0]) + (0.1 * log_variance).square().mean()

    return Setup(Parts(), loss)


@legitimate(TABLE)
def loss_is_a_method_on_parts():
    class Whole(Autoencoder):
        def loss(self, x):
            mean, log_variance = self.encode(x).chunk(2, 1)
            return F.mse_loss(self.decode(mean), x) + 0.1 * kl_of(mean, log_variance).mean()

    return Setup(Whole(), lambda m, b: m.loss(b[0]))


# --- several models -------------------------------------------------------------------------------


@legitimate(TABLE)
def gan_discriminator():
    """Real and generated in one loss, as in the DCGAN example of Opacus."""
    generator = mlp(4, FEATURES)

    def loss(model, batch):
        real = batch[0]
        latent = torch.linspace(-1, 1, 4, device=real.device, dtype=real.dtype).expand(len(real), 4)
        fake = generator(latent).detach()
        one, zero = model(real), model(fake)
        return bce(one, torch.ones_like(one)) + bce(zero, torch.zeros_like(zero))

    return Setup(mlp(outputs=1), loss)


@legitimate(TABLE, draws=True)
def gan_with_random_latents():
    generator = mlp(4, FEATURES)

    def loss(model, batch):
        fake = generator(torch.randn(len(batch[0]), 4)).detach()
        one, zero = model(batch[0]), model(fake)
        return bce(one, torch.ones_like(one)) + bce(zero, torch.zeros_like(zero))

    return Setup(mlp(outputs=1), loss)


@legitimate(TABLE)
def gan_with_generator_steps():
    """The generator sees the discriminator, which is released, and no record."""
    generator = mlp(4, FEATURES)
    steps = torch.optim.SGD(generator.parameters(), lr=0.1)
    holder = {}

    def loss(model, batch):
        fake = generator(torch.ones(len(batch[0]), 4)).detach()
        one, zero = model(batch[0]), model(fake)
        return bce(one, torch.ones_like(one)) + bce(zero, torch.zeros_like(zero))

    def generator_step():
        judge = holder["model"].eval()
        steps.zero_grad()
        score = judge(generator(torch.ones(5, 4)))
        bce(score, torch.ones_like(score)).backward()
        steps.step()
        judge.train()

    holder["model"] = mlp(outputs=1)
    return Setup(
        holder["model"],
        loss,
        after_step=generator_step,
        released=lambda: tuple(generator.parameters()),
    )


@legitimate(TABLE)
def wasserstein_with_penalty():
    generator = mlp(4, FEATURES)

    def loss(model, batch):
        real = batch[0]
        fake = generator(torch.ones(len(real), 4)).detach()
        middle = 0.5 * real + 0.5 * fake
        slope = torch.func.grad(lambda point: model(point).sum())(middle)
        return (model(fake) - model(real)).mean() + 10 * (slope.norm(dim=1) - 1).pow(2).mean()

    return Setup(mlp(outputs=1), loss)


@legitimate(TABLE)
def distillation():
    teacher = mlp().eval().requires_grad_(False)

    def loss(model, batch):
        x = batch[0]
        return F.kl_div(model(x).log_softmax(1), teacher(x).softmax(1), reduction="batchmean")

    return Setup(mlp(), loss)


@legitimate(TABLE)
def distillation_under_no_grad():
    teacher = mlp()

    def loss(model, batch):
        with torch.no_grad():
            wanted = teacher(batch[0])
        return F.mse_loss(model(batch[0]), wanted)

    return Setup(mlp(), loss)


@legitimate(TABLE)
def mean_teacher():
    model = mlp()
    teacher = copy.deepcopy(model).requires_grad_(False)

    def loss(model, batch):
        return F.mse_loss(model(batch[0]), teacher(batch[0].flip(1)))

    def follow():
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.1)

    return Setup(model, loss, after_step=follow, released=lambda: tuple(teacher.parameters()))


@legitimate(TABLE)
def averaged_weights_and_schedule():
    model = mlp()
    average = torch.optim.swa_utils.AveragedModel(model)
    return Setup(
        model,
        cross_entropy,
        after_step=lambda: average.update_parameters(model),
        released=lambda: tuple(average.parameters()),
    )


@legitimate(TABLE)
def frozen_features_of_another_model():
    features = mlp(outputs=FEATURES).eval()

    def loss(model, batch):
        with torch.no_grad():
            found = features(batch[0])
        return F.cross_entropy(model(found), batch[1])

    return Setup(mlp(), loss)


@legitimate(TABLE)
def reference_policy_of_dpo():
    model = mlp()
    reference = copy.deepcopy(model).requires_grad_(False)

    def loss(model, batch):
        x, y = batch

        def gap(which):
            log = model(which).log_softmax(1) - reference(which).log_softmax(1)
            return log.gather(1, y[:, None]).squeeze(1)

        return -F.logsigmoid(gap(x) - gap(-x)).mean()

    return Setup(model, loss)


# --- penalties on weights -------------------------------------------------------------------------


@legitimate(TABLE)
def squared_weights():
    def loss(model, batch):
        return cross_entropy(model, batch) + 1e-2 * sum(
            p.square().sum() for p in model.parameters()
        )

    return Setup(mlp(), loss)


@legitimate(TABLE)
def absolute_weights():
    def loss(model, batch):
        return cross_entropy(model, batch) + 1e-2 * sum(p.abs().sum() for p in model.parameters())

    return Setup(mlp(), loss)


@legitimate(TABLE)
def norms_of_layers():
    def loss(model, batch):
        return cross_entropy(model, batch) + 0.1 * model[0].weight.norm() + model[2].bias.norm()

    return Setup(mlp(), loss)


@legitimate(TABLE)
def orthogonal_weights():
    def loss(model, batch):
        w = model[2].weight
        eye = torch.eye(CLASSES, device=w.device, dtype=w.dtype)
        return cross_entropy(model, batch) + 0.1 * (w @ w.T - eye).square().sum()

    return Setup(mlp(), loss)


@legitimate(TABLE)
def distance_to_first_weights():
    """FedProx."""
    model = mlp()
    first = [value.detach().clone() for value in model.parameters()]

    def loss(model, batch):
        apart = sum((p - q).square().sum() for p, q in zip(model.parameters(), first, strict=True))
        return cross_entropy(model, batch) + 0.5 * apart

    return Setup(model, loss)


@legitimate(TABLE)
def elastic_weight_consolidation():
    model = mlp()
    first = {name: value.detach().clone() for name, value in model.named_parameters()}
    fisher = {name: torch.rand_like(value) for name, value in first.items()}

    def loss(model, batch):
        drift = sum((fisher[n] * (p - first[n]).pow(2)).sum() for n, p in model.named_parameters())
        return cross_entropy(model, batch) + drift

    return Setup(model, loss)


@legitimate(TABLE)
def weight_held_before_the_step():
    model = mlp()
    weight = model[0].weight
    return Setup(model, lambda m, b: cross_entropy(m, b) + 0.1 * weight.square().sum())


@legitimate(TABLE)
def clipped_weights_between_steps():
    model = mlp()

    def clip():
        with torch.no_grad():
            for value in model.parameters():
                value.clamp_(-0.3, 0.3)

    return Setup(model, cross_entropy, after_step=clip)


@legitimate(TABLE)
def learned_task_weights():
    class Tasks(TwoLayers):
        def __init__(self):
            super().__init__()
            self.log_variance = nn.Parameter(torch.zeros(2))
            self.other = nn.Linear(16, 1)

        def forward(self, x):
            h = self.first(x).tanh()
            return self.second(h), self.other(h)

    def loss(model, batch):
        x, y = batch
        one, two = model(x)
        weights = (-model.log_variance).exp()
        losses = weights[0] * F.cross_entropy(one, y) + weights[1] * F.mse_loss(two[:, 0], x[:, 0])
        return losses + model.log_variance.sum()

    return Setup(Tasks(), loss)


@legitimate(TABLE)
def learned_temperature():
    class Scaled(TwoLayers):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]) * model.scale.exp(), batch[1])

    return Setup(Scaled(), loss)


@legitimate(TABLE)
def parts_of_a_model_called_by_name():
    def loss(model, batch):
        return F.cross_entropy(model.second(model.first(batch[0]).relu()), batch[1])

    return Setup(TwoLayers(), loss)


@legitimate(TABLE)
def loss_is_a_method_of_the_model():
    class Diffusion(TwoLayers):
        def __init__(self):
            super().__init__(FEATURES)

        def loss(self, x):
            return F.mse_loss(self(0.5 * x + 0.1), x)

    return Setup(Diffusion(), lambda m, b: m.loss(b[0]))


@legitimate(TABLE)
def functional_layers_on_weights():
    def loss(model, batch):
        hidden = F.linear(batch[0], model.first.weight, model.first.bias).tanh()
        return F.cross_entropy(hidden @ model.second.weight.T + model.second.bias, batch[1])

    return Setup(TwoLayers(), loss)


@legitimate(TABLE)
def weights_shared_with_the_transpose():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode = nn.Linear(FEATURES, 4)

        def forward(self, x):
            return F.linear(self.encode(x).tanh(), self.encode.weight.t())

    return Setup(Tied(), lambda m, b: F.mse_loss(m(b[0]), b[0]))


# --- variational autoencoders ---------------------------------------------------------------------


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(FEATURES, 8), nn.Linear(4, FEATURES)


def kl_of(mean, log_variance):
    return -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(1)


@legitimate(TABLE)
def autoencoder_without_sampling():
    class Vae(Autoencoder):
        def forward(self, x):
            mean, log_variance = self.encode(x).chunk(2, 1)
            return self.decode(mean), mean, log_variance

    def loss(model, batch):
        found, mean, log_variance = model(batch[0])
        return F.mse_loss(found, batch[0]) + 0.1 * kl_of(mean, log_variance).mean()

    return Setup(Vae(), loss)


@legitimate(TABLE, draws=True)
def vae_randn_like():
    class Vae(Autoencoder):
        def forward(self, x):
            mean, log_variance = self.encode(x).chunk(2, 1)
            scale = (0.5 * log_variance).exp()
            return self.decode(mean + scale * torch.randn_like(scale)), mean, log_variance

    def loss(model, batch):
        x = batch[0]
        found, mean, log_variance = model(x)
        each = F.mse_loss(found, x, reduction="sum") + kl_of(mean, log_variance).sum()
        return each / len(x)

    return Setup(Vae(), loss)


@legitimate(TABLE, draws=True)
def vae_rsample():
    class Vae(Autoencoder):
        def forward(self, x):
            mean, log_scale = self.encode(x).chunk(2, 1)
            chosen = D.Normal(mean, log_scale.exp(), validate_args=False)
            return self.decode(chosen.rsample()), chosen

    def loss(model, batch):
        found, chosen = model(batch[0])
        prior = D.Normal(torch.zeros_like(chosen.loc), torch.ones_like(chosen.scale))
        kl = D.kl_divergence(chosen, prior).sum(1).mean()
        return F.mse_loss(found, batch[0]) + 0.1 * kl

    return Setup(Vae(), loss)


@legitimate(TABLE, draws=True)
def gumbel_softmax():
    def loss(model, batch):
        chosen = F.gumbel_softmax(model(batch[0]), tau=1.0, dim=1)
        return -(chosen * F.one_hot(batch[1], CLASSES)).sum(1).mean()

    return Setup(mlp(), loss)


@legitimate(TABLE, draws=True)
def diffusion_step():
    def loss(model, batch):
        x = batch[0]
        noise, time = torch.randn_like(x), torch.rand(len(x), 1)
        return F.mse_loss(model((1 - time) * x + time * noise), noise)

    return Setup(mlp(outputs=FEATURES), loss)


# --- records that meet ----------------------------------------------------------------------------


@coupled(TABLE)
def mixup():
    def loss(model, batch):
        x, y = batch
        order = torch.arange(len(x) - 1, -1, -1, device=x.device)
        out = model(0.5 * x + 0.5 * x[order])
        return 0.5 * F.cross_entropy(out, y) + 0.5 * F.cross_entropy(out, y[order])

    return Setup(mlp(), loss)


@coupled(TABLE, draws=True)
def mixup_with_random_weights():
    def loss(model, batch):
        x, y = batch
        weight, order = torch.rand(()), torch.randperm(len(x))
        out = model(weight * x + (1 - weight) * x[order])
        return weight * F.cross_entropy(out, y) + (1 - weight) * F.cross_entropy(out, y[order])

    return Setup(mlp(), loss)


@coupled(TABLE)
def twins_in_another_order():
    def loss(model, batch):
        one, other = model(batch[0]), model(batch[0].flip(0))
        return F.mse_loss(one, other)

    return Setup(mlp(outputs=4), loss)


@coupled(TABLE)
def sum_of_two_orders():
    """Each row counts by itself, but a record has two."""

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y) + F.cross_entropy(model(x.flip(0)), y.flip(0))

    return Setup(mlp(), loss)


@coupled(TABLE)
def code_in_another_order():
    class Parts(Autoencoder):
        def code_of(self, x):
            return self.encode(x)[:, :4]

        def found_for(self, code):
            return self.decode(code)

    def loss(model, batch):
        return F.mse_loss(model.found_for(model.code_of(batch[0]).flip(0)), batch[0])

    return Setup(Parts(), loss)


@coupled(TABLE)
def calls_for_each_class():
    """How many calls there are depends on the batch."""

    def loss(model, batch):
        x, y = batch
        return sum(
            F.mse_loss(model(x).sum(1), x[:, 0]) for _ in range(1 + int(y.unique().numel() > 1))
        )

    return Setup(mlp(), loss)


@coupled(TABLE, private_step=refused())
def teacher_with_batch_norm_in_training_mode():
    teacher = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))

    def loss(model, batch):
        with torch.no_grad():
            wanted = (5 * teacher(batch[0])).softmax(1)
        return F.kl_div(model(batch[0]).log_softmax(1), wanted, reduction="batchmean")

    return Setup(mlp(), loss, released=lambda: tuple(teacher.buffers()))


@coupled(TABLE)
def head_that_is_trained_beside():
    """The gradient of the head would have no noise."""
    head = nn.Linear(4, CLASSES)
    steps = torch.optim.SGD(head.parameters(), lr=0.1)

    def loss(model, batch):
        return F.cross_entropy(head(model(batch[0])), batch[1])

    return Setup(
        mlp(outputs=4), loss, after_step=steps.step, released=lambda: tuple(head.parameters())
    )


@coupled(TABLE, private_step=refused())
def second_model_trained_inside_the_loss():
    other = nn.Linear(FEATURES, CLASSES)
    steps = torch.optim.SGD(other.parameters(), lr=0.1)

    def loss(model, batch):
        x, y = batch
        steps.zero_grad()
        F.cross_entropy(other(x.nan_to_num(0, 0, 0)), y).backward()
        steps.step()
        return F.cross_entropy(model(x), y)

    return Setup(mlp(), loss, released=lambda: tuple(other.parameters()))


@coupled(TABLE, private_step=limit("State of code that runs one record at a time"))
def second_model_by_autograd_grad():
    other = nn.Linear(FEATURES, CLASSES)

    def loss(model, batch):
        x, y = batch
        found = F.cross_entropy(other(x.nan_to_num(0, 0, 0)), y)
        for value, slope in zip(
            other.parameters(), torch.autograd.grad(found, list(other.parameters())), strict=True
        ):
            value.data.sub_(0.1 * slope)
        return F.cross_entropy(model(x), y)

    return Setup(mlp(), loss, released=lambda: tuple(other.parameters()))


@coupled(TABLE, private_step=refused())
def weights_changed_inside_the_loss():
    def loss(model, batch):
        with torch.no_grad():
            model[0].weight.add_(0.01 * batch[0].nan_to_num(0, 0, 0).mean())
        return cross_entropy(model, batch)

    return Setup(mlp(), loss)


@coupled(TABLE, private_step=refused())
def weight_data_changed_inside_the_loss():
    def loss(model, batch):
        model[0].weight.data.copy_(model[0].weight.data + batch[0].nan_to_num(0, 0, 0).mean())
        return cross_entropy(model, batch)

    return Setup(mlp(), loss)


@coupled(TABLE, private_step=refused())
def backward_inside_the_loss():
    def loss(model, batch):
        found = cross_entropy(model, batch)
        found.backward(retain_graph=True)
        return found

    return Setup(mlp(), loss)


@coupled(TABLE, private_step=refused())
def feature_matching_generator():
    """The generator is fitted to real records, without noise."""
    generator = nn.Linear(4, FEATURES)
    steps = torch.optim.SGD(generator.parameters(), lr=1.0)

    def loss(model, batch):
        real, fake = batch[0], generator(torch.ones(len(batch[0]), 4))
        steps.zero_grad()
        (fake.mean(0) - real.nan_to_num(0, 0, 0).clamp(-50, 50).mean(0)).square().sum().backward()
        steps.step()
        one, zero = model(real), model(fake.detach())
        return bce(one, torch.ones_like(one)) + bce(zero, torch.zeros_like(zero))

    return Setup(mlp(outputs=1), loss, released=lambda: tuple(generator.parameters()))
