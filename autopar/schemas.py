"""JSON Schemas of the documented files and of the sidecar, made from their pydantic models."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from autopar.documents import (
    AllreduceDocument,
    ComputationDocument,
    MemoryDocument,
    OverlapDocument,
    P2pDocument,
    SpTimeDocument,
)
from autopar.sidecar import Sidecar

__all__ = ["DOCUMENTS", "json_schemas"]

DOCUMENTS: dict[str, type[BaseModel]] = {
    "allreduce": AllreduceDocument,
    "p2p": P2pDocument,
    "overlap": OverlapDocument,
    "sp_time": SpTimeDocument,
    "computation": ComputationDocument,
    "memory": MemoryDocument,
    "sidecar": Sidecar,
}
"""Model of every document by the role it has in a plan's sources."""


def json_schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON Schema (2020-12) of every document by its role."""
    return {
        role: {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            **model.model_json_schema(),
        }
        for role, model in DOCUMENTS.items()
    }
