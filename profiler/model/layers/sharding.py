"""How one part of a model is laid out over a tensor group, as seen by one of its ranks.

What it becomes in torch is in `parallel`; here nothing imports torch.
"""

from __future__ import annotations

from typing import Literal

from autopar.documents.sidecar import TensorKind
from autopar.errors import InputError
from autopar.model import LayerSpec
from autopar.records import dataclass

__all__ = ["Checkpoint", "Sharding"]

Checkpoint = Literal["none", "full", "selective"]


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """A tensor degree, what it shards, and what is recomputed."""

    degree: int = 1
    kind: TensorKind = "sp"
    checkpoint: Checkpoint = "none"
    """full: only the layer's input is kept; selective: attention is recomputed."""
    expert_degree: int = 1
    """Ranks over which the experts of a mixture-of-experts layer are spread."""
    flash: bool = True
    """Attention that never keeps the matrix of scores; otherwise softmax in the open."""
    dropout: float = 0.0

    @property
    def is_tensor(self) -> bool:
        """True when the group shards weights, False for Ulysses."""
        return self.kind != "ulysses"

    @property
    def shards_sequence(self) -> bool:
        """True when the residual stream is split over the group along the sequence."""
        return self.kind in ("sp", "dtensor_sp", "ulysses")

    def local_seq_length(self, seq_length: int) -> int:
        """Return the tokens of a sample that a rank holds between layers."""
        return seq_length // self.degree if self.shards_sequence else seq_length

    def check(self, layer: LayerSpec) -> None:
        """Raise InputError, one sentence, where a layer cannot be laid out like this."""
        t = self.degree
        if t < 1:
            raise InputError(f"a tensor degree of {t} does not exist; give at least 1")
        numbers: list[tuple[str, int | None]] = [("attention heads", layer.num_heads)]
        # Ulysses keeps weights whole, so that any width will do
        if self.is_tensor:
            numbers.append(("MLP width", layer.ffn_hidden_size))
            numbers.append(("width of the shared MLP", layer.shared_expert_width))
        if self.shards_sequence:
            numbers.append(("sequence length", layer.seq_length))
        for name, number in numbers:
            if number is not None and number % t:
                raise InputError(
                    f"tensor degree {t} does not divide the {name} {number}; choose a degree that "
                    "does"
                )
        kv_heads = layer.num_kv_heads
        # ranks divide the heads, or share them; else some would have more than others
        if kv_heads is not None and kv_heads % t and t % kv_heads:
            raise InputError(
                f"tensor degree {t} and the {kv_heads} key-value heads do not divide one another; "
                "choose another degree"
            )
