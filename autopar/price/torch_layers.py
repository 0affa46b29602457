"""What layers of torch save for their backward, and their loss: torchtitan's and transformers'.

Megatron-LM's layers are `autopar.price.activations`; who keeps weights is no matter here. Counted
are the tensors that autograd holds, of eager layers as `saved_tensors_hooks` shows them and of
compiled ones as AOTAutograd's partitioner leaves them (torch 2.13). Bytes are of one micro-batch on
one rank; T tokens of it, T' of them between products where tensor ranks divide the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.price.activations import adapter_saved_bytes, routed_tokens
from autopar.run.launch import Chunk, Launch, TorchTrainer
from autopar.training.adapters import needs_input

Parts = Iterator[tuple[str, int]]


def _trainer(launch: Launch) -> TorchTrainer:
    assert launch.trainer is not None, "a launch of Megatron-LM has layers of its own"
    return launch.trainer


def _element(launch: Launch) -> int:
    return launch.precision.element_bytes


def input_bytes(launch: Launch) -> int:
    """Return the input of a layer, T'*h*e: all that is kept of one that is computed again."""
    return launch.scattered_tokens * launch.model.hidden * _element(launch)


def _norm(launch: Launch, tokens: int, width: int, *, given: bool = False) -> int:
    """Return what an RMSNorm saves beside its output; given : its input is counted elsewhere.

    One kernel: its input, and 4 bytes of each row. Written out: the input in fp32, 4 of each row,
    and the normed input, in fp32 in torch and in 16 bits in transformers. A compiled layer keeps
    as much as one kernel (of the second norm the projection's output, which the sum is made of).
    """
    trainer, element = _trainer(launch), _element(launch)
    own = 0 if given else tokens * width * element
    if trainer.compiled or (trainer.layers == "torchtitan" and trainer.fused_norms):
        return own + 4 * tokens
    # what the weight multiplies is there for the weight's gradient, which a frozen one has not
    frozen = launch.adapters is not None
    if element == 4:
        # the input itself is fp32
        return own + 4 * tokens + (0 if frozen else 4 * tokens * width)
    normed = 0 if frozen else 4 if trainer.layers == "torchtitan" else element
    # what is saved in fp32 is a copy, and the 16-bit input goes
    return 4 * tokens * width + 4 * tokens + normed * tokens * width


def whole_parts(launch: Launch, *, experts: bool) -> Parts:
    """Yield (part, bytes) of everything that a layer saves that computes nothing again."""
    element = _element(launch)
    width = launch.tokens * launch.model.hidden * element
    adapters = launch.adapters
    yield "attention norm", _norm(launch, launch.scattered_tokens, launch.model.hidden)
    # what products take is gathered on every tensor rank, and kept for the weights' gradients
    if needs_input(adapters, "query", "key", "value"):
        yield "norm output", width
    yield from _attention(launch)
    yield "mlp norm", _norm(launch, launch.scattered_tokens, launch.model.hidden)
    if needs_input(adapters, "fc1", "expert_fc1"):
        yield "norm output", width
    behind = max(0, launch.model.norms - 2)
    if behind:
        # what attention and MLP put out; the sums that take their outputs keep nothing
        each = _norm(launch, launch.scattered_tokens, launch.model.hidden)
        yield "norms behind", behind * each
    if adapters is not None:
        yield "adapters", adapter_saved_bytes(launch, experts=experts)
    if experts:
        yield from _mixture(launch)
    else:
        yield from _mlp("mlp", launch, launch.tokens, launch.model.ffn // launch.degrees.tp)


def _attention(launch: Launch) -> Parts:
    attention, tp, trainer = launch.model.attention, launch.degrees.tp, _trainer(launch)
    tokens, element = launch.tokens, _element(launch)
    heads = attention.heads // tp
    latent = attention.latent
    if latent is not None:
        narrow = (latent.query_rank or 0) + latent.key_value_rank
        yield "latents", tokens * (narrow + latent.rotary_width) * element
        yield "latent norms", _norm(launch, tokens, narrow, given=True) + tokens * narrow * element
        yield "query and key", 2 * tokens * heads * attention.query_width * element
    else:
        if attention.head_norms:
            groups = heads + -(-attention.groups // tp)
            yield "head norms", _norm(launch, tokens * groups, attention.width)
        kept = heads if trainer.repeated_heads else -(-attention.groups // tp)
        yield "query", tokens * heads * attention.width * element
        yield "key", tokens * kept * attention.width * element
    values = heads if latent is not None or trainer.repeated_heads else -(-attention.groups // tp)
    yield "value", tokens * values * attention.value_width * element
    yield from _core(launch)


def _core(launch: Launch) -> Parts:
    """Yield what a fused kernel of attention saves of its own: its output and 4 bytes a row."""
    attention, tp = launch.model.attention, launch.degrees.tp
    tokens, heads = launch.tokens, attention.heads // tp
    yield "attention output", tokens * heads * attention.value_width * _element(launch)
    yield "softmax statistics", 4 * tokens * heads


def _mlp(name: str, launch: Launch, tokens: int, width: int) -> Parts:
    """Yield what an MLP saves: a gated one of each product, of the activation and of their product.

    The compiler makes the activation again.
    """
    gates = launch.model.gates
    number = 2 * gates - (1 if _trainer(launch).compiled and gates == 2 else 0)
    # the last of them is there for the gradient of the last matrix
    number -= 0 if needs_input(launch.adapters, "expert_fc2" if name == "expert" else "fc2") else 1
    yield name, number * tokens * width * _element(launch)


def _routed(launch: Launch) -> int:
    """Return the routed tokens of the busiest rank, all of its experts together."""
    return routed_tokens(launch)


def _mixture(launch: Launch) -> Parts:
    experts, element = launch.model.experts, _element(launch)
    assert experts is not None
    routed = _routed(launch)
    # scores in fp32, and their softmax or sigmoid
    yield "router", 8 * launch.tokens * experts.number
    # in the order of experts, and behind the exchange
    copies = 2 if needs_input(launch.adapters, "expert_fc1") else 1
    yield "expert input", copies * routed * launch.model.hidden * element
    yield from _mlp("expert", launch, routed, experts.ffn // launch.degrees.etp)
    yield "expert output", routed * launch.model.hidden * element
    if experts.shared_ffn:
        width = experts.shared_ffn // launch.degrees.tp
        yield from _mlp("shared expert", launch, launch.tokens, width)


def products(launch: Launch, *, experts: bool) -> tuple[tuple[str, int], ...]:
    """Return the products of a layer in the order of its forward, with elements of their outputs.

    A router's and those of grouped experts are not among them: torchtitan computes them again.
    """
    model, tp, tokens = launch.model, launch.degrees.tp, launch.tokens
    attention, latent = model.attention, model.attention.latent
    heads = attention.heads // tp
    if latent is None:
        groups = -(-attention.groups // tp)
        rows = [
            ("query", heads * attention.width),
            ("key", groups * attention.width),
            ("value", groups * attention.width),
        ]
    else:
        up = ("query", heads * attention.query_width)
        rows = [up] if latent.query_rank is None else [("query down", latent.query_rank), up]
        rows += [
            ("key-value down", latent.key_value_rank + latent.rotary_width),
            ("key-value up", heads * (latent.key_width + latent.value_width)),
        ]
    rows.append(("projection", model.hidden))
    mixture = model.experts
    width = mixture.shared_ffn if experts and mixture is not None else model.ffn
    if width:
        inner = width // tp
        rows += [("gate", inner), ("up", inner)] if model.gated else [("up", inner)]
        rows.append(("down", model.hidden))
    return tuple((name, tokens * size) for name, size in rows)


def _by_op(launch: Launch, *, experts: bool) -> Parts:
    """Yield what torchtitan's selective `op` keeps: attention, every other product, exchanges.

    Eager layers keep what no backward needs as well, such as the last product.
    """
    element, trainer = _element(launch), _trainer(launch)
    yield "layer input", input_bytes(launch)
    rows = products(launch, experts=experts)
    for place, (name, elements) in enumerate(rows):
        last = place == len(rows) - 1
        if place % 2 == 0 and not (trainer.compiled and last):
            yield f"{name} output", elements * element
    yield from _core(launch)
    if launch.degrees.scattered:
        # sums over tensor ranks behind both parts; the second is needed by nobody
        yield "scattered sums", (1 if trainer.compiled else 2) * input_bytes(launch)
    if experts and launch.degrees.ep > 1:
        # tokens that came, and that came back
        yield "exchanged tokens", 2 * _routed(launch) * launch.model.hidden * element


def chunk_saved_bytes(launch: Launch, chunk: Chunk) -> int:
    """Return what a micro-batch saves in the layers of a chunk, its last norm and loss left out."""
    trainer, model = _trainer(launch), launch.model
    whole = {
        kind: sum(size for _, size in whole_parts(launch, experts=kind))
        for kind in {model.expert_layers[layer] for layer in chunk[1]}
    }
    total = 0
    for place, layer in enumerate(chunk[1]):
        kind = model.expert_layers[layer]
        if trainer.checkpoint == "op":
            total += sum(size for _, size in _by_op(launch, experts=kind))
        elif trainer.checkpoint == "full" or (
            trainer.checkpoint == "layers" and (place + 1) % trainer.every == 0
        ):
            total += input_bytes(launch)
        else:
            total += whole[kind]
    return total


def again_bytes(launch: Launch, *, experts: bool) -> int:
    """Return what the backward of a chunk's last layer makes again of it."""
    trainer = _trainer(launch)
    whole = sum(size for _, size in whole_parts(launch, experts=experts))
    if trainer.checkpoint == "none":
        return 0
    if trainer.checkpoint == "op":
        # what was kept of it is not made again
        kept = sum(size for _, size in _by_op(launch, experts=experts))
        return max(whole - kept, 0)
    return max(whole - input_bytes(launch), 0)


def backward_gradients_bytes(launch: Launch, *, experts: bool) -> int:
    """Return what is there at the fullest moment of a layer's backward, beside what it saved.

    That is in its MLP: gradients of the activation's result, of the activation and of the other
    product, and that of the last matrix's weight; what that matrix was multiplied with is freed.
    Layers that are computed again have their output, too.
    """
    model, degrees, element = launch.model, launch.degrees, _element(launch)
    mixture = model.experts
    inner, matrix = launch.tokens * model.ffn // degrees.tp, model.ffn // degrees.tp
    if experts and mixture is not None:
        routed = _routed(launch) * mixture.ffn // degrees.etp
        inner = max(routed, launch.tokens * mixture.shared_ffn // degrees.tp)
        matrix = mixture.number // degrees.ep * mixture.ffn // degrees.etp
    residual = 1 if _trainer(launch).checkpoint == "none" else 2
    if launch.adapters is not None:
        matrix = 0  # frozen: it has no gradient
    # of three of them, or two without a gate, one stands where the saved product was
    activations = model.gates * inner + residual * launch.tokens * model.hidden
    return (activations + matrix * model.hidden) * element


def final_bytes(launch: Launch) -> int:
    """Return what the norm behind the last layer saves, its output gathered for the head."""
    norm = _norm(launch, launch.scattered_tokens, launch.model.hidden)
    if launch.adapters is not None:
        return norm
    return norm + launch.tokens * launch.model.hidden * _element(launch)


def logits(launch: Launch) -> int:
    """Return the elements of the logits that a rank has at once."""
    trainer = _trainer(launch)
    rows = launch.padded_vocab // (launch.degrees.tp if trainer.loss_parallel else 1)
    chunks = trainer.loss_chunks if trainer.loss == "chunked" else 1
    return -(-launch.tokens // chunks) * rows


def loss_bytes(launch: Launch) -> int:
    """Return what head and loss have at their fullest moment.

    12 bytes a logit: the logarithms of the softmax that the forward kept, their gradient and that
    of the logits, all in fp32; the 16-bit logits are gone. 16 where tensor ranks have a part of the
    vocabulary each, whose gradient is one more sum (torch distributed/tensor/parallel/loss.py).
    Compiled: the logits and their gradient, in 16 bits. In chunks: of one chunk, with the gradient
    of all hidden states.
    """
    trainer, number = _trainer(launch), logits(launch)
    each = 16 if trainer.loss_parallel and launch.degrees.tp > 1 else 12
    if trainer.loss == "compiled":
        return number * 2 * _element(launch)
    if trainer.loss == "chunked":
        return number * each + launch.tokens * launch.model.hidden * _element(launch)
    return number * each
