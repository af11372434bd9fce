"""A pandas frame: the schema says what columns may hold, nothing is inferred from the records."""

import numpy as np
import pandas as pd

import dpsur

draw = np.random.default_rng(0)


def people(count: int) -> pd.DataFrame:
    """Made-up records."""
    age, job = draw.uniform(18, 90, count), draw.choice(["clerk", "nurse", "pilot"], count)
    rich = age / 40 + 1.5 * (job == "pilot") + draw.normal(0, 0.5, count) > 2
    return pd.DataFrame({"age": age, "job": job, "income": np.where(rich, ">50K", "<=50K")})


# Ranges and categories are public knowledge. A value outside them is clipped or becomes "other".
schema = dpsur.Schema(
    columns={"age": dpsur.Number(18, 90), "job": dpsur.Category(["clerk", "nurse", "pilot"])},
    target={"income": dpsur.Category(["<=50K", ">50K"])},
)
run = dpsur.fit(
    "auto",
    people(3000),
    schema=schema,
    test_set=people(500),  # public records
    budget=dpsur.Budget(epsilon=2.0, delta=1e-5),
)
print(f"test accuracy {run.scores['accuracy']:.1%}")
print(run.predict(pd.DataFrame({"age": [30, 60], "job": ["clerk", "pilot"]})))
