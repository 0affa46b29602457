"""The object that `autopar-export --json` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.plan import Plan
from autopar.plan_files import strategy_document
from search.exports.contract import Lowered
from search.exports.reprice import Choice
from search.result import Prediction

__all__ = ["export_document", "import_document", "lowered_files"]


def export_document(choice: Choice, *, status: str, files: Sequence[str]) -> dict[str, object]:
    """Return the object of an export: `status` is exported or refused."""
    lowered = choice.lowered
    return {
        "status": status,
        "engine": lowered.engine,
        "engine_version": lowered.engine_version,
        "losses": [{"field": loss.field, "what": loss.what} for loss in lowered.losses],
        "plan": strategy_document(lowered.plan),
        "as_run": dict(lowered.as_run),
        "search": lowered.search or None,
        "price": _prices(choice),
        "chosen_by": choice.how or None,
        "notes": list(lowered.notes),
        "files": list(files),
        "launch": lowered.launch,
    }


def import_document(engine: str, plan: Plan, notes: Sequence[str]) -> dict[str, object]:
    """Return the object of a configuration that was read."""
    return {
        "status": "imported",
        "engine": engine,
        "plan": strategy_document(plan),
        "notes": list(notes),
    }


def _prices(choice: Choice) -> Mapping[str, object] | None:
    if choice.before is None:
        return None
    if choice.after is None:
        return {"before": _price(choice.before), "after": None, "why": choice.not_priced}
    return {"before": _price(choice.before), "after": _price(choice.after)}


def _price(prediction: Prediction) -> dict[str, object]:
    time = prediction.step_time_s
    return {
        "step_time_s": time if math.isfinite(time) else None,
        "samples_per_s": prediction.samples_per_s,
        "reserved_bytes": [stage.reserved_bytes for stage in prediction.stages],
        "legal": prediction.legal,
        "fits": prediction.fits,
        "problems": list(prediction.problems),
    }


def lowered_files(lowered: Lowered) -> dict[str, str]:
    """Return all files of an export, the launch command as a script behind the engine's own."""
    head = "#!/usr/bin/env bash\nset -euo pipefail\n"
    home = 'cd "$(dirname "${BASH_SOURCE[0]}")"\n'
    return {**lowered.files, "launch.sh": head + home + lowered.launch}
