"""One question with its inputs loaded: what the commands share between options and planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from search.inputs import DEFAULT_HARDWARE, DEFAULT_MODEL, InputSpec, load_inputs

if TYPE_CHECKING:
    from autopar.hardware import HardwareProfile
    from autopar.model import ModelProfile, ModelSpec
    from autopar.sources import Source
    from search.options import SearchOptions
    from search.planner import Planner

__all__ = ["Session", "open_session"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Session:
    """Loaded inputs, the options, and the planner built on them."""

    spec: ModelSpec
    profile: ModelProfile
    hardware: HardwareProfile
    options: SearchOptions
    planner: Planner
    notices: tuple[str, ...] = ()
    """Which inputs were not named and what stands in for them."""

    @property
    def title(self) -> str:
        """Model and cluster in one line."""
        return (
            f"{self.spec.name} ({self.spec.num_layers} layers) on {self.hardware.name}, "
            f"{self.hardware.num_nodes} x {self.hardware.gpus_per_node} GPUs"
        )

    @property
    def estimated(self) -> bool:
        """True when some input was not measured."""
        return self.hardware.estimated or self.profile.estimated

    @property
    def sources(self) -> tuple[Source, ...]:
        """Every input file."""
        return self.hardware.sources + self.profile.sources

    def rebuilt(
        self,
        *,
        hardware: HardwareProfile | None = None,
        options: SearchOptions | None = None,
    ) -> Planner:
        """Return a planner that differs in hardware or options."""
        from search.planner import Planner

        return Planner(self.spec, self.profile, hardware or self.hardware, options or self.options)


def open_session(inputs: InputSpec, options: SearchOptions) -> Session:
    """Return the session of a request; errors as `load_inputs`."""
    spec, profile, hardware = load_inputs(inputs, options)

    from search.planner import Planner

    unnamed = (
        (inputs.uses_default_model, "--model", DEFAULT_MODEL),
        (inputs.uses_default_hardware, "--hardware", DEFAULT_HARDWARE),
    )
    return Session(
        spec=spec,
        profile=profile,
        hardware=hardware,
        options=options,
        planner=Planner(spec, profile, hardware, options),
        notices=tuple(
            f"no {option} given, planning for the shipped {name} (estimated)"
            for absent, option, name in unnamed
            if absent
        ),
    )
