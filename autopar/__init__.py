"""Python interface of autopar: the fastest parallel training plan of a large transformer.

    import autopar

    result = autopar.plan("llama2-7b", "a100-80gb:1x8", global_batch_size=32)
    print(result.prediction.step_time_s)

`search`, `check`, `explain` and `compare` call the commands of the same name, and `ask` any other.
Keywords are the options; answers are the objects of `--json`. `plan` returns the answer of `search`
as a `SearchResult`. A `Planner` answers many questions about one model and cluster.

Models and clusters are names, or the documents that `read_hardware`, `read_model` and
`read_model_profile` return. `read_plan` reads plan and strategy files, whatever program wrote them.
`evaluate_many` estimates executions with the closed-form model Calculon. Everything is imported on
first use, and nothing imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.command.python_api import Answer, ask, check, compare, explain, search
    from autopar.documents.hardware import read_hardware_dir as read_hardware
    from autopar.documents.model import read_model_profile
    from autopar.documents.plan import read_strategy as read_plan
    from autopar.documents.spec import load_spec as read_model
    from autopar.rates.card import load_card as read_card
    from autopar.rates.measured import HardwareProfile as Hardware
    from autopar.run.model import ModelProfile, ModelSpec as Model
    from autopar.run.plan import Plan, Prediction
    from search import plan
    from search.closed_form.calculon import evaluate_many
    from search.planning.layered.prediction import SearchResult
    from search.planning.planner import Planner
    from search.request.options import SearchOptions

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "Hardware",
    "Model",
    "ModelProfile",
    "Plan",
    "Planner",
    "Prediction",
    "SearchOptions",
    "SearchResult",
    "__version__",
    "ask",
    "check",
    "compare",
    "evaluate_many",
    "explain",
    "plan",
    "read_card",
    "read_hardware",
    "read_model",
    "read_model_profile",
    "read_plan",
    "search",
]

_HOMES = {
    "Answer": ("autopar.command.python_api", "Answer"),
    "Hardware": ("autopar.rates.measured", "HardwareProfile"),
    "Model": ("autopar.run.model", "ModelSpec"),
    "ModelProfile": ("autopar.run.model", "ModelProfile"),
    "Plan": ("autopar.run.plan", "Plan"),
    "Planner": ("search.planning.planner", "Planner"),
    "Prediction": ("autopar.run.plan", "Prediction"),
    "SearchOptions": ("search.request.options", "SearchOptions"),
    "SearchResult": ("search.planning.layered.prediction", "SearchResult"),
    "ask": ("autopar.command.python_api", "ask"),
    "check": ("autopar.command.python_api", "check"),
    "compare": ("autopar.command.python_api", "compare"),
    "explain": ("autopar.command.python_api", "explain"),
    "search": ("autopar.command.python_api", "search"),
    "evaluate_many": ("search.closed_form.calculon", "evaluate_many"),
    "plan": ("search", "plan"),
    "read_card": ("autopar.rates.card", "load_card"),
    "read_hardware": ("autopar.documents.hardware", "read_hardware_dir"),
    "read_model": ("autopar.documents.spec", "load_spec"),
    "read_model_profile": ("autopar.documents.model", "read_model_profile"),
    "read_plan": ("autopar.documents.plan", "read_strategy"),
}
"""Module and name behind each public name, imported on first use so that `autopar --help` is
quick."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        module, own = _HOMES[name]
        return getattr(import_module(module), own)
    raise AttributeError(f"module 'autopar' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
