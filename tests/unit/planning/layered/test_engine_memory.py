"""Memory of plans as Megatron-LM runs them, beside that of the runs they are handed over as.

The run is written, read anew and counted tensor by tensor; measured runs hold that count
(`test_memory_goldens`). Time, and how engines are chosen, are in other files.
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

from autopar.price.account import account_of
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy, violations
from autopar.run.run import Run
from search.engines.megatron.read import arguments_of_configuration, read_run
from search.engines.plans import ExportJob, lower_for
from search.engines.text import read_configuration
from search.planning.cost.engine_memory import with_megatron_memory
from search.planning.cost.memory import COMMUNICATOR_BYTES
from search.planning.session import Session, open_session
from search.request.options import SearchOptions
from search.request.request import InputSpec

MACHINES = {"h100:2x8": 16, "a100-80gb:1x8": 8}
MODELS = ("llama3-8b", "gpt-6.7b", "mistral-7b", "qwen2.5-7b")


@cache
def session(model: str, machine: str, sequence_parallel: bool) -> Session:
    """Return the inputs of a model on a machine, as Megatron-LM keeps it."""
    return open_session(
        InputSpec(model=model, hardware=machine, stack="megatron-core"),
        SearchOptions(memory_of="megatron", tp_overlap=False, sequence_parallel=sequence_parallel),
        {"sequence-parallel", "global-batch-size", "memory-of"},
    )


def plans(session: Session) -> list[Plan]:
    """Return plans of one degree for all layers, of all degrees, stages and kinds."""
    world, layers = session.hardware.world_size, session.spec.num_layers
    found = []
    for tp, pp, again, kind in itertools.product(
        (1, 2, 4), (1, 2, 4), (False, True), ("ddp", "zero2", "zero3")
    ):
        if kind == "zero3" and pp > 1:
            continue  # nobody has measured it beside stages
        dp = world // (tp * pp)
        if not dp:
            continue
        microbatches = 2 * pp
        plan = Plan(
            world_size=world,
            num_stages=pp,
            stage_sizes=(layers // pp,) * pp,
            layers=(LayerStrategy(tp=tp, checkpoint=again, zero3=kind == "zero3"),) * layers,
            vocab=VocabStrategy(tp=tp, zero3=kind == "zero3"),
            global_batch=2 * dp * microbatches,
            num_microbatches=microbatches,
            default_dp_type="zero2" if kind == "zero2" else "ddp",
        )
        sp = session.options.sequence_parallel
        if not any(violations(plan, session.spec, sequence_parallel=sp)):
            found.append(plan)
    return found


def communicators_bytes(plan: Plan, stage: int) -> int:
    """Return what the planner counts of communicators, which no run's tensors are.

    Of the world, the pipeline, tensor and data ranks of layers, and those of embedding and head.
    """
    own = (plan.layers[0].tp > 1) + (plan.data_degree(0) > 1)
    at_end = stage in (0, plan.num_stages - 1)
    return COMMUNICATOR_BYTES * (1 + (plan.num_stages > 1) + own + own * at_end)


def handed(plan: Plan, asked: Session, model: str, gpu: str, folder: Path) -> Run:
    """Return the run that a plan is handed over as, read from its file."""
    job = ExportJob(
        plan=plan,
        spec=asked.spec,
        model=model,
        num_nodes=asked.hardware.num_nodes,
        gpus_per_node=asked.hardware.gpus_per_node,
        sequence_parallel=asked.options.sequence_parallel,
        precision=asked.options.mixed_precision,
        tp_overlap=False,
    )
    lowered = lower_for("megatron")(job)
    assert not lowered.losses
    path = folder / "arguments.sh"
    path.write_text(lowered.files["megatron_args.sh"])
    world = asked.hardware.world_size
    arguments, environment = arguments_of_configuration(read_configuration(path))
    return read_run(arguments, world_size=world, environment=environment, gpu=gpu).run


@pytest.mark.parametrize(
    ("tokens", "precision"),
    [
        # a mask of the dataloader would be 4 GiB
        pytest.param(65536, "bf16", id="long"),
        # sums of fp16 gradients in fp32 are twice the bytes that fp16 has by itself
        pytest.param(8192, "fp16", id="fp16"),
    ],
)
def test_long_and_narrow_plans_take_what_their_runs_take(
    tokens: int, precision: Literal["bf16", "fp16"], tmp_path: Path
) -> None:
    """Within 0.5 %; communicators are on top."""
    model, machine = "llama3-8b", "h100:2x8"
    asked = open_session(
        InputSpec(model=model, hardware=machine, stack="megatron-core", seq_length=(tokens,)),
        SearchOptions(memory_of="megatron", tp_overlap=False, mixed_precision=precision),
        {"global-batch-size", "memory-of"},
    )
    plan = Plan(
        world_size=16,
        num_stages=1,
        stage_sizes=(32,),
        layers=(LayerStrategy(tp=8),) * 32,
        vocab=VocabStrategy(tp=8),
        global_batch=16,
        num_microbatches=8,
        default_dp_type="zero2",
    )
    run = handed(plan, asked, model, "h100", tmp_path)
    (stage,) = asked.planner.evaluate(plan, 1e15).stages
    counted = account_of(run, 0).peak_bytes
    assert stage.allocated_bytes - communicators_bytes(plan, 0) == pytest.approx(counted, rel=0.005)


@pytest.mark.whole
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_plans_take_what_their_runs_take(
    model: str, sequence_parallel: bool, tmp_path: Path
) -> None:
    """Every stage within 3 %, half of them within 0.5 %; communicators are on top."""
    apart = []
    for machine, world in MACHINES.items():
        asked = session(model, machine, sequence_parallel)
        # each kind of plan once, in one of both machines
        for plan in plans(asked)[world == 8 :: 2]:
            run = handed(plan, asked, model, machine.partition(":")[0], tmp_path)
            for stage in asked.planner.evaluate(plan, 1e15).stages:
                counted = account_of(run, stage.stage).peak_bytes
                predicted = stage.allocated_bytes - communicators_bytes(plan, stage.stage)
                if plan.layers[0].zero3:
                    # units that follow one another are added up
                    assert -0.01 < predicted / counted - 1 < 0.04, (plan, stage.stage)
                    continue
                assert predicted == pytest.approx(counted, rel=0.03), (plan, stage.stage)
                apart.append(abs(predicted / counted - 1))
    assert len(apart) > 30
    assert sorted(apart)[len(apart) // 2] < 5e-3


def test_layers_of_other_kinds_are_refused() -> None:
    """Encoders, and decoders that read them, are none of Megatron-LM's that are counted."""
    asked = session("llama3-8b", "h100:2x8", True)
    with pytest.raises(Exception, match="decoder-only") as caught:
        open_session(
            InputSpec(model="t5-3b", hardware="a100-80gb:1x8"),
            SearchOptions(memory_of="megatron"),
        )
    assert "t5-3b" in str(caught.value)
    # and what is counted does not depend on the profile's own tables
    again = with_megatron_memory(asked.profile, asked.spec, gpu=asked.hardware.name)
    assert again.layers == asked.profile.layers
