"""Closed-form models of one training step, for machines that need not exist."""

from __future__ import annotations
