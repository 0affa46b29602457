"""What a model keeps in memory as Megatron-LM's layers have it, as tables that a planner reads.

`autopar.price.account` counts one launch; here the same terms, of one sample and by tensor degree,
become the memory of a `ModelProfile`. How plans add them up is `search.planning.cost`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from autopar.errors import InputError
from autopar.price.activations import input_bytes, layer_saved_bytes
from autopar.price.kept import (
    accumulation_bytes,
    cublas_bytes,
    engine_workspace_bytes,
    rotary_bytes,
)
from autopar.price.parameters import head_weight, layer_weights
from autopar.price.peak import backward_bytes, head_bytes, kept_logits_bytes
from autopar.records import replace
from autopar.run.launch import (
    Attention,
    Degrees,
    Experts,
    Latent,
    Launch,
    Model,
    Precision,
    Software,
    default_attention,
    even_chunks,
)
from autopar.run.model import (
    LayerMemory,
    LayerSpec,
    ModelProfile,
    ModelSpec,
    OtherMemory,
    head_dim,
    layer_norms,
)
from autopar.run.plan import tensor_degrees
from autopar.sources import Source

_TOKEN_BYTES = 12
"""Of a token of a micro-batch: its number and the next one's, its place, its weight in the loss."""


def launch_model(spec: ModelSpec) -> Model:
    """Return the sizes of a whole model as trainers build it, without dropout.

    Layers may be of two kinds, dense ones and mixtures, in any order, and some may have a window;
    everything else is one for all. Experts are grouped and send tokens to each other. What has no
    size worth counting is left out: sinks of attention, biases of routers. Raises InputError with
    the reason where Megatron-LM and trainers with layers of torch cannot say a model.
    """
    kinds = [_known(spec, layer) for layer in spec.layers]
    first = kinds[0]
    for other in kinds[1:]:
        for what, (one, two) in {
            "widths": (first.hidden_size, other.hidden_size),
            "sequence lengths": (first.seq_length, other.seq_length),
            "heads": (_heads(first), _heads(other)),
            "norms": (_norms(first), _norms(other)),
            "biases": (_biases(first), _biases(other)),
        }.items():
            if one != two:
                raise InputError(
                    f"model {spec.name!r}: its layers have two kinds of {what}, which one launch "
                    "cannot say"
                )
    mixtures = [layer for layer in kinds if layer.num_experts is not None]
    dense = [layer for layer in kinds if layer.num_experts is None]
    for what, sizes in (
        ("experts", {_mixture(layer) for layer in mixtures}),
        ("dense MLPs", {layer.ffn_hidden_size for layer in dense}),
    ):
        if len(sizes) > 1:
            raise InputError(
                f"model {spec.name!r}: its layers have {what} of two kinds, which one launch "
                "cannot say"
            )
    window, whole_every = _windows(spec)
    model = _model(spec, first, (dense or kinds)[0], mixtures[0] if mixtures else None)
    return replace(
        model,
        attention=replace(model.attention, window=window, whole_every=whole_every),
        expert_layers=tuple(kinds[kind].num_experts is not None for kind in spec.layer_types),
        mtp=spec.mtp_layers,
    )


def megatron_model(spec: ModelSpec, layer: LayerSpec) -> Model:
    """Return the sizes of a model of one such layer as Megatron-LM builds it, without dropout.

    Raises InputError where it has no such layers, or sizes are unknown.
    """
    known = _known(spec, layer)
    mixture = known if known.num_experts is not None else None
    model = _model(spec, known, known, mixture)
    if model.experts is None:
        return model
    # as the planner splits them: every rank has a share of all experts, and all tokens
    experts = replace(model.experts, dispatcher="allgather", grouped=False)
    return replace(model, experts=experts)


def _known(spec: ModelSpec, layer: LayerSpec) -> LayerSpec:
    """Return a layer that is a decoder's and has all its sizes; raises InputError for others."""
    if layer.cross_attention or not layer.causal:
        raise InputError(
            f"model {spec.name!r}: Megatron-LM's memory is counted of decoder-only models; "
            "leave --engine megatron out"
        )
    if layer.num_heads is None or layer.ffn_hidden_size is None or spec.vocab_size is None:
        raise InputError(
            f"model {spec.name!r}: heads, MLP width or vocabulary are unknown; "
            "give a model spec (--model)"
        )
    if layer.norm_parameters_per_hidden not in (layer_norms(layer), 2 * layer_norms(layer)):
        raise InputError(
            f"model {spec.name!r}: norms with {layer.norm_parameters_per_hidden} parameters per "
            f"hidden size in {layer_norms(layer)} norms are neither RMSNorms nor LayerNorms"
        )
    return layer


def _heads(layer: LayerSpec) -> tuple[object, ...]:
    """Return what makes the attention of a layer."""
    groups = layer.num_kv_heads or layer.num_heads
    return (layer.num_heads, groups, head_dim(layer), layer.latent, layer.qk_norms)


def _norms(layer: LayerSpec) -> tuple[object, ...]:
    return (layer_norms(layer), layer.norm_parameters_per_hidden)


def _biases(layer: LayerSpec) -> tuple[object, ...]:
    return (layer.biases, layer.biases or layer.qkv_biases, layer.gated_mlp)


def _mixture(layer: LayerSpec) -> tuple[object, ...]:
    visited = layer.experts_per_token or layer.num_experts
    return (layer.num_experts, visited, layer.ffn_hidden_size, layer.shared_expert_width)


def _windows(spec: ModelSpec) -> tuple[int | None, int]:
    """Return the window of a model, and every which layer has none; 0: none of them.

    Raises InputError where layers without a window do not come in turn.
    """
    sizes = {layer.window for layer in spec.layers} - {None}
    if not sizes:
        return None, 0
    seen = [0] * len(spec.layers)
    whole = []
    for place, kind in enumerate(spec.layer_types, 1):
        layer = spec.layers[kind]
        seen[kind] += 1
        every = layer.whole_every
        if layer.window is None or (every and seen[kind] % every == 0):
            whole.append(place)
    every = whole[0] if whole else 0
    in_turn = not every or whole == [*range(every, spec.num_layers + 1, every)]
    if len(sizes) > 1 or not in_turn:
        raise InputError(
            f"model {spec.name!r}: windows of its layers do not come in turn, which one launch "
            "cannot say"
        )
    return sizes.pop(), every


def _model(spec: ModelSpec, layer: LayerSpec, dense: LayerSpec, mixture: LayerSpec | None) -> Model:
    """Return a model of one layer: heads and norms of `layer`, MLPs of the others."""
    assert layer.num_heads is not None, "a known layer has heads"
    assert dense.ffn_hidden_size is not None, "and every one an MLP"
    assert spec.vocab_size is not None, "and its model a vocabulary"
    latent = layer.latent
    return Model(
        hidden=layer.hidden_size,
        ffn=dense.ffn_hidden_size,
        attention=Attention(
            heads=layer.num_heads,
            groups=layer.num_kv_heads or layer.num_heads,
            width=head_dim(layer),
            head_norms=layer.qk_norms,
            dropout=0.0,
            latent=None
            if latent is None
            else Latent(
                query_rank=latent.query_rank,
                key_value_rank=latent.key_value_rank,
                key_width=latent.key_width,
                rotary_width=latent.rotary_width,
                value_width=latent.value_width,
            ),
        ),
        vocab=spec.vocab_size,
        vocab_divisor=spec.make_vocab_size_divisible_by,
        expert_layers=(mixture is not None,),
        experts=None if mixture is None else _experts(mixture),
        gated=layer.gated_mlp,
        biases=layer.biases,
        qkv_biases=layer.biases or layer.qkv_biases,
        tied=spec.tied_embeddings,
        norm="rms" if layer.norm_parameters_per_hidden == layer_norms(layer) else "layer",
        norms=layer_norms(layer),
        positions="learned" if spec.learned_positions else "rotary",
        max_positions=spec.learned_positions,
        hidden_dropout=0.0,
    )


def _experts(layer: LayerSpec) -> Experts:
    assert layer.num_experts is not None, "a mixture has experts"
    assert layer.ffn_hidden_size is not None, "and a known layer widths"
    return Experts(
        number=layer.num_experts,
        per_token=layer.experts_per_token or layer.num_experts,
        ffn=layer.ffn_hidden_size,
        shared_ffn=layer.shared_expert_width,
        dispatcher="alltoall",
        grouped=True,
    )


def megatron_launch(
    spec: ModelSpec,
    layer: LayerSpec,
    *,
    seq: int,
    tp: int,
    sequence_parallel: bool,
    precision: Precision,
    software: Software,
) -> Launch:
    """Return a launch of one such layer and one sample on so many tensor ranks, which is a unit."""
    return Launch(
        name=spec.name,
        model=megatron_model(spec, layer),
        degrees=Degrees(
            world=tp,
            tp=tp,
            # experts of a rank are its share of all of them
            etp=tp,
            sequence_parallel=sequence_parallel,
            chunks=even_chunks(1, 1),
        ),
        seq=seq,
        micro_batch=1,
        global_batch=1,
        precision=precision,
        software=software,
        attention_masks=False,
    )


def with_megatron_memory(
    profile: ModelProfile,
    spec: ModelSpec,
    *,
    gpu: str,
) -> ModelProfile:
    """Return a profile whose memory is that of Megatron-LM's layers, head and workspaces.

    Times stay as they are. Every rank has its share of all experts. gpu : kind of device, such as
    `h100-80gb`, on which workspaces depend. Raises InputError as `megatron_model`.
    """
    precision = Precision(kind=cast(Any, profile.precision))
    software = Software(gpu=gpu, attention=default_attention(gpu))
    lengths = tuple(layer.seq_length for layer in spec.layers)

    def launch_of(layer: LayerSpec, tp: int) -> Launch:
        return megatron_launch(
            spec,
            layer,
            seq=layer.seq_length,
            tp=tp,
            sequence_parallel=profile.sequence_parallel,
            precision=precision,
            software=software,
        )

    layers = tuple(
        replace(
            measured, memory={layer.seq_length: _layer_memory(layer, partial(launch_of, layer))}
        )
        for layer, measured in zip(spec.layers, profile.layers, strict=True)
    )
    first, last = launch_of(spec.layers[0], 1), launch_of(spec.layers[-1], 1)
    others = _other_memory(last, profile.other_memory, lengths)
    logits = _logits(last, 1)
    return replace(
        profile,
        layers=layers,
        other_memory={position: {lengths: memory} for position, memory in others.items()},
        # what the loss needs beside the logits that wait for their backward
        logits_peak_bytes_per_sample=float(head_bytes(logits) - kept_logits_bytes(logits)),
        rank_bytes=float(
            cublas_bytes(software)
            + engine_workspace_bytes(first)
            + rotary_bytes(first, first.degrees.chunks[0])
        ),
        sources=(
            *(source for source in profile.sources if not source.role.startswith("memory")),
            Source(role="memory", path="Megatron-LM's layers, from their terms", estimated=True),
        ),
    )


def with_memory_of(
    engine: str | None, profile: ModelProfile, spec: ModelSpec, *, gpu: str
) -> ModelProfile:
    """Return a profile with the layers' memory as an engine has it; errors as above.

    Engines but Megatron-LM run layers as the profile's own tables have them.
    """
    if engine != "megatron":
        return profile
    return with_megatron_memory(profile, spec, gpu=gpu)


def _layer_memory(layer: LayerSpec, launch_of: Callable[[int], Launch]) -> LayerMemory:
    """Return the tables of one layer type; a rank has one stand-in of each shape of its weights."""
    experts = layer.num_experts is not None
    kept: dict[int, float] = {}
    backward: dict[int, float] = {}
    shared: dict[int, float] = {}
    for degree in tensor_degrees(layer):
        launch = launch_of(degree)
        kept[degree] = float(layer_saved_bytes(launch, experts=experts))
        needed, freed = backward_bytes(launch, (False, (0,), 0, False))
        backward[degree] = float(needed - freed)
        shared[degree] = float(accumulation_bytes(launch, [layer_weights(launch, experts=experts)]))
    whole = launch_of(1)
    return LayerMemory(
        parameter_count=float(sum(w.elements for w in layer_weights(whole, experts=experts))),
        activation_bytes_per_sample=kept,
        checkpoint_bytes_per_sample=float(input_bytes(whole)),
        backward_bytes_per_sample=backward,
        shared_bytes=shared,
    )


def _logits(launch: Launch, degree: int) -> Launch:
    """Return a launch of one rank whose head has the columns of one of so many tensor ranks."""
    unit = launch.model.vocab_divisor * degree
    rows = math.ceil(launch.model.vocab / unit) * unit // degree
    return replace(launch, model=replace(launch.model, vocab=rows, vocab_divisor=1))


def _other_memory(
    launch: Launch,
    measured: Mapping[str, Mapping[tuple[int, ...], OtherMemory]],
    lengths: tuple[int, ...],
) -> dict[str, OtherMemory]:
    """Return the tables around the layers: states as they were, what Megatron-LM keeps.

    First: the micro-batch. Last: input and output of the final norm, fp32 logits, and a stand-in of
    the head's gradient. A single stage has both.
    """
    found = {}
    batch = float(_TOKEN_BYTES * launch.tokens)
    for position, tables in measured.items():
        memory = tables[lengths]
        kept, held = {}, {}
        for degree in memory.model_state_bytes:
            head = _logits(launch, degree)
            tokens = input_bytes(launch) / (degree if launch.degrees.sequence_parallel else 1)
            end = position != "first"
            kept[degree] = batch + (2.0 * tokens + kept_logits_bytes(head) if end else 0.0)
            if position == "last":
                # what is sent back has a buffer, too; of whole sequences the copies are counted
                # with the layers
                kept[degree] += input_bytes(launch) / degree
            held[degree] = float(accumulation_bytes(head, [[head_weight(head)]])) if end else 0.0
        found[position] = replace(memory, activation_bytes_per_sample=kept, held_bytes=held)
    return found
