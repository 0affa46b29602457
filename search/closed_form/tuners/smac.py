"""Samples a space with SMAC3: a forest of trees learns costs and proposes points."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from autopar.errors import InstallError
from search.closed_form.tuners.tune import Pricer, Record

__all__ = ["price_with_smac"]


def price_with_smac(
    pricer: Pricer,
    evaluations: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> Record:
    """Return the record of the points that SMAC asks for.

    SMAC asks for no point twice, so a space of fewer points than evaluations ends earlier.
    Equal seeds give equal points where PYTHONHASHSEED is set too: SMAC orders sets by hashes.

    Raises InstallError where SMAC3 is not installed.
    """
    try:
        import ConfigSpace
        import smac
        from smac.model.random_forest.random_forest import RandomForest
    except ImportError as error:
        raise InstallError(
            f"SMAC3 is needed for this and cannot be imported ({error}); "
            "`pip install 'autopar[smac]'` installs it"
        ) from None
    record = Record()
    space = ConfigSpace.ConfigurationSpace(seed=seed)
    for domain in pricer.space.domains:
        last = len(domain.values) - 1
        if last == 0:
            continue
        if domain.ordered:
            space.add(ConfigSpace.Integer(domain.name, (0, last)))
        else:
            space.add(ConfigSpace.Categorical(domain.name, list(range(last + 1))))

    def cost(config: Any, seed: int = 0) -> float:
        digits = [[int(config.get(d.name, 0)) for d in pricer.space.domains]]
        priced = pricer.price(np.array(digits, np.int64))
        record.add(priced)
        if progress is not None:
            progress(record.evaluations, evaluations)
        return float(pricer.costs(priced)[0])

    with tempfile.TemporaryDirectory() as folder:
        scenario = smac.Scenario(
            space,
            deterministic=True,
            n_trials=evaluations,
            seed=seed,
            output_directory=Path(folder),
        )
        # The facade's own forest, in a fifth of the time: it would reserve room for a million
        # leaves in every tree, and wait for threads.
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
