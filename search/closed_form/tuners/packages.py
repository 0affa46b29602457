"""Tuners that need an optional package: Ray, Ray Tune with its search algorithms, and SMAC.

Spaces, costs and the tuners without optional packages are in `tune`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from autopar.errors import InputError, InstallError
from autopar.records import replace
from search.closed_form.tuners.tune import CHUNK, Domain, Pricer, Progress, Record, price_range

# --------------------------------------------------------------------------------------------------
# Connection to Ray, which is an optional extra.


LOCAL = "local"
_KNOCK_S = 10.0


@contextlib.contextmanager
def cluster(address: str, cpus: int) -> Iterator[Any]:
    """Yield the module `ray`, connected to a cluster, and disconnect at the end.

    An existing connection is used and stays open.

    address : address of a cluster, 'auto' for a running cluster on this machine, or 'local' to
        start one.
    cpus : number of worker processes if `address` is 'local'.

    Raises InstallError: ray is not installed. Raises InputError: no cluster answers at the address.
    """
    # Disables usage reports, also for processes that Ray starts.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # The default of a later release; avoids a warning on machines without accelerators.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise _missing("Ray", "ray", error) from None
    if ray.is_initialized():
        yield ray
        return
    where: dict[str, Any] = {"address": address}
    if address == LOCAL:
        where.update(num_cpus=cpus, include_dashboard=False)
    try:
        _knock(address)
        # stdout is for the result, so workers do not print.
        ray.init(**where, log_to_driver=False, logging_level=logging.ERROR)
    # OverflowError: the port number is above 65535.
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        raise InputError(
            f"--ray {address}: no Ray cluster answers ({str(error).splitlines()[0]:.120})",
            remedy="Start one with `ray start --head`, or use --ray local",
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _missing(what: str, extra: str, error: ImportError) -> InstallError:
    """Return the error with the extra that installs a missing package."""
    return InstallError(
        f"{what} needs a package that cannot be imported ({error})",
        remedy=f"Run `pip install 'autopar[{extra}]'`",
    )


def _knock(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT; Ray itself would retry for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        # IPv6 addresses are written in brackets.
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S):
            pass


# --------------------------------------------------------------------------------------------------
# Evaluation of every point of a space on the workers of a Ray cluster.


_SHARDS_PER_CPU = 8
"""Tasks per CPU: enough to balance the load, few enough to keep the overhead of tasks small."""


def price_all_on_ray(pricer: Pricer, address: str, progress: Progress | None = None) -> Record:
    """Return the record of all points of a space, evaluated on a Ray cluster.

    Each task evaluates a range of points with one thread. Ranges are joined in order, so the record
    equals that of `price_range`. Raises the errors of `cluster`.
    """
    size = pricer.space.size
    with cluster(address, pricer.threads) as ray:
        cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
        step = max(CHUNK, -(-size // (cpus * _SHARDS_PER_CPU)))
        # A task has one CPU.
        shared = ray.put(replace(pricer, threads=1))
        task = ray.remote(num_cpus=1)(price_range)
        record = pricer.record(size, progress)
        parts = [
            task.remote(shared, begin, min(begin + step, size)) for begin in range(0, size, step)
        ]
        for part in parts:
            record.join(ray.get(part))
        return record


# --------------------------------------------------------------------------------------------------
# Sampling of a space with SMAC3: a random forest learns costs and proposes points.


def price_with_smac(
    pricer: Pricer,
    evaluations: int,
    seed: int,
    progress: Progress | None = None,
) -> Record:
    """Return the record of the points that SMAC proposes.

    SMAC proposes no point twice, so it stops early if the space has fewer points than evaluations.
    Equal seeds give equal points only if PYTHONHASHSEED is set too, since SMAC orders sets by
    hashes.

    Raises InstallError if SMAC3 is not installed.
    """
    try:
        import ConfigSpace
        import smac
        from smac.model.random_forest.random_forest import RandomForest
    except ImportError as error:
        raise _missing("SMAC3", "smac", error) from None
    record = pricer.record(evaluations, progress)
    space = ConfigSpace.ConfigurationSpace(seed=seed)
    for domain in pricer.space.domains:
        last = len(domain.values) - 1
        # A single value is no choice: the parameter is omitted, and its digit is 0.
        if last == 0:
            continue
        if domain.ordered:
            # Positions, since the steps between values need not be equal.
            space.add(ConfigSpace.Integer(domain.name, (0, last)))
        else:
            space.add(ConfigSpace.Categorical(domain.name, list(range(last + 1))))

    def cost(config: Any, seed: int = 0) -> float:
        priced = pricer.price(_digits(pricer, config))
        record.add(priced)
        return float(pricer.costs(priced)[0])

    # SMAC always writes its history, which is not needed.
    with tempfile.TemporaryDirectory() as folder:
        scenario = smac.Scenario(
            space,
            # A point has one cost, so no point is priced twice.
            deterministic=True,
            n_trials=evaluations,
            seed=seed,
            output_directory=Path(folder),
        )
        # The default forest of the facade, five times faster: the default reserves space for a
        # million leaves per tree, and waits for threads.
        forest = RandomForest(
            configspace=space,
            n_trees=10,
            ratio_features=1.0,
            min_samples_split=2,
            min_samples_leaf=1,
            max_depth=2**20,
            max_leaf_nodes=max(2, evaluations),
            log_y=True,
            seed=seed,
            n_jobs=1,
        )
        facade = smac.HyperparameterOptimizationFacade(
            scenario, cost, model=forest, overwrite=True, logging_level=logging.ERROR
        )
        facade.optimize()
    return record


# --------------------------------------------------------------------------------------------------
# Ray Tune.


RAY_SEARCHES: dict[str, str] = {"optuna": "seed", "hyperopt": "random_state_seed", "random": ""}
"""Search algorithm of Ray Tune -> name of its seed parameter."""
_EXTRAS = {"optuna": "ray", "hyperopt": "hyperopt"}
"""Search algorithm -> extra of autopar that installs its package."""
_LONG = 16
"""Maximum number of values in a list of numbers that is sampled as categories."""


def price_with_ray_tune(
    pricer: Pricer,
    evaluations: int,
    seed: int,
    *,
    search: str,
    address: str,
    progress: Progress | None = None,
) -> Record:
    """Return the record of the points that a search algorithm of Ray Tune proposes.

    Each point is one trial. Trials run one after another, so that a learning algorithm knows all
    results before its next proposal, and equal seeds give equal points.

    search : one of `RAY_SEARCHES`.
    address : as for `cluster`.

    Raises InstallError: ray Tune or the search algorithm is not installed. Raises InputError: no
    cluster answers at the address.
    """
    # Ray would write a file per trial and logger, and reads these variables on import.
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "3600")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # the new output always prints on stdout
    with cluster(address, 1), tempfile.TemporaryDirectory() as folder:
        tune = _tune()
        searcher = _searcher(tune, search, seed)
        free = [d for d in pricer.space.domains if len(d.values) > 1]
        where = {d.name: _parameter(tune, d) for d in free}
        record = pricer.record(evaluations, progress)

        class Trial(tune.Trainable):  # type: ignore[name-defined, misc]
            """Trial that evaluates one point and reports its cost."""

            def setup(self, config: dict[str, Any]) -> None:
                self.config = config

            def reset_config(self, new_config: dict[str, Any]) -> bool:
                self.config = new_config
                return True

            def step(self) -> dict[str, Any]:
                digits = _digits(pricer, self.config)
                return {"cost": float(pricer.costs(pricer.price(digits))[0]), "done": True}

        class Watch(tune.Callback):  # type: ignore[name-defined, misc]
            """Callback that records every result, in the order of the trials."""

            def on_trial_complete(
                self, iteration: int, trials: list[Any], trial: Any, **_: Any
            ) -> None:
                # The record needs executions and refusals, while a trial reports only its cost.
                record.add(pricer.price(_digits(pricer, trial.config)))

        results = tune.Tuner(
            tune.with_resources(Trial, {"cpu": 1}),
            param_space=where,
            tune_config=tune.TuneConfig(
                metric="cost",
                mode="min",
                search_alg=searcher,
                num_samples=evaluations,
                max_concurrent_trials=1,
                # Starting a worker takes longer than pricing a point.
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name="autopar",
                storage_path=str(Path(folder)),
                verbose=0,
                callbacks=[Watch()],
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            ),
        ).fit()
        if results.num_errors:
            raise RuntimeError(f"a trial of Ray Tune failed: {results.errors[0]}")
    return record


def _tune() -> Any:
    try:
        from ray import tune
    except ImportError as error:
        raise _missing("Ray Tune", "ray", error) from None
    return tune


def _searcher(tune: Any, search: str, seed: int) -> Any:
    if search == "random":
        from ray.tune.search.basic_variant import BasicVariantGenerator

        return BasicVariantGenerator(random_state=seed, max_concurrent=1)
    try:
        __import__(search)
    except ImportError as error:
        raise InstallError(
            f"--ray-search {search} needs the package {search}, which cannot be imported ({error})",
            remedy=f"Run `pip install 'autopar[{_EXTRAS[search]}]'`",
        ) from None
    return tune.search.create_searcher(search, **{RAY_SEARCHES[search]: seed})


def _parameter(tune: Any, domain: Domain) -> Any:
    """Return the Ray Tune parameter that samples positions in a domain.

    Numbers are sampled as integers if there are more than `_LONG`. Shorter lists are sampled as
    categories, like words, because the algorithms found the best points sooner this way
    (docs/concepts/closed-form.md). The best value of a field rarely moves to a neighbouring value
    if other fields change.
    """
    count = len(domain.values)
    if domain.ordered and count > _LONG:
        return tune.randint(0, count)
    return tune.choice(list(range(count)))


def _digits(pricer: Pricer, config: Any) -> Any:
    return np.array([[int(config.get(d.name, 0)) for d in pricer.space.domains]], np.int64)
