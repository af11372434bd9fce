"""Make missing rows of the reproduction on one shared GPU, the most important first.

`python carry_o.py --out DIR --seconds N` starts workers in three pools (networks on pixels of
CIFAR-10, the ablation, small runs), each with its list in order of priority. A worker claims one
run at a time, so that none is made twice, and does not begin one that would not end in time. Rows
go to DIR/EXPERIMENT.jsonl as they are made. Known rows (results/, carry_rows/, and what earlier
calls left in /tmp/o_rows_made) are not made again.
"""

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.resolve()
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
MADE = Path("/tmp/o_rows_made")
NAMES = ("accuracy", "ablation", "iterates")
# Workers of a pool, and the share of the GPU's memory that each may take.
POOLS = {"pixels": (2, 0.16), "ablation": (4, 0.14), "small": (0, 0.035)}
# Seconds of a trial on an H200 that has nothing else to do, by pool; small ones with others beside.
PACE = {"pixels": 0.1, "ablation": 0.011, "small": 0.02}
SLOWER = {"pixels": 2.5, "ablation": 4.0, "small": 4.0}  # with the others beside it


def listed():
    """(pool, experiment, config, seed, trials) in order of priority."""
    from reproduction.arms import ARMS
    from reproduction.experiments import ablation, accuracy, iterates
    from reproduction.training import TrainingCell

    found = []

    def add(pool, name, cell, trials):
        found.append((pool, name, cell.config(), cell.seed, trials))

    def acc(pool, task, arm, epsilon, seed, trials):
        add(pool, "accuracy", TrainingCell(task, arm, epsilon, seed), trials)

    # --- pixels of CIFAR-10: cells without any row first
    acc("pixels", "cifar10", "released-dpagd", 3, 0, 440)
    for epsilon, trials in ((2, 290), (1, 80)):
        change = {"noise_multiplier": 5.67}
        cell = TrainingCell("cifar10", "dpsgd-ts", epsilon, 0, change, evaluations=iterates.LOOKS)
        add("pixels", "iterates", cell, trials)
    acc("pixels", "cifar10", "dpsgd-published", 3, 0, 518)
    acc("pixels", "cifar10", "released-dpagd", 2, 0, 450)
    acc("pixels", "cifar10", "released-dpagd", 4, 0, 700)
    for epsilon, trials in ((2, 642), (4, 866)):
        acc("pixels", "cifar10", "dpsgd-published", epsilon, 0, trials)
    for seed in (1, 2):
        acc("pixels", "cifar10", "dpsgd-ts", 1, seed, 317)
    for epsilon, trials in ((1, 400), (3, 900), (2, 900), (4, 1300)):
        acc("pixels", "cifar10", "dpagd", epsilon, 1, trials)
    # --- small runs: IMDb with the released network, the authors' DPAGD
    small = []
    for epsilon in (4, 3, 2, 1):
        for seed in range(5):
            rank = 0 if seed == 0 else (1 if seed < 3 else 3)
            small.append((rank, "imdb", "released-network", epsilon, seed, 1500))
            if seed < 3:
                small.append((rank, "imdb", "dpsgd-ts-network", epsilon, seed, 400))
                small.append((rank, "imdb", "dpsgd-network", epsilon, seed, 400))
            rank = 1 if seed == 0 else (2 if seed < 3 else 4)
            small.append((rank, "imdb", "released-commands", epsilon, seed, 1500))
    for task, epsilons in (("fmnist", (4,)), ("mnist", (2, 3, 4)), ("imdb", (1, 2, 3, 4))):
        for epsilon in epsilons:
            for seed in range(3):
                rank = 0 if seed == 0 else 2
                small.append((rank, task, "released-dpagd", epsilon, seed, 900))
    for seed in range(3):
        small.append((1 + seed, "imdb", "nonprivate-network", 1, seed, 4000))
        for epsilon in (3, 4):
            small.append((3, "imdb", "dpsgd-published", epsilon, seed, 400))
        small.append((2, "imdb", "dpagd", 3, seed, 900))
        for epsilon in (1, 2, 3, 4):
            small.append((2, "mnist", "dpagd", epsilon, seed, 900))
    # DPAGD on Fashion-MNIST with what was best on held-out records; the preset follows the rows
    chosen = {2: {"updates": 500, "largest_step": 40.0}, 4: {"updates": 1500, "largest_step": 20.0}}
    for seed in range(3):
        for epsilon, settings in chosen.items():
            config = TrainingCell("fmnist", "dpagd", epsilon, seed).config()
            config["options"] |= settings
            found.append(("small", "accuracy", config, seed, 1000))
    for _, *cell in sorted(small, key=lambda cell: cell[0]):
        acc("small", *cell)
    # --- the ablation: one seed of each value, the released code first, then both bases
    for seed in ablation.SEEDS:
        cells = list(ablation.EXPERIMENT.runs((seed,)))
        other = [c for c in cells if set(c.changes) > {"val_batch_size"}]
        main = [c for c in cells if c not in other]
        # the longest last; what is thinnest in the figure first
        long = [c for c in main if c.changes.get("accept_threshold") == -3.0]
        main.sort(key=lambda c: (c.arm != "released-code", "val_batch_size" not in c.changes))
        main = [c for c in main if c not in long]
        other = [*(c for c in other if c.changes.get("accept_threshold") != -3.0), *long]
        for cell in (*main, *other):
            beta = cell.changes.get("accept_threshold", -1.0)
            trials = {-3.0: 6000, -2.0: 3000, -1.5: 2200, -0.5: 1200}.get(beta, 1600)
            trials = 900 if beta >= 0 else trials
            add("ablation", "ablation", cell, trials)
    assert all(config["arm"] in ARMS for _, _, config, _, _ in found)
    return found


def known_keys():
    """Rows that are there, by experiment and what identifies them."""
    keys = set()
    for folder in (ROOT / "results", ROOT / "carry_rows", MADE):
        for name in NAMES:
            path = folder / f"{name}.jsonl"
            for line in path.read_text().splitlines() if path.exists() else ():
                try:
                    row = json.loads(line)
                except ValueError:
                    continue  # torn by the end of a call
                keys.add(key(name, row["config"], row["seed"]))
    return keys


def key(name, config, seed):
    return json.dumps([name, config, seed], sort_keys=True)


def missing():
    """What is to be made: listed, and not known; each once."""
    known, found = known_keys(), []
    for pool, name, config, seed, trials in listed():
        this = key(name, config, seed)
        if this not in known:
            known.add(this)
            found.append((pool, name, config, seed, trials))
    return found


def estimate(pool, trials):
    return trials * PACE[pool] * SLOWER[pool]


def work(pool, out, claims, deadline, device):
    """One process: claim, make and write rows until nothing is left or the time is up."""
    import torch

    from reproduction.rows import provenance
    from reproduction.training import trained_rows

    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(POOLS[pool][1], 0)
    todo = missing()
    order = [t for t in todo if t[0] == pool]
    if pool == "pixels":
        order += [t for t in todo if t[0] == "ablation"]
    for number, (origin, name, config, seed, trials) in enumerate(order):
        left = deadline - time.time()
        # a network is built and a graph captured first
        if left < 10 + 0.7 * estimate(origin, trials):
            continue
        claim = Path(claims) / str(abs(hash_of(key(name, config, seed))))
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            continue
        label = f"{pool} {number}: {name} {config['task']} {config['arm']} {config['epsilon']} {config['tried']} seed {seed}"
        started = time.time()
        try:
            for done, row in trained_rows(config, [seed], device):
                line = json.dumps(
                    {"experiment": name, "config": config, "seed": done, **row, **provenance()}
                )
                for folder in (Path(out), MADE):
                    with (folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
                        fcntl.flock(file, fcntl.LOCK_EX)
                        file.write(line + "\n")
                say(
                    f"{label}: {100 * row['accuracy']:.2f}, {row['trials']} trials, "
                    f"{time.time() - started:.0f} s (guess {estimate(origin, trials):.0f}), "
                    f"{deadline - time.time():.0f} s left"
                )
        except Exception as error:  # the other rows are not to suffer
            say(f"{label}: FAILED {type(error).__name__}: {str(error)[:300]}")
            # a failed capture may leave the process unfit; what is claimed is not begun again
            os.execv(sys.executable, [sys.executable, "-u", *sys.argv])


def hash_of(text):
    import hashlib

    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)


def say(text):
    print(text, flush=True)


def plan():
    """Print what would be made, with estimates."""
    total = dict.fromkeys(POOLS, 0.0)
    for pool, name, config, seed, trials in missing():
        alone = trials * PACE[pool]
        total[pool] += alone
        print(
            f"{pool:9}{name:9}{config['task']:8}{config['arm']:20}{config['epsilon']:3} seed {seed} "
            f"{json.dumps(config['tried']):55}{trials:6} trials {alone:6.0f} s alone, sum {total[pool]:6.0f}"
        )


def prepare(device):
    """Decode the data and compute features once, before the workers want them all at once."""
    from reproduction.training import loaded_records

    wanted = dict.fromkeys((c["task"], c["features"]) for p, _, c, _, _ in missing() if POOLS[p][0])
    for task, features in wanted:
        started = time.time()
        loaded_records.cache_clear()
        loaded_records(task, features, 0, device)
        say(f"prepared {task} {features}: {time.time() - started:.1f} s")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="/tmp/o_out")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--prepare", nargs="?", const="all")
    parser.add_argument("--work")
    parser.add_argument("--claims")
    parser.add_argument("--deadline", type=float)
    options = parser.parse_args()
    MADE.mkdir(parents=True, exist_ok=True)
    Path(options.out).mkdir(parents=True, exist_ok=True)
    if options.plan:
        return plan()
    if options.prepare:
        return prepare(options.device)
    if options.work:
        return work(options.work, options.out, options.claims, options.deadline, options.device)
    deadline = time.time() + options.seconds
    for name in NAMES:  # what an earlier call made comes back with this one too
        if (MADE / f"{name}.jsonl").exists():
            shutil.copy(MADE / f"{name}.jsonl", Path(options.out) / f"{name}.jsonl")
    claims = Path(f"/tmp/o_claims_{os.getpid()}")
    claims.mkdir()
    own = [
        sys.executable,
        "-u",
        str(Path(__file__).resolve()),
        "--out",
        options.out,
        "--device",
        options.device,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    first = subprocess.Popen([*own, "--prepare"], env=environment)
    try:
        first.wait(timeout=options.seconds)
    except subprocess.TimeoutExpired:
        first.kill()
        return None
    say(f"prepared with {deadline - time.time():.0f} s left")
    workers = [
        subprocess.Popen(
            [*own, "--work", pool, "--claims", str(claims), "--deadline", str(deadline)],
            env=environment,
        )
        for pool, (count, _) in POOLS.items()
        for _ in range(count)
    ]
    while time.time() < deadline and any(worker.poll() is None for worker in workers):
        time.sleep(0.5)
    for worker in workers:
        if worker.poll() is None:
            worker.send_signal(signal.SIGKILL)
    for worker in workers:
        worker.wait()
    shutil.rmtree(claims, ignore_errors=True)
    for name in NAMES:
        path = Path(options.out) / f"{name}.jsonl"
        say(f"{name}: {len(path.read_text().splitlines()) if path.exists() else 0} new rows")


if __name__ == "__main__":
    main()
