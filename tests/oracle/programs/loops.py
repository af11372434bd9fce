"""Loops: how batches, steps, schedulers and losses are put together by users."""

import torch
import torch.nn.functional as F
from torch import nn

import dpsur
from dpsur.errors import DpsurError
from tests.oracle.harness import BOUNDED, BOUNDED_OR_STOPPED, Setup, limit, refused
from tests.oracle.programs import add, family
from tests.oracle.programs.models import TwoLayers, mlp
from tests.oracle.records import CLASSES, REGRESSION, TABLE

legitimate, coupled = family("loops")


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def looped(loop, model=mlp, **options):
    return Setup(model(), cross_entropy, loop=loop, options=options)


def opacus(outcome=BOUNDED, *, is_legitimate=False, kind=TABLE, draws=False):
    """A program that exists in the Opacus form only."""

    def note(make):
        add(kind, make, family="loops", legitimate=is_legitimate, private_step=None,
            opacus=outcome, draws=draws)  # fmt: skip
        return make

    return note


def private(outcome=BOUNDED, *, is_legitimate=False, kind=TABLE, draws=False):
    """A program that exists in the form of private steps only."""

    def note(make):
        add(kind, make, family="loops", legitimate=is_legitimate, private_step=outcome,
            opacus=None, draws=draws)  # fmt: skip
        return make

    return note


# --- options of make_private, in all forms --------------------------------------------------------


@legitimate(TABLE)
def microbatches_of_one():
    return Setup(mlp(), cross_entropy, options={"max_physical_batch_size": 1})


@legitimate(TABLE)
def microbatches_of_four():
    return Setup(mlp(), cross_entropy, options={"max_physical_batch_size": 4})


@legitimate(TABLE)
def adam_with_parameter_groups():
    def optimizer(model):
        return torch.optim.Adam(
            [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters()}]
        )

    return Setup(mlp(), cross_entropy, optimizer=optimizer)


@legitimate(TABLE)
def other_figures_beside_the_loss():
    def loss(model, batch):
        out = model(batch[0])
        right = (out.argmax(1) == batch[1]).to(out.dtype).mean()
        return {"loss": F.cross_entropy(out, batch[1]), "accuracy": right}

    return Setup(mlp(), loss)


@legitimate(TABLE)
def schedule_by_steps():
    schedulers = []

    def optimizer(model):
        found = torch.optim.SGD(model.parameters(), lr=0.1)
        schedulers.append(torch.optim.lr_scheduler.StepLR(found, 2))
        return found

    return Setup(mlp(), cross_entropy, optimizer=optimizer, after_step=lambda: schedulers[0].step())


@coupled(TABLE, private_step=refused("outlives its step"))
def ema_of_the_loss_with_microbatches_of_one():
    average = torch.tensor(1.0)

    def loss(model, batch):
        nonlocal average
        found = cross_entropy(model, batch)
        average = 0.9 * average + 0.1 * found.detach().clamp(max=1e3).nan_to_num(1.0)
        return found / average

    return Setup(TwoLayers(), loss, options={"max_physical_batch_size": 1})


# --- private steps --------------------------------------------------------------------------------


@private(is_legitimate=True)
def weight_as_an_argument():
    def loss(model, batch, weight=0.0):
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) + weight * out.square().mean()

    def loop(given):
        step = given.engine.private_step(loss)
        for number, batch in enumerate(given.loader):
            step(batch, 0.1 * number)

    return Setup(mlp(), loss, loop=loop)


@private(is_legitimate=True)
def two_private_steps_in_turn():
    def loop(given):
        one = given.engine.private_step(cross_entropy)
        two = given.engine.private_step(lambda m, b: cross_entropy(m, b) + m(b[0]).square().mean())
        for number, batch in enumerate(given.loader):
            (one if number % 2 == 0 else two)(batch)

    return looped(loop)


@private(is_legitimate=True)
def evaluation_between_steps():
    public = torch.linspace(-1, 1, 24).view(4, 6)

    def loop(given):
        step = given.engine.private_step(cross_entropy)
        for batch in given.loader:
            step(batch)
            given.model.eval()
            with torch.no_grad():
                given.model(public)
            given.model.train()

    return looped(loop)


@private(refused("private step alone opens it"))
def batch_opened_by_the_loop():
    def loop(given):
        step = given.engine.private_step(cross_entropy)
        for x, y in given.loader:
            step((x, y))

    return looped(loop)


@private(refused("private step alone opens it"))
def mixup_in_the_loop():
    def loop(given):
        step = given.engine.private_step(cross_entropy)
        for batch in given.loader:
            x, y = batch
            step((0.5 * x + 0.5 * x.flip(0), y))

    return looped(loop)


@private(refused("cannot be taken apart"))
def batch_indexed_by_the_loop():
    def loop(given):
        step = given.engine.private_step(cross_entropy)
        for batch in given.loader:
            step((batch[0], batch[1]))

    return looped(loop)


@private(refused("without a new batch"))
def one_batch_used_twice():
    def loop(given):
        step = given.engine.private_step(cross_entropy)
        for batch in given.loader:
            step(batch)
            step(batch)

    return looped(loop)


@private(refused("another batch than the latest"))
def batch_of_an_earlier_step():
    def loop(given):
        step = given.engine.private_step(cross_entropy)
        before = None
        for batch in given.loader:
            step(before or batch)
            before = batch

    return looped(loop)


@private(refused())
def batch_without_a_step():
    def loop(given):
        step = given.engine.private_step(cross_entropy)
        for number, batch in enumerate(given.loader):
            if number != 1:
                step(batch)

    return looped(loop)


@private(refused())
def tensors_in_the_place_of_the_batch():
    def loop(given):
        step = given.engine.private_step(cross_entropy)
        for _ in given.loader:
            step((torch.randn(6, 6), torch.zeros(6, dtype=torch.long)))

    return looped(loop)


@private(limit("A loop that decides by private figures"))
def plateau_of_the_training_loss():
    def loop(given):
        step = given.engine.private_step(cross_entropy)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            given.optimizer, factor=0.5, patience=0
        )
        for batch in given.loader:
            schedule.step(float(step(batch)["loss"].nan_to_num(9.0)))

    return looped(loop)


@private(limit("A loop that decides by private figures"))
def weight_by_the_loss_of_the_step_before():
    def loss(model, batch, scale):
        return 0.1 * cross_entropy(model, batch) / scale

    def loop(given):
        step = given.engine.private_step(loss)
        scale = 1.0
        for batch in given.loader:
            scale = float(step(batch, scale)["loss"].nan_to_num(1.0, 1e3, 1e3).clamp(0.5, 1e3))

    return looped(loop)


@private(limit("A loop that decides by private figures"))
def figures_passed_on_as_an_argument():
    def loss(model, batch, shift):
        return F.cross_entropy(model(batch[0] - shift), batch[1])

    def loop(given):
        step = given.engine.private_step(
            lambda m, b, shift: {
                "loss": loss(m, b, shift),
                "mean": b[0].detach().nan_to_num(0, 0, 0).clamp(-50, 50).mean(),
            }
        )
        shift = 0.0
        for batch in given.loader:
            shift = step(batch, shift).get("mean", 0.0)

    return looped(loop)


@private(refused("private step alone opens it"))
def groups_of_the_batch_read_by_the_loop():
    def loss(model, batch, prior):
        return F.cross_entropy(model(batch[0]) + prior, batch[1])

    def loop(given):
        step = given.engine.private_step(loss)
        for batch in given.loader:
            labels = [group.batch[1].flatten() for group in batch.groups]
            counts = torch.bincount(torch.cat(labels or [torch.zeros(1).long()]), minlength=CLASSES)
            step(batch, (counts / counts.sum() + 1e-9).log())

    return looped(loop)


@private()
def model_called_in_the_loop():
    def loop(given):
        step = given.engine.private_step(cross_entropy)
        for batch in given.loader:
            given.model(torch.ones(2, 6))
            step(batch)

    return looped(loop)


@private(refused())
def gradient_added_between_steps():
    def loop(given):
        step = given.engine.private_step(cross_entropy)
        for batch in given.loader:
            for value in given.model.parameters():
                value.grad = torch.ones_like(value)
            step(batch)

    return looped(loop)


@private()
def step_inside_no_grad():
    def loop(given):
        step = given.engine.private_step(cross_entropy)
        with torch.no_grad():
            for batch in given.loader:
                step(batch)

    return looped(loop)


@private()
def step_repeated_after_an_error():
    """A function that fails for a batch, and a loop that continues."""
    calls = [0]

    def loss(model, batch):
        calls[0] += 1
        if calls[0] == 2:
            raise KeyError("now and then")
        return cross_entropy(model, batch)

    def loop(given):
        step = given.engine.private_step(loss)
        for batch in given.loader:
            try:
                step(batch)
            except KeyError:
                step(batch)

    return Setup(mlp(), loss, loop=loop)


@private(refused())
def refusals_ignored():
    """A refusal for coupling is final."""
    kept = []

    def loss(model, batch):
        x, y = batch
        shift = kept[-1] if kept else 0
        kept.append(x.detach().nan_to_num(0, 0, 0).clamp(-50, 50))
        return F.cross_entropy(model(x - shift), y)

    def loop(given):
        step = given.engine.private_step(loss)
        last = None
        for _ in range(12):
            try:
                for batch in given.loader:
                    step(batch)
            except DpsurError as error:
                last = error
        if last is not None:
            raise last

    return Setup(mlp(), loss, loop=loop)


@private(is_legitimate=True)
def unfrozen_after_some_steps():
    def loop(given):
        step = given.engine.private_step(cross_entropy)
        for batch in given.loader:
            step(batch)

    model = mlp()
    model[0].requires_grad_(False)
    return looped(loop, lambda: model)


@private(refused())
def parameter_replaced_between_steps():
    def loop(given):
        step = given.engine.private_step(cross_entropy)
        for batch in given.loader:
            step(batch)
            given.model[0].weight = nn.Parameter(torch.ones(16, 6))

    return looped(loop)


@private(is_legitimate=True)
def loss_gate():
    def loop(given):
        step = given.engine.private_step(cross_entropy)
        for batch in given.loader:
            step(batch)

    gate = dpsur.LossGate(lambda m, b: F.cross_entropy(m(b[0]), b[1]), val_batch_size=5)
    return looped(loop, gate=gate)


# --- tests of a block gate ------------------------------------------------------------------------


def each(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def guarded(model, batch):
    x, y = batch
    return each(model, torch.zeros_like(x) if torch.isnan(x).any() else x, y)


def filled_in(model, batch):
    x, y = batch
    return each(model, torch.where(torch.isnan(x), torch.nanmean(x, 0), x), y)


def normalised(model, batch):
    x, y = batch
    return each(model, (x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-5), y)


def centred(model, batch):
    found = each(model, *batch)
    return found - found.mean()


def largest(model, batch):
    found = each(model, *batch)
    return found / found.detach().max()


def weighted_by_class(model, batch):
    x, y = batch
    return each(model, x, y) / torch.bincount(y, minlength=CLASSES)[y]


def ranked(model, batch):
    return each(model, *batch).sort().values


class Remembering:
    """Compares with the losses of the batch before."""

    def __init__(self):
        self.before = 0.0

    def __call__(self, model, batch):
        found = each(model, *batch)
        self.before, before = found.detach().mean(), self.before
        return found - before


class Counting(Remembering):
    def __call__(self, model, batch):
        found = each(model, *batch)
        self.before, before = float(found.detach().nan_to_num(0, 0, 0).mean()), self.before
        return found - before


def block_gated(losses, norm):
    def loop(given):
        step = given.engine.private_step(cross_entropy)
        for batch in given.loader:
            step(batch)

    gate = dpsur.BlockGate(losses=losses(), blocks=1, block_updates=2)
    return looped(loop, gate=gate, steps=2, max_grad_norm=norm)


GATES = {
    "as it is": lambda: lambda model, batch: each(model, *batch),
    "NaN guard": lambda: guarded,
    "filled in by the mean": lambda: filled_in,
    "normalised": lambda: normalised,
    "centred": lambda: centred,
    "by the largest": lambda: largest,
    "weighted by class": lambda: weighted_by_class,
    "ranked": lambda: ranked,
    "remembering": Remembering,
    "counting": Counting,
}
for name, losses in GATES.items():
    for norm in (1.0, None):
        add(
            TABLE,
            lambda losses=losses, norm=norm: block_gated(losses, norm),
            family="loops",
            name=f"block gate {name}, {'norm given' if norm else 'norm measured'}",
            legitimate=False,  # of which right gradients are no question
            private_step=refused() if name in ("remembering", "counting") else BOUNDED,
            opacus=None,
        )


# --- the Opacus form ------------------------------------------------------------------------------


@opacus(is_legitimate=True)
def two_halves_of_a_batch():
    def loop(given):
        for x, y in given.loader:
            given.optimizer.zero_grad()
            for part, labels in zip(x.split(4), y.split(4), strict=True):
                F.cross_entropy(given.model(part), labels).backward()
            given.optimizer.step()

    return looped(loop)


@opacus(limit("Values of other records between loader and model"))
def one_half_of_a_batch_twice():
    def loop(given):
        for x, y in given.loader:
            given.optimizer.zero_grad()
            half, odd = len(x) // 2, len(x) % 2
            for size in (half, half + odd):
                F.cross_entropy(given.model(x[-size:]), y[-size:]).backward()
            given.optimizer.step()

    return looped(loop)


@opacus(is_legitimate=True)
def closure():
    def loop(given):
        for batch in given.loader:

            def compute(batch=batch):
                given.optimizer.zero_grad()
                loss = cross_entropy(given.model, batch)
                loss.backward()
                return loss

            given.optimizer.step(compute)

    return looped(loop)


@opacus(refused())
def gradients_accumulated_over_batches():
    def loop(given):
        for number, batch in enumerate(given.loader):
            cross_entropy(given.model, batch).backward()
            if number % 2:
                given.optimizer.step()
                given.optimizer.zero_grad()

    return looped(loop)


@opacus(limit("Values of other records between outputs and backward()"))
def rows_divided_by_the_number_of_tokens():
    def loop(given):
        for x, y in given.loader:
            given.optimizer.zero_grad()
            tokens = x.abs().sum()
            for row in range(len(x)):
                loss = F.cross_entropy(given.model(x[row : row + 1]), y[row : row + 1])
                (loss * 100 / tokens).backward()
            given.optimizer.step()

    return looped(loop)


@opacus(refused())
def sharpness_aware_minimisation():
    def loop(given):
        for batch in given.loader:
            cross_entropy(given.model, batch).backward()
            first = [value.detach().clone() for value in given.model.parameters()]
            with torch.no_grad():
                for value in given.model.parameters():
                    value.add_(0.05 * value.grad / (value.grad.norm() + 1e-9))
            given.optimizer.zero_grad()
            cross_entropy(given.model, batch).backward()
            with torch.no_grad():
                for value, old in zip(given.model.parameters(), first, strict=True):
                    value.copy_(old)
            given.optimizer.step()

    return looped(loop)


@opacus(limit("A loop that decides by private figures"))
def plateau_of_the_training_loss_in_the_loop():
    def loop(given):
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            given.optimizer, factor=0.5, patience=0
        )
        for batch in given.loader:
            given.optimizer.zero_grad()
            loss = cross_entropy(given.model, batch)
            loss.backward()
            given.optimizer.step()
            schedule.step(loss.item())

    return looped(loop)


@opacus(BOUNDED_OR_STOPPED)
def batch_skipped_if_not_finite():
    def loop(given):
        for batch in given.loader:
            given.optimizer.zero_grad()
            loss = cross_entropy(given.model, batch)
            if not torch.isfinite(loss):
                continue
            loss.backward()
            given.optimizer.step()

    return looped(loop)


@opacus(is_legitimate=True)
def criterion_of_the_engine():
    def loop(given):
        for x, y in given.loader:
            given.optimizer.zero_grad()
            given.engine.criterion(given.model(x), y).backward()
            given.optimizer.step()

    return looped(loop, criterion=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0])))


@opacus(limit("Values of other records between outputs and backward()"))
def criterion_with_weights_of_the_batch():
    def loop(given):
        for x, y in given.loader:
            given.optimizer.zero_grad()
            weights = (1 / (torch.bincount(y, minlength=CLASSES).float() + 1))[y] * len(y)
            given.engine.criterion(given.model(x), y, weights).backward()
            given.optimizer.step()

    def criterion(out, y, weights):
        return (F.cross_entropy(out, y, reduction="none") * weights).mean()

    return looped(loop, criterion=criterion)


@opacus(limit("Values of other records between outputs and backward()"), kind=REGRESSION)
def coupling_refused_and_ignored():
    """A refusal for coupling is final: what follows is refused too."""

    def loop(given):
        last = None
        for _ in range(12):
            try:
                for x, y in given.loader:
                    given.optimizer.zero_grad()
                    F.mse_loss(given.model(x)[:, 0], y - y.mean()).backward()
                    given.optimizer.step()
            except DpsurError as error:
                last = error
        if last is not None:
            raise last

    return looped(loop)


@opacus(limit("Other uses of the batch in the loop"))
def second_model_in_the_loop():
    other = nn.Linear(6, CLASSES)
    steps = torch.optim.SGD(other.parameters(), lr=0.1)

    def loop(given):
        for x, y in given.loader:
            steps.zero_grad()
            F.cross_entropy(other(x.nan_to_num(0, 0, 0)), y).backward()
            steps.step()
            given.optimizer.zero_grad()
            F.cross_entropy(given.model(x), y).backward()
            given.optimizer.step()

    return Setup(mlp(), cross_entropy, loop=loop, released=lambda: tuple(other.parameters()))


@opacus(is_legitimate=True)
def loader_read_one_batch_ahead():
    def loop(given):
        batches = iter(given.loader)
        batch = next(batches)
        while batch is not None:
            given.optimizer.zero_grad()
            cross_entropy(given.model, batch).backward()
            given.optimizer.step()
            batch = next(batches, None)

    return looped(loop)
