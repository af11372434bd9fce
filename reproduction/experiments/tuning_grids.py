"""The settings that are tried, by method and task."""

from collections.abc import Mapping, Sequence
from typing import Any

HELD_OUT = {
    "fmnist": 10_000,
    "mnist": 10_000,
    "cifar10": 10_000,
    "imdb": 5_000,
    "imdb-words": 5_000,
}
# The larger the clip norm, the more gradients are below it, and the less noise importance sampling
# needs; the rate makes up for it, so that a step is as long as with a clip norm of 0.1.
LARGER_CLIP_NORMS: Sequence[Mapping[str, Sequence[Any]]] = tuple(
    {
        "batch_size": (8192,),
        "max_grad_norm": (bound,),
        "learning_rate": (rate,),
        "schedule": ("constant", "linear"),
        "updates": (600,),
    }
    for bound, rate in ((0.3, 1.3), (1.0, 0.4), (3.0, 0.13))
)
# Of the preset tuned: large batches, few updates.
ON_FEATURES: Mapping[str, Sequence[Any]] = {
    "batch_size": (8192, 16384),
    "updates": (300, 600, 1000),
    "learning_rate": (4.0, 8.0, 16.0),
}
SELECTIVE_ON_FEATURES: Mapping[str, Sequence[Any]] = {
    "batch_size": (8192,),
    "updates": (100, 200, 400),
    "learning_rate": (4.0, 8.0, 16.0),
}
ON_WORDS: Mapping[str, Sequence[Any]] = {
    "batch_size": (8192,),
    "updates": (100, 200),
    "learning_rate": (8.0, 16.0),
}
GRIDS: Mapping[tuple[str, str], Sequence[Mapping[str, Sequence[Any]]]] = {
    ("dpis", "fmnist"): (
        {
            "batch_size": (2048,),
            "learning_rate": (2.0, 4.0, 8.0),
            "updates": (300, 600, 1000, 1500, 2500),
        },
    ),
    ("dpis", "mnist"): (
        {
            "batch_size": (2048,),
            "learning_rate": (2.0, 4.0),
            "updates": (1000, 2500),
        },
    ),
    ("dpis", "cifar10"): (
        {
            "batch_size": (4096,),
            "learning_rate": (2.0, 4.0, 8.0),
            "updates": (1000,),
        },
        {
            "batch_size": (8192,),
            "learning_rate": (4.0, 8.0, 16.0),
            "updates": (600,),
        },
        {
            "batch_size": (8192,),
            "learning_rate": (8.0,),
            "updates": (1000,),
        },
        {
            "batch_size": (8192,),
            "learning_rate": (4.0,),
            "schedule": ("constant",),
            "updates": (600,),
        },
        *LARGER_CLIP_NORMS,
    ),
    ("dpis", "imdb"): (
        {
            "batch_size": (1024,),
            "learning_rate": (0.005, 0.01, 0.02),
            "updates": (200, 400),
        },
    ),
    **{("dpagd", task): () for task in ("fmnist", "mnist", "cifar10", "imdb")},  # below
    ("best-dpsgd", "imdb-words"): (ON_WORDS,),
    ("best-dpsur", "imdb-words"): (ON_WORDS,),
    ("best-dpsgd", "fmnist"): (ON_FEATURES,),
    ("best-dpsgd", "mnist"): (ON_FEATURES,),
    ("best-dpsur", "fmnist"): (SELECTIVE_ON_FEATURES,),
    ("best-dpsur", "mnist"): (SELECTIVE_ON_FEATURES,),
    ("best-dpsgd", "cifar10"): (),  # of its own at every budget, below
}
# Tried at the budget at which the records that are left stand to the noise as all of them do in
# the run that is tuned: with fewer, short and cautious runs look better than they are.
# What noise adds up to depends on the length of the path, not on the batch, as long as there are
# thousands of updates; so smaller batches are tried too, which take a fraction of the time.
STRETCHED: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]] = {
    ("dpis", "cifar10"): tuple(
        {
            "batch_size": batch_size,
            "max_grad_norm": bound,
            "learning_rate": rate,
            "schedule": schedule,
            "updates": updates,
        }
        for batch_size, bound, rate, schedule, updates in (
            (8192, 1.0, 0.4, "linear", 600),
            (8192, 1.0, 0.4, "linear", 1000),
            (8192, 1.0, 0.6, "linear", 1000),
            (8192, 1.0, 0.2, "linear", 2000),
            (8192, 1.0, 0.3, "linear", 2000),
            (8192, 10.0, 0.06, "linear", 1000),
            (2048, 1.0, 0.2, "linear", 2000),
            (4096, 1.0, 0.2, "linear", 2000),
            (4096, 1.0, 0.15, "linear", 2000),
            (4096, 1.0, 0.1, "linear", 4000),
        )
    )
    # a constant rate leaves less noise behind on a path of the same length, if its end is averaged
    + tuple(
        {
            "batch_size": 4096,
            "max_grad_norm": 1.0,
            "learning_rate": rate,
            "schedule": "constant",
            "updates": 2000,
            "average_decay": decay,
        }
        for rate, decay in ((0.1, 0.99), (0.1, 0.995), (0.1, 0.998), (0.13, 0.998))
    )
}
# Settings of DPIS that are the best at epsilon 3 are too bold where the noise is larger. The noise
# that a path adds up grows with its length, so shorter steps are tried at smaller budgets.
SHORTER_STEPS: Mapping[tuple[str, str, int], Sequence[Mapping[str, Any]]] = {
    ("dpis", task, epsilon): tuple({**others, "learning_rate": rate} for rate in rates)
    for task, others, tried in (
        (
            "cifar10",
            {
                "batch_size": 4096,
                "max_grad_norm": 1.0,
                "schedule": "constant",
                "updates": 2000,
                "average_decay": 0.998,
            },
            {1: (0.03, 0.05), 2: (0.08, 0.13)},
        ),
        ("mnist", {"batch_size": 2048, "updates": 2500}, {1: (0.5, 1.0), 2: (1.0, 2.0)}),
    )
    for epsilon, rates in tried.items()
}
# The more the noise, the shorter the path that pays: fewer updates, or shorter ones.
ON_PHOTOGRAPHS: Mapping[int, Sequence[tuple[int, int, float]]] = {  # batch, updates, learning rate
    1: ((8192, 300, 4.0), (8192, 600, 2.0), (8192, 600, 4.0)),
    2: ((8192, 1200, 2.0), (8192, 1200, 4.0)),
    3: ((8192, 600, 4.0), (8192, 1200, 2.0), (8192, 1200, 4.0)),
}
AVERAGED_ON_PHOTOGRAPHS: Mapping[int, Sequence[tuple[int, int, float]]] = {
    1: ((8192, 600, 2.0),),
    2: ((8192, 1200, 2.0),),
    3: ((8192, 1200, 2.0),),
}
BEST_ON_PHOTOGRAPHS: Mapping[tuple[str, str, int], Sequence[Mapping[str, Any]]] = {
    ("best-dpsgd", "cifar10", epsilon): tuple(
        {"batch_size": batch_size, "updates": updates, "learning_rate": rate, **others}
        for tried, others in (
            (ON_PHOTOGRAPHS, {}),
            (AVERAGED_ON_PHOTOGRAPHS, {"schedule": "constant", "average_decay": 0.99}),
        )
        for batch_size, updates, rate in tried[epsilon]
    )
    for epsilon in ON_PHOTOGRAPHS
}
# DPAGD with momentum and a range of step lengths that shrinks to a fifth. What is tried is how many
# steps, how long, and on how large a batch; a choice takes a tenth of the budget.
STEP_LENGTHS: Mapping[
    tuple[str, int], Sequence[tuple[int, int, float]]
] = {  # batch, updates, range
    ("fmnist", 1): ((2048, 600, 10.0), (4096, 500, 10.0), (4096, 500, 20.0)),
    ("fmnist", 2): ((4096, 500, 20.0), (4096, 1000, 20.0), (4096, 500, 40.0)),
    ("fmnist", 3): (
        (2048, 1500, 10.0),
        (4096, 1000, 20.0),
        (4096, 1000, 10.0),
        (2048, 2500, 10.0),
    ),
    ("fmnist", 4): ((4096, 1000, 20.0), (4096, 1000, 40.0), (4096, 1500, 20.0)),
    ("mnist", 1): ((2048, 600, 5.0), (4096, 500, 10.0)),
    ("mnist", 3): ((2048, 1500, 5.0), (4096, 1000, 10.0)),
    ("cifar10", 1): ((4096, 250, 10.0), (4096, 250, 5.0)),
    ("imdb", 1): ((1024, 200, 10.0), (1024, 200, 20.0)),
    ("imdb", 2): ((1024, 200, 20.0), (1024, 500, 20.0), (1024, 500, 40.0)),
    ("imdb", 3): ((1024, 500, 10.0), (1024, 500, 20.0)),
    ("imdb", 4): ((1024, 500, 20.0), (1024, 500, 40.0)),
}
SCORED_ON = {"fmnist": 512, "mnist": 512, "cifar10": 256, "imdb": 256}
ADAPTIVE_STEPS: Mapping[tuple[str, str, int], Sequence[Mapping[str, Any]]] = {
    ("dpagd", task, epsilon): tuple(
        {
            "batch_size": batch_size,
            "val_batch_size": SCORED_ON[task],
            "updates": updates,
            "largest_step": largest,
            "momentum": 0.9,
            "range_schedule": "linear",
            "choice_share": 0.1,
            "loss_clip": 3.0,
            "raise_by": 0.005,
        }
        for batch_size, updates, largest in tried
    )
    for (task, epsilon), tried in STEP_LENGTHS.items()
}
# What the preset tuned is tried at; all else at EPSILON. A budget between takes the nearest.
BEST_EPSILONS = (1, 3)
