"""Output of results: terminal reports, explanations, JSON documents and files."""

from __future__ import annotations
