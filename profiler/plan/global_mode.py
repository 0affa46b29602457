"""GLOBAL mode: one strategy for all layers from a few options, as Galvatron's launcher takes it."""

from __future__ import annotations

from autopar.errors import OptionError
from autopar.plan import LayerStrategy, Plan, VocabStrategy
from profiler.plan.options import GlobalOptions

__all__ = ["make_plan"]


def make_plan(options: GlobalOptions, *, num_layers: int, world_size: int) -> Plan:
    """Return the plan that the options describe for a model of so many layers.

    Stages are even and the last one has the remainder, as in strategy files without
    `pp_division`. What is not given: degrees 1, consecutive groups, ddp, no checkpoint, gpipe (the
    launcher's default), and one micro-batch per stage, the fewest that 1F1B runs with.

    Raises
    ------
    OptionError: the batch is not given, or there are more stages than layers.
    """
    if options.global_train_batch_size is None:
        raise OptionError(
            f"{options.given[0]} is given without a plan file, and --global-train-batch-size "
            "(samples of a step) is missing beside it; add it"
        )
    stages = options.pp_deg or 1
    each, rest = divmod(num_layers, stages)
    if each == 0:
        raise OptionError(
            f"--pp-deg: {stages} stages for {num_layers} layers; give at most {num_layers}"
        )
    degree = options.global_tp_deg or 1
    layer = LayerStrategy(
        tp=degree,
        ulysses=bool(options.use_ulysses) and degree > 1,
        zero3=bool(options.sdp),
        checkpoint=bool(options.global_checkpoint),
        strided=options.global_tp_consec is False and degree > 1,
    )
    vocab_degree = options.vocab_tp or 1
    return Plan(
        world_size=world_size,
        num_stages=stages,
        stage_sizes=(each,) * (stages - 1) + (each + rest,),
        layers=(layer,) * num_layers,
        vocab=VocabStrategy(
            tp=vocab_degree,
            ulysses=bool(options.vocab_sp) and vocab_degree > 1,
            zero3=bool(options.embed_sdp),
        ),
        global_batch=options.global_train_batch_size,
        num_microbatches=options.chunks or stages,
        pipeline_type=options.pipeline_type or "gpipe",
        default_dp_type=options.default_dp_type or "ddp",
    )
