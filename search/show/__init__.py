"""What people and programs see of a result: terminal report, explanation, JSON and files."""

from __future__ import annotations
