"""Time from `import dpsur` to the first update of a user's model, with records in memory, by part.

    python -m reproduction.bench.startup OUT [--methods dpsgd dpsur auto] [--seed 0] [--device cpu]

Every method is timed in two processes of its own, which share one cache: it is empty for the first
(`cold`) and has calibrations and kernels for the second (`stored`). Importing torch and starting
CUDA are stated apart from `seconds`, which is what is left: the import of the library and `fit` up
to the first update. Parts exclude each other and add up to it; `threads` are seconds of compilers
that run beside them. `seconds_again` is a second run in the same process. A row per process is
appended to OUT. The bytecode of the library is compiled first, as an installation does.
"""

import argparse
import compileall
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

RECORDS, CLASSES, BATCH = 60_000, 10, 512
IMAGE = (1, 28, 28)
METHODS = ("dpsgd", "dpsur", "auto")
# Where the time of `fit` goes: part -> module and function.
PARTS = {
    "checks": ("dpsur.runs.fit", "build_session"),  # all of it that is no other part
    "calibration": ("dpsur.runs.session", "_settle"),
    "features": ("dpsur.runs.session", "compute_inputs"),
    "placing": ("dpsur.runs.session", "place"),
    "engine choice": ("dpsur.per_example.clipping", "_make"),
    "nvrtc": ("dpsur.per_example.kernels.nvrtc", "compile_kernel"),
    "triton import": ("dpsur.per_example.kernels.fused", "_source"),
    "capture": ("dpsur.mechanism.cuda_graph_loop", "capture_graph"),
    "statement": ("dpsur.runs.fit", "finish_run"),
}


class Clock:
    """Seconds of parts that exclude each other, and how often each was entered."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.threads: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._wait, self._inner = wait, [0.0]

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time belongs to a part, without that of parts inside of it."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[part] += 1
            start = time.perf_counter()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                self._wait()
                whole = time.perf_counter() - start
                self.seconds[part] += whole - self._inner.pop()
                self._inner[-1] += whole

        return call

    def beside(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which runs in a thread beside everything else."""

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.threads[part] += time.perf_counter() - start

        return call

    def watch(self) -> None:
        """Time the parts of the library from now on."""
        for part, (home, name) in PARTS.items():
            self._replace(home, name, partial(self.timed, part))
        self._replace("dpsur.per_example.kernels.nvrtc", "_compile", self._compiler)
        self._replace("dpsur.per_example.kernels.fused", "_source", self._triton)

    def _compiler(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self.beside("nvrtc", function)

    def _triton(self, source: Callable[[], Any]) -> Callable[[], Any]:
        """Time compilations of Triton too, once it is imported."""
        watched = False

        def call() -> Any:
            nonlocal watched
            found = source()
            if found is not None and not watched:
                watched = True
                from triton.runtime.jit import JITFunction  # type: ignore[import-not-found]

                if hasattr(JITFunction, "_do_compile"):
                    compiled = self.timed("triton", JITFunction._do_compile)
                    JITFunction._do_compile = lambda *a, **k: compiled(*a, **k)
            return found

        return call

    @staticmethod
    def _replace(
        home: str, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        module = sys.modules[home]
        setattr(module, name, around(getattr(module, name)))


class FirstUpdate:
    """Ends a run after the first block of trials: a run that searches cannot be cut short."""

    class Seen(Exception):  # noqa: N818
        """It was made."""

    def started(self, *_: Any) -> None:
        """Nothing yet."""

    def evaluated(self, *_: Any) -> None:
        """There is no test set."""

    def trials(self, _progress: Any, verdicts: Sequence[Any]) -> None:
        """The first update."""
        if verdicts:
            raise self.Seen


def measured(method: str, seed: int | None, device: str, features: str | None) -> dict[str, Any]:
    """Seconds of the parts, in a process that has imported nothing yet."""
    laps = [time.perf_counter()]

    def lap() -> float:
        laps.append(time.perf_counter())
        return laps[-1] - laps[-2]

    import torch
    from torch import nn

    row: dict[str, Any] = {"experiment": "startup", "method": method, "seeded": seed is not None}
    row["seconds_torch"] = lap()
    cuda = device != "cpu" and torch.cuda.is_available()
    if cuda:
        (torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")).sum().item()
    row["seconds_cuda"] = lap()
    import dpsur
    from dpsur import Budget, Dpsgd, Dpsur, fit

    imported = lap()
    generator = torch.Generator().manual_seed(0)
    shape = IMAGE if features else (784,)
    records = (
        torch.rand(RECORDS, *shape, generator=generator),
        torch.randint(CLASSES, (RECORDS,), generator=generator),
    )
    model: nn.Module = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, CLASSES))
    if features:
        model = nn.Sequential(nn.Flatten(), nn.LazyLinear(CLASSES))
        model(torch.zeros(1, 81, 7, 7))
    chosen = {"dpsgd": Dpsgd, "dpsur": Dpsur}.get(method)

    def wait() -> None:
        if cuda and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()

    clock = Clock(wait)
    clock.watch()

    def train() -> None:
        arguments: dict[str, Any] = {"max_updates": 1} if chosen else {"observers": [FirstUpdate()]}
        with suppress(FirstUpdate.Seen):
            fit(
                model,
                records,
                budget=Budget(3.0, 1e-5),
                method=chosen(batch_size=BATCH) if chosen else None,
                seed=seed,
                device=device,
                features=features,
                **arguments,
            )

    whole = clock.timed("first update", train)  # the rest of it
    lap()
    busy = time.process_time()
    whole()
    row["seconds"] = imported + lap()
    # Of the host, without waiting: what other work on the machine cannot change.
    row["cpu_seconds_fit"] = round(time.process_time() - busy, 2)
    row["parts"] = {"import": round(imported, 3), **_rounded(clock.seconds)}
    row["calls"] = dict(clock.calls)
    row["threads"] = _rounded(clock.threads)
    whole()
    row["seconds_again"] = lap()
    for name in ("seconds", "seconds_again", "seconds_torch", "seconds_cuda"):
        row[name] = round(row[name], 2)
    row["features"] = features
    row["version"] = dpsur.__version__
    row["device"] = torch.cuda.get_device_name() if cuda else "cpu"
    row["cpu_threads"] = torch.get_num_threads()
    return row


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {part: round(value, 3) for part, value in seconds.items()}


def compile_bytecode() -> None:
    """Compile the library's modules, if they are not: only a first run in a checkout does that."""
    spec = find_spec("dpsur")
    assert spec is not None
    assert spec.origin is not None
    compileall.compile_dir(Path(spec.origin).parent, quiet=1)


def main() -> None:
    """Append a row per process; `--only` is what such a process is called with."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seed", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--features", choices=["scattering"])
    parser.add_argument("--only", choices=METHODS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only is not None:
        row = measured(options.only, options.seed, options.device, options.features)
        options.out.write_text(json.dumps(row), encoding="utf-8")
        return
    from reproduction.rows import provenance

    compile_bytecode()
    rest = [f"--device={options.device}"]
    rest += [] if options.seed is None else [f"--seed={options.seed}"]
    rest += [] if options.features is None else [f"--features={options.features}"]
    for method in options.methods:
        with tempfile.TemporaryDirectory() as folder:
            places = {"DPSUR_CACHE": f"{folder}/dpsur", "TRITON_CACHE_DIR": f"{folder}/triton"}
            for cache in ("cold", "stored"):
                found = Path(folder) / "row.json"
                command = [sys.executable, "-W", "ignore", "-m", "reproduction.bench.startup"]
                subprocess.run(
                    [*command, str(found), f"--only={method}", *rest],
                    env={**os.environ, **places},
                    check=True,
                )
                row = {**json.loads(found.read_text(encoding="utf-8")), "cache": cache}
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**row, **provenance()}) + "\n")


if __name__ == "__main__":
    main()
