"""Types of operations: FLOP, traffic and tensors of each, in elements unless they end in `_bytes`.

Counts per element: layer norms 9 forward, 14 and 7 backward; RMS norms 4, 6 and 3; softmax 5 and 8;
GELU 8 and 13; dropout 1; a GEMM 2 per multiplication. Source: Calculon (SC'23), doi
10.1145/3581784.3607102.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.oracles.calculon.shape import Shape


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Figures of one operation on one processor; None uses the rule of most types.

    That rule is: forward moves inputs, outputs and parameters, backward parameters, activation and
    its gradient; saved tensors have the bytes of the datatype.
    """

    matrix: bool = False
    fw_flops: float = 0.0
    agrad_flops: float = 0.0
    wgrad_flops: float = 0.0
    inputs: float = 0.0
    outputs: float = 0.0
    parameters: float = 0.0
    activation: float = 0.0
    gradient: float = 0.0
    fw_bytes: float | None = None
    agrad_bytes: float | None = None
    activation_bytes: float | None = None
    gradient_bytes: float | None = None
    communicates: bool = False


def fork(shape: Shape, elements: float, ways: int) -> Kind:
    """Return a tensor with several consumers, whose gradients are added in backward."""
    return Kind(
        agrad_flops=ways * elements,
        inputs=elements,
        activation=elements,
        fw_bytes=0.0,
        agrad_bytes=(ways + 1) * elements * shape.element_bytes,
    )


def norm(shape: Shape, elements: float) -> Kind:
    """Return a layer norm, with scale and shift."""
    return Kind(
        fw_flops=9 * elements,
        agrad_flops=14 * elements,
        wgrad_flops=7 * elements,
        inputs=elements,
        outputs=elements,
        parameters=2 * shape.hidden,
        activation=elements,
        gradient=elements,
    )


def rms_norm(shape: Shape, elements: float) -> Kind:
    """Return an RMS norm: squares, their sum, two scalings; one weight per column."""
    return Kind(
        fw_flops=4 * elements,
        agrad_flops=6 * elements,
        wgrad_flops=3 * elements,
        inputs=elements,
        outputs=elements,
        parameters=shape.hidden,
        activation=elements,
        gradient=elements,
    )


def linear(shape: Shape, inputs: float, outputs: float) -> Kind:
    """Return a GEMM over the tokens of a micro-batch, without bias."""
    flops = 2 * shape.tokens * inputs * outputs
    return Kind(
        matrix=True,
        fw_flops=flops,
        agrad_flops=flops,
        wgrad_flops=flops,
        inputs=shape.tokens * inputs,
        outputs=shape.tokens * outputs,
        parameters=inputs * outputs,
        activation=shape.tokens * inputs,
        gradient=shape.tokens * outputs,
    )


def batched_product(lanes: float, rows: float, inner: float, columns: float) -> Kind:
    """Return `lanes` GEMMs of (rows, inner) by (inner, columns)."""
    flops = 2 * lanes * rows * inner * columns
    inputs = lanes * (rows * inner + inner * columns)
    outputs = lanes * rows * columns
    return Kind(
        matrix=True,
        fw_flops=flops,
        agrad_flops=2 * flops,
        inputs=inputs,
        outputs=outputs,
        activation=inputs,
        gradient=outputs,
    )


def softmax(shape: Shape, elements: float) -> Kind:
    """Return a softmax, with its scaling."""
    return Kind(
        fw_flops=5 * elements,
        agrad_flops=8 * elements,
        inputs=elements,
        outputs=elements,
        activation=elements,
        gradient=elements,
        agrad_bytes=2 * elements * shape.element_bytes,
    )


def dropout(shape: Shape, elements: float) -> Kind:
    """Return a dropout, which keeps a mask of one byte per element."""
    e = shape.element_bytes
    traffic = (2 * e + 1) * elements
    gradient = 1 if shape.quirks.dropout_gradient_bytes else e
    return Kind(
        fw_flops=elements,
        agrad_flops=elements,
        inputs=elements,
        outputs=elements,
        activation=elements,
        gradient=elements,
        fw_bytes=traffic,
        agrad_bytes=traffic,
        activation_bytes=elements,
        gradient_bytes=gradient * elements,
    )


def gelu(shape: Shape, elements: float) -> Kind:
    """Return a GELU, which saves nothing if it is fused with its linear layer."""
    kept = 0 if shape.fused_activation else elements
    return Kind(
        fw_flops=8 * elements,
        agrad_flops=13 * elements,
        inputs=elements,
        outputs=elements,
        activation=kept,
        gradient=kept,
        agrad_bytes=2 * elements * shape.element_bytes,
    )


def gated_silu(shape: Shape, elements: float) -> Kind:
    """Return SiLU of one half times the other half; backward needs both."""
    return Kind(
        fw_flops=6 * elements,
        agrad_flops=10 * elements,
        inputs=2 * elements,
        outputs=elements,
        activation=2 * elements,
        gradient=2 * elements,
        agrad_bytes=5 * elements * shape.element_bytes,
    )


def flash(shape: Shape) -> Kind:
    """Return attention that saves its inputs and one number per query and head (4 bytes).

    Backward recomputes the scores: 5 GEMMs where forward has 2. With a causal mask half of the
    scores are skipped. Source: FlashAttention-2, arXiv 2307.08691.
    """
    e = shape.element_bytes
    lanes = shape.microbatch * shape.heads / shape.tensor
    product = 2 * lanes * shape.seq * shape.seq * shape.head_size * (0.5 if shape.causal else 1.0)
    queries = lanes * shape.seq * shape.head_size
    keys = shape.microbatch * shape.seq * shape.kv_width
    statistics = 4 * lanes * shape.seq
    inputs = queries + 2 * keys
    return Kind(
        matrix=True,
        fw_flops=2 * product,
        agrad_flops=5 * product,
        inputs=inputs,
        outputs=queries,
        activation=inputs,
        gradient=inputs,
        fw_bytes=(inputs + queries) * e + statistics,
        agrad_bytes=(2 * inputs + 2 * queries) * e + statistics,
        activation_bytes=inputs * e + statistics,
    )


def residual(elements: float) -> Kind:
    """Return the sum of a branch and the residual stream."""
    return Kind(
        fw_flops=elements,
        agrad_flops=2 * elements,
        inputs=2 * elements,
        outputs=elements,
        activation=2 * elements,
        gradient=elements,
    )


def gather(shape: Shape) -> Kind:
    """Return the collective before column-parallel layers; backward is its mirror image."""
    return _collective(shape, forward=False)


def reduce(shape: Shape) -> Kind:
    """Return the collective after a row-parallel layer; backward is its mirror image."""
    return _collective(shape, forward=True)


def _collective(shape: Shape, *, forward: bool) -> Kind:
    """Return a collective that reduces in forward (or backward), and gathers in the other pass."""
    if shape.tensor == 1:
        return Kind(communicates=True)
    size = shape.elements
    added = size * (shape.tensor - 1) / shape.tensor
    whole, shard = size * shape.element_bytes, size * shape.element_bytes / shape.tensor
    reduced = shard if shape.rs else whole
    gathered = shard if shape.rs else 0.0
    moved = 2.0 * whole
    moved_gathering = moved if shape.rs else 0.0
    return Kind(
        fw_flops=added if forward else 0.0,
        agrad_flops=0.0 if forward else added,
        inputs=size,
        outputs=size,
        activation=size,
        gradient=size,
        fw_bytes=moved if forward else moved_gathering,
        agrad_bytes=moved_gathering if forward else moved,
        activation_bytes=reduced if forward else gathered,
        gradient_bytes=gathered if forward else reduced,
        communicates=True,
    )


def tiled_gather(shape: Shape, inputs: float, outputs: float) -> Kind:
    """Return a column-parallel linear layer in tiles, with the gather of its input."""
    n, t = shape.tokens, shape.tensor
    flops = 2 * n * inputs * outputs / t
    gradient = n * outputs / t
    if shape.quirks.overlapped_activations and not shape.rs:
        gradient = 0.0
    return Kind(
        matrix=True,
        fw_flops=flops,
        agrad_flops=flops,
        wgrad_flops=flops,
        inputs=n * inputs,
        outputs=n * outputs / t,
        parameters=inputs * outputs / t,
        activation=n * inputs / t if shape.rs else n * inputs,
        gradient=gradient,
        communicates=True,
    )


def tiled_reduce(shape: Shape, inputs: float, outputs: float) -> Kind:
    """Return a row-parallel linear layer in tiles, with the reduction of its output."""
    n, t = shape.tokens, shape.tensor
    flops = 2 * n * inputs * outputs / t
    activation = n * inputs / t
    gradient = n * outputs
    if shape.quirks.overlapped_activations:
        activation = activation if shape.rs else 0.0
        gradient = 2 * n * outputs / t if shape.rs else 2 * n * outputs
    return Kind(
        matrix=True,
        fw_flops=flops,
        agrad_flops=flops,
        wgrad_flops=flops,
        inputs=n * inputs / t,
        outputs=n * outputs,
        parameters=inputs * outputs / t,
        activation=activation,
        gradient=gradient,
        communicates=True,
    )
