"""Rules of arguments of ms-swift 4.6."""

from __future__ import annotations

from autopar.run.rules import Rule

FILE = (
    # `SftArguments._check_padding_free` of swift/arguments/sft_args.py
    Rule("ms-swift.packing-attention", ("packing", "kernel"), lambda packing, kernel:
         packing != "", "--{packing} needs flash attention, got --attn_impl {kernel}"),
)  # fmt: skip
"""`packing` names the argument that packs samples without flash attention; empty: none does."""
