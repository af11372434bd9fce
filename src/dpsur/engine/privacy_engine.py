"""`PrivacyEngine`: makes a model, an optimizer and a data loader private, for a custom loop."""

import os
from collections.abc import Callable, Mapping, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpsur import checks
from dpsur.distributed import connect
from dpsur.distributed.ranks import unwrap
from dpsur.engine.captured import CallGraphs
from dpsur.engine.criterion import Criterion
from dpsur.engine.loader import (
    PoissonSampler,
    PrivateLoader,
)
from dpsur.engine.procedure import (
    FIRST_CLIP_NORM,
    Mechanism,
    make_procedure,
    parameters_to_train,
    refuse_options,
    units_of,
    warn_of_second_engine,
)
from dpsur.engine.sharding import Sharding, is_sharded
from dpsur.engine.steps import PrivateLoop
from dpsur.engine.watch import Watcher
from dpsur.engine.weights import ModuleWeights, make_private_optimizer
from dpsur.environment import versions
from dpsur.errors import (
    BudgetError,
    CheckpointError,
    InvalidInputError,
    NothingReleasedError,
    StepError,
)
from dpsur.functional.tree import Params, flatten, keep, map_tensors
from dpsur.mechanism.blocks import released_metrics
from dpsur.mechanism.gates import BlockGate, CoinGate, Gate, LossGate, Metrics
from dpsur.mechanism.streams import Streams
from dpsur.privacy.data_ledger import DataLedger
from dpsur.privacy.events import NonPrivate
from dpsur.privacy.plan import Plan
from dpsur.privacy.statement import (
    BY_CONSTRUCTION,
    CUSTOM_LOOP,
    PERSON,
    WAS_CHECKED,
    RunFacts,
    Statement,
    privacy_statement,
)
from dpsur.runs.checkpoint import STATE, Checkpoint, Fingerprint
from dpsur.runs.files import RunFolder, sha256, to_json
from dpsur.runs.release import NO_ORIGIN, write_release

LEAST: Any = object()  # the noise multiplier that is to be found
MEMORY, SAVED = "memory", "saved"  # names of tensors in a checkpoint


class PrivacyEngine(PrivateLoop):
    """Differentially private training in a custom loop.

        engine = dpsur.PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader,
            noise_multiplier=1.0, max_grad_norm=1.0, epochs=10)
        for epoch in range(10):
            for x, y in loader:
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
        print(engine.get_epsilon(delta=1e-5))

    The model is the module itself, the optimizer is the same object with another class, and the
    loader draws Poisson batches from the same data set. Under `torchrun` every rank runs the same
    loop: the loader yields its share of a batch that is drawn over the whole data set, and the
    clipped sums of all ranks are added up before the noise, of which there is one draw.

    Formal guarantee: every `optimizer.step()` is a sampled Gaussian mechanism of the loader's
    sample rate and the noise multiplier, charged before it is made. All weights that the loop sees
    after steps satisfy (`guarantee(delta)`, delta)-DP for adding or removing one record of the data
    set, if the loop uses the records in no other way. What the loop prints of a batch (losses,
    accuracies, batch sizes) is not private.
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        """Begin with an empty ledger.

        Args:
            accountant: "prv" or "pld": privacy loss distributions, the only accounting here.
            secure_mode: refused; noise comes from a counter-based generator under a secret key of
                128 bits in any case.
        """
        if accountant not in ("prv", "pld"):
            raise InvalidInputError(
                f"accountant {accountant!r} is not supported; leave it out: figures come from "
                "privacy loss distributions, as those of 'prv' do"
            )
        if secure_mode:
            raise InvalidInputError(
                "secure_mode=True is not supported: without a seed, random numbers come from a "
                "cryptographic generator (ChaCha20) anyway, and noise is an exact integer "
                "(dpsur proof, section 17); leave it out"
            )
        super().__init__()

    @checks.arguments
    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | None = None,
        criterion: Callable[..., Tensor] | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: Any = None,
        grad_sample_mode: str = "hooks",
        max_physical_batch_size: int | None = None,
        gate: Gate | None = None,
        metrics: Metrics | None = None,
        accounting: str | None = None,
        groups: Any = None,
        records_per_person: int | None = None,
        sampling: str = PERSON,
        group_size: int | None = None,
        records: int | None = None,
        ledger: str | os.PathLike[str] | None = None,
        seed: int | None = None,
    ) -> tuple[nn.Module, Optimizer, PrivateLoader]:
        """Make a model, its optimizer and its loader private; train with them as before.

        Args:
            module: the model. It stays the module it is, without a wrapper.
            optimizer: any of `torch.optim` that makes one step per gradient. Parameter groups,
                state and schedulers stay as they are.
            data_loader: a loader of a map-style data set. Poisson sampling takes the place of its
                sampler; the sample rate is one over its length. Of a loader that another engine has
                made private, the loader that it was made from is taken.
            noise_multiplier: standard deviation of the noise over `max_grad_norm`. 0 trains without
                privacy, for debugging: epsilon is infinite, and the statement says so.
            max_grad_norm: the norm that each record's gradient is clipped to. With a `BlockGate` it
                may be left out, and is measured.
            criterion: a loss to be computed for each record alone, as `engine.criterion(outputs,
                targets)`; needed for losses that normalise over the batch.
            epochs: with `steps` left out, plans as many steps as so many passes over the loader.
            steps: the number of steps of the whole training. It is fixed here, and with it the
                epsilon that the training is guaranteed to stay within.
            target_epsilon: instead of a number of steps, the allowance of a filter.
            target_delta: the delta of the guarantee; by default at most a tenth of one over the
                number of records.
            batch_first: must be True: records are in the first dimension.
            loss_reduction: "mean" or "sum": how the loss adds up records. It is checked.
            poisson_sampling: must be True: nothing else is accounted for.
            clipping: must be "flat": one norm over all parameters.
            noise_generator: refused; use `seed`.
            grad_sample_mode: accepted for compatibility; the fastest way is chosen by itself.
            max_physical_batch_size: largest number of records that the loader yields at once. A
                batch then comes in several microbatches, and `step` acts on the last of them.
            gate: a `LossGate` or a `CoinGate` makes every step a trial: the candidate is tested on
                a fresh batch, and kept or undone. A `BlockGate` searches for the learning rate.
            metrics: pays for noisy training accuracy and Brier score, `dpsur.Metrics()`.
            accounting: "every-trial" charges every candidate with its test. "proven", and
                "proven-pld", which is tighter, charge the accepted ones only: then `steps` counts
                accepted updates, the loader ends after the last of them, and the number of batches
                that the loop saw is private. A `CoinGate` needs one of these two, by default
                "proven"; the default of everything else is "every-trial".
            groups: the person of each record, an array or a function of a record. The unit of
                privacy is then one person with all of their records: persons are drawn for a batch,
                `batch_size` counts them, and a private step gets the records of one person as one
                batch, whose gradient is clipped once. It needs `engine.private_step`.
            records_per_person: how many records of a person a step uses at most (default: 16),
                drawn anew for each; a public number.
            sampling: with `groups`, "person" draws persons for a batch, "record" draws records, of
                which a person has at most `records_per_person`; the noise then hides as many of
                theirs as may join. It needs `records`, takes loops of both forms and sharded
                models, and neither a gate nor metrics.
            group_size: state the guarantee for groups of so many records too, converted from the
                guarantee for one.
            records: a public size of the data set (a number of persons where these are drawn), if
                the true one is not public. Sampling rate, noise and delta follow from it alone.
            ledger: the ledger of the data set, in which the training books what it may spend before
                its first batch; a training above the ledger's total is refused.
            seed: makes batches and noise repeatable, and void against anyone who knows it.
        """
        refuse_options(batch_first, poisson_sampling, clipping, noise_generator, grad_sample_mode)
        checks.one_of("loss_reduction", loss_reduction, ("mean", "sum"))
        if group_size is not None:
            checks.at_least_one("group_size", group_size)
        if noise_multiplier is not LEAST:
            checks.number("noise_multiplier", noise_multiplier)
            if noise_multiplier != 0:
                checks.positive("noise_multiplier", noise_multiplier)
        if gate is not None and not isinstance(gate, (LossGate, CoinGate, BlockGate)):
            raise InvalidInputError(
                f"gate {gate!r} is not a gate; use dpsur.LossGate(loss), CoinGate or BlockGate"
            )
        if seed is not None:
            checks.whole("seed", seed, 0)
        module = unwrap(module)
        if isinstance(data_loader, PrivateLoader):  # each engine draws batches of its own
            data_loader = data_loader.plain
        if self._ledger is not None:
            raise InvalidInputError(
                "this engine is in use; make one PrivacyEngine for each training, and add up their "
                "epsilons if they use the same records"
            )
        trained = parameters_to_train(module, optimizer, data_loader)
        plain = gate is None and metrics is None
        units = units_of(data_loader, groups, records_per_person, records, sampling, plain=plain)
        delta = min(1e-5, 0.1 / units.size) if target_delta is None else target_delta
        if epochs is not None:
            if steps is not None:
                raise InvalidInputError("give epochs or steps, not both")
            checks.at_least_one("epochs", epochs)
            steps = int(epochs) * units.length
        elif steps is not None:
            checks.at_least_one("steps", steps)
        mechanism = Mechanism(
            *(units, max_grad_norm, steps, target_epsilon, delta, gate, metrics, accounting)
        )
        if noise_multiplier is LEAST:
            noise_multiplier, mechanism = mechanism.with_noise()
            gate, metrics = mechanism.gate, mechanism.metrics
        self._ledger, self._mechanism = mechanism.account(noise_multiplier), mechanism
        self._data_ledger = None if ledger is None else DataLedger(ledger)
        if self._data_ledger is None:
            warn_of_second_engine(data_loader.dataset)
        elif self._ledger.plan is None:
            raise InvalidInputError(
                "a ledger books what was planned; give make_private epochs, steps or target_epsilon"
            )
        self._units = replace(units, group_size=group_size)
        self._records = len(cast(Sized, data_loader.dataset))
        self._update = mechanism.update(noise_multiplier) if noise_multiplier else NonPrivate()
        device = next(iter(trained.values())).device
        if units.by_person and is_sharded(module):
            raise InvalidInputError(
                "groups cannot be combined with a model that fully_shard has sharded: each person "
                "adds one gradient, clipped as a whole, which only a private step on an unsharded "
                "model computes; leave one of them out, or draw records in place of persons: "
                "sampling='record'",
                code="persons-need-private-step",
            )
        ranks = connect(device)
        ranks.check_same(
            {
                "settings": f"{self._update} {mechanism.test()} {max_grad_norm} "
                f"{self._ledger.describe()} {seed} {getattr(gate, 'loss_clip', None)}",
                "number of records": f"{units.held} of {self._records}",
                "parameters": str([(name, value.shape) for name, value in trained.items()]),
            }
        )
        sharding = Sharding(module, trained, ranks) if is_sharded(module) else None
        if sharding is None:
            ranks.broadcast_module(module)
        self._streams, self._seed = Streams(seed, device, ranks), seed
        self._module, self._optimizer, self._dataset = module, optimizer, data_loader.dataset
        self._criterion = None if criterion is None else Criterion(criterion, loss_reduction)
        clip_norm = FIRST_CLIP_NORM if max_grad_norm is None else max_grad_norm
        self._watcher = Watcher(module, trained, clip_norm, loss_reduction, self, sharding)
        sampler = PoissonSampler(units, self._streams.on(torch.device("cpu")))
        if max_physical_batch_size is not None:
            checks.at_least_one("max_physical_batch_size", max_physical_batch_size)
            each = units.persons.records_each if units.persons and units.by_person else 1
            sampler.most = max(1, max_physical_batch_size // each)
        if sharding is None:
            self._watcher.graphs = CallGraphs(self._watcher, self._watcher.records, self._sample)
        self._loader = PrivateLoader(data_loader, sampler, self, units.length)
        if self._private_steps:
            self._loader.collate_alone()
            self._watcher.detach()
        averages = gate.averages if isinstance(gate, BlockGate) else ()
        self._weights = ModuleWeights(module, optimizer, averages)
        if mechanism.charges_accepted:
            self._first = self._weights.undo()
        self._shows_verdicts = isinstance(gate, LossGate) and gate.show_verdicts
        self._procedure = make_procedure(
            mechanism,
            self._update,
            self._ledger.plan,
            self._watcher,
            self._weights,
            self._criterion,
            self._loader,
        )
        if isinstance(gate, BlockGate):
            assert self._ledger.plan is not None
            self._loader.length = self._ledger.plan.length  # one pass is the whole training
        return module, make_private_optimizer(optimizer, self), self._loader

    def make_private_with_epsilon(
        self,
        *,
        target_epsilon: float,
        target_delta: float,
        epochs: int | None = None,
        steps: int | None = None,
        **options: Any,
    ) -> tuple[nn.Module, Optimizer, PrivateLoader]:
        """Like `make_private`, with the least noise for which the training fits a budget.

        `epochs` or `steps` says how long the training is; both are fixed here. All other arguments
        are those of `make_private`.
        """
        if epochs is None and steps is None:
            raise InvalidInputError("give epochs or steps: the noise depends on their number")
        return self.make_private(
            noise_multiplier=LEAST,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            epochs=epochs,
            steps=steps,
            **options,
        )

    @property
    def criterion(self) -> Criterion:
        """The loss that was given to `make_private`, computed for each record alone."""
        if self._criterion is None:
            raise InvalidInputError("give the loss to make_private: criterion=...")
        return self._criterion

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Noisy training metrics that tests have released so far, where they are paid for.

        They are paid for and public: the rows of `statement()["metrics"]`.
        """
        if self._ledger is None or self._state is None:
            return []
        return released_metrics(self._procedure, self._state) or []

    # What is spent

    def get_epsilon(self, delta: float) -> float:
        """Epsilon of the steps made so far, for display only.

        It is a guarantee of its own only for a number of steps that was fixed in advance. A loop
        that stops because of what it sees has the guarantee of everything that was planned,
        `guarantee(delta)`, however early it stops.
        """
        return self.accountant.get_epsilon(delta)

    def guarantee(self, delta: float | None = None) -> float:
        """Epsilon that holds whenever the loop stops; infinite if nothing was planned."""
        return self.accountant.guarantee(delta)

    @property
    def independence(self) -> str:
        """Whether records were kept apart "by construction", or the loop was "checked" for it.

        By construction if every step was made by `private_step` on a batch that the loop did not
        open, with a function that PyTorch could run for all records at once.
        """
        made = [step._records for step in self._private_steps if step._records is not None]
        apart = all(records.by_construction for records in made)
        return BY_CONSTRUCTION if apart and not self._checked else WAS_CHECKED

    def statement(self) -> Statement:
        """The privacy statement of the training, for anyone who gets the model.

        Its epsilon is `guarantee()`, however early the loop stopped.
        """
        self.check_refusal()
        plan = self.accountant.plan
        if plan is None:
            raise InvalidInputError(
                "without a plan there is no guarantee to state; give make_private epochs, steps or "
                "target_epsilon"
            )
        if self.accountant.charges_accepted and not self.accountant.completed:
            raise NothingReleasedError(
                f"the accounting {plan.accounting!r} covers a training that made all of its "
                "updates; continue until the loader ends, or release nothing"
            )
        if plan.tests and not self.finished():
            raise StepError(
                "the plan is not done, and the weights at hand may be those of a learning rate on "
                "trial; continue until the loader ends, then state and save"
            )
        facts = RunFacts(
            dataset_size=self._units.size,
            public=self._units.public,
            method=CUSTOM_LOOP,
            settings=self._settings(plan),
            seeded=self._streams.seeded,
            average=False,
            tf32=torch.backends.cuda.matmul.allow_tf32,
            bf16=self._watcher.rounded,
            versions=versions(),
            independence=self.independence,
            metrics=self.metrics if plan.tests else None,
        )
        return privacy_statement(plan, self.accountant.charged, facts)

    def _settings(self, plan: Plan) -> dict[str, Any]:
        gate, metrics = self._mechanism.gate, self._mechanism.metrics
        found: dict[str, Any] = {
            "batch_size": self.expected_batch_size,
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": self.max_grad_norm,
            "steps": None if plan.filter is not None else plan.length,
            "val_batch_size": None if gate is None else gate.val_batch_size,
            "val_noise_multiplier": None,
            "accept_threshold": None,
            "loss_clip": None,
            "optimizer": type(self._optimizer).__name__.removeprefix("Private"),
        }
        if isinstance(gate, LossGate | CoinGate):
            names = ["val_batch_size", "accept_ratio"]
            if isinstance(gate, LossGate):
                names = ["val_batch_size", "val_noise_multiplier", "accept_threshold", "loss_clip"]
            settled = gate.resolve(self._units.size)
            found |= {name: getattr(settled, name) for name in names}
        elif gate is not None:  # the search is not counted, as in `make_private`
            found["steps"] = plan.blocks[-1]
            found["val_noise_multiplier"] = plan.test.noise_multiplier
        elif metrics is not None:
            found["metrics_noise_multiplier"] = plan.test.noise_multiplier
            found["patience"] = metrics.patience
        return found

    def save(self, path: str | os.PathLike[str], *, trained_only: bool = False) -> Path:
        """Write `release/` into a new folder: weights and statement, for `dpsur verify`.

        Load it with `dpsur.load(path, model)`. With `trained_only` frozen weights are left out, as
        of the base model under LoRA adapters: `model` must then have them. Nothing private is
        written, and with a gate the number of accepted updates, which is paid for.
        """
        statement = self.statement()
        if self.due is not None and self._watcher.sums.rows:
            raise StepError("a batch was begun and not stepped on; finish it before you save")
        folder = RunFolder(path)
        folder.check_new()
        write_release(folder.release, self._module, statement, NO_ORIGIN, trained_only=trained_only)
        return folder.release

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of the loop keeps beside those of the model and the optimizer.

        Private: it holds the key of the random numbers of a seeded run. With a `BlockGate` it holds
        the saved weights and optimizer states that the search goes back to.
        """
        ledger, held = self.accountant.charged, self._state
        kept = {} if held is None else {MEMORY: held.memory, SAVED: held.saved}
        tensors = {f"{STATE}{name}": value for name, value in flatten(kept).items()}
        more: dict[str, Any] = {"independence": self.independence, "booking": self._booking}
        if self.sets_learning_rate:
            more["at_rest"] = self._weights.at_rest
        return Checkpoint(self._fingerprint(), ledger, tensors, more).to_plain()

    def _fingerprint(self) -> Fingerprint:
        plan, delta = self.accountant.plan, self.accountant.delta
        details = None if plan is None else plan.to_json()
        return Fingerprint.of(
            {
                "plan": f"{'no limit' if plan is None else plan.describe()}, delta {delta:g}",
                "details of the plan": sha256(to_json(details)),
                "sample_rate": self._units.rate,
                "noise_multiplier": self.noise_multiplier,
                "max_grad_norm": self._mechanism.max_grad_norm,
                "records": self._units.size,
                **self._units.public,
                "seed": self._seed,
            }
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a ledger, right after `make_private` with the same settings.

        Restore the model and the optimizer from the same moment. The key of the random numbers is
        a new one, unless the run is seeded: noise of steps that the checkpoint does not know is
        never drawn again.
        """
        if self.accountant.steps:
            # going back would forget steps that were made, and draw their noise again
            raise CheckpointError(
                f"this engine has made {self.accountant.steps} steps, which are charged; to resume "
                "a checkpoint, call make_private on a new PrivacyEngine first"
            )
        remedy = "call make_private with the settings of the checkpoint"
        saved = Checkpoint.from_plain(state, self._fingerprint(), "the state", remedy)
        try:
            account = self.accountant.resumed(saved.ledger)
        except (BudgetError, InvalidInputError) as error:
            raise CheckpointError(f"the state is damaged: {error}") from error
        if self.sets_learning_rate:  # the optimizer that restored weights start with
            self._weights.at_rest = map_tensors(
                lambda value: value.to(self._watcher.device) if value.dim() else value,
                saved.more["at_rest"],
                otherwise=keep,
            )
        if saved.tensors:
            weights: dict[str, Params] = {}
            for name, value in saved.under(f"{STATE}{SAVED}/").items():
                end, _, key = name.partition("/")
                weights.setdefault(end, {})[key] = value.to(self._streams.device)
            if any(self._weights.live().keys() != held.keys() for held in weights.values()):
                raise CheckpointError(
                    "the checkpoint holds other weights or buffers than the model"
                )
            self._state = replace(
                self._at_hand(), memory=saved.under(f"{STATE}{MEMORY}/"), saved=weights
            )
            self._use_clip_norm()
        booking = saved.more.get("booking")
        if booking is not None and self._data_ledger and self._data_ledger.holds(booking):
            self._booking = booking
        self._ledger, self.due = account, None
        self._checked = self._checked or saved.more.get("independence") != BY_CONSTRUCTION
        self._watcher.forget()
