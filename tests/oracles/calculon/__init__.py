"""The closed-form Calculon model in plain Python, against which the compiled engine is tested.

It shares only the documents and the named defects with the product: no number of the engine is in
it. Source: Calculon (SC'23), doi 10.1145/3581784.3607102.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.documents.checks import load_document
from search.closed_form.calculon import COMPAT, CORRECT, Application, Execution, Quirks, System
from tests.oracles.calculon.block import Machine, sum_block
from tests.oracles.calculon.checks import (
    check_datatype,
    check_execution,
    check_memory,
    check_published,
    check_shape,
    published_application,
)
from tests.oracles.calculon.layers import block_layers
from tests.oracles.calculon.machine import engine_rate, memory_rate, tier_of
from tests.oracles.calculon.shape import shape_of
from tests.oracles.calculon.step import step_statistics
from tests.oracles.calculon.tables import layer_table
from tests.oracles.calculon.vocab import vocab_of

__all__ = ["evaluate"]


def evaluate(
    application: Application | Mapping[str, Any] | Path | str,
    execution: Execution | Mapping[str, Any] | Path | str,
    system: System | Mapping[str, Any] | Path | str,
    *,
    compat: bool | Quirks = False,
    layers: bool = False,
) -> dict[str, Any]:
    """Return or raise the results of `search.closed_form.calculon.evaluate`."""
    a = load_document(Application, application)
    x = load_document(Execution, execution)
    s = load_document(System, system)
    quirks = compat if isinstance(compat, Quirks) else (COMPAT if compat else CORRECT)
    if compat is True:
        check_published(x)
        a = published_application(a)
    check_execution(a, x, s, quirks)
    check_datatype(x, s, quirks)
    shape = shape_of(a, x, quirks)
    check_shape(a, x, shape, s)
    machine = Machine(
        matrix=engine_rate(s.matrix[x.datatype]),
        vector=engine_rate(s.vector[x.datatype]),
        memory=memory_rate(s.mem1),
        # GiB are 2^30 bytes
        memory_bytes=s.mem1.GiB * 2**30,
        second_memory=memory_rate(s.mem2),
        second_memory_bytes=s.mem2.GiB * 2**30,
        roofline=s.processing_mode == "roofline",
        tensor=tier_of(s.networks[x.tensor_par_net]),
        pipeline=tier_of(s.networks[x.pipeline_par_net]),
        data=tier_of(s.networks[x.data_par_net]),
    )
    operations = block_layers(shape)
    block = sum_block(shape, operations, machine)
    statistics = step_statistics(x, shape, block, machine, vocab_of(shape, machine))
    check_memory(1, statistics["proc_mem_tier1_cap_req"] or 0.0, machine.memory_bytes)
    check_memory(2, statistics["proc_mem_tier2_cap_req"] or 0.0, machine.second_memory_bytes)
    if layers:
        statistics["layers"] = layer_table(shape, operations, machine)
    return statistics
