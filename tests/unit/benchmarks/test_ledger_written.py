"""Published runs written for their engine and read back as `autopar check` reads have one price."""

from __future__ import annotations

from collections import Counter

import pytest

from autopar.errors import InputError
from autopar.price.job import job_of_run
from autopar.price.step import step_time
from benchmarks.ledger import Priced, price_rows, read_runs
from search.engines.exporter_types import ExportTarget
from search.engines.files import written

pytestmark = pytest.mark.whole


def test_rows_with_settings_have_the_ledgers_price_when_they_are_read_back() -> None:
    """Of 161 rows seven train adapters, which no Bridge file of ours says; one breaks a rule of its
    engine."""
    rows, settings = read_runs()
    found = Counter[str]()
    for entry in price_rows([(line, row) for line, row in rows if line in settings], settings):
        assert isinstance(entry, Priced), entry
        run, machine = entry.run.run, entry.run.machine
        each = 8 if run.strategy.gpus % 8 == 0 and machine.card.max_gpus_per_node >= 8 else 4
        place = ExportTarget(num_nodes=max(1, run.strategy.gpus // each), gpus_per_node=each)
        try:
            export = written(run, engine="megatron-bridge", place=place)
        except InputError:
            found["refused"] += 1
            continue
        seconds = step_time(machine, job_of_run(export.runs)).total_s
        assert seconds == pytest.approx(entry.step.total_s, rel=1e-12), entry.line
        found["equal"] += 1
    assert found == {"equal": 153, "refused": 8}
