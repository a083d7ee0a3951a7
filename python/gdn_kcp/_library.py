"""Loads the extension; ``ops`` holds its operators.

``GDN_KCP_LIBRARY`` names another build of ``gdn_torch.so`` than the one beside this file.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

library_path = Path(os.environ.get("GDN_KCP_LIBRARY", Path(__file__).with_name("gdn_torch.so")))
if not library_path.exists():
    raise ImportError(
        f"{library_path} is missing: install the package (pip install .) or set GDN_KCP_LIBRARY "
        "to a gdn_torch.so built with -DGDN_TORCH=ON"
    )
torch.ops.load_library(str(library_path))

ops = torch.ops.gdn_kcp

# Bits of the `flags` argument; csrc/session.h has the same table.
L2NORM, GATE_IN_KERNEL, BETA_SIGMOID, NEG_EIGVAL, STATE_V_FIRST, EXCHANGE_GIVEN = 1, 2, 4, 8, 16, 32
KEEP_PREPARED, KEEP_WHERE_LIGHT = 256, 512
EXCHANGE = {"auto": 0, "allgather": 1, "a2a": 2}


def exchange_flags(exchange: str) -> int:
    """The flags of an exchange policy; none for ``"auto"``."""
    if exchange not in EXCHANGE:
        from .errors import InvalidArgumentError

        raise InvalidArgumentError(
            f"exchange: expected one of {', '.join(EXCHANGE)}, got {exchange!r}"
        )
    return (EXCHANGE_GIVEN | EXCHANGE[exchange] << 6) if exchange != "auto" else 0


def save_flags(save_mode: str, *others: str) -> int:
    """The flags of what a forward keeps; ``others``: modes beside those that keep a saved set."""
    modes = ("light", "light_akk", *others)
    if save_mode not in modes:
        from .errors import InvalidArgumentError

        raise InvalidArgumentError(
            f"save_mode: expected one of {', '.join(modes)}, got {save_mode!r}"
        )
    return KEEP_PREPARED if save_mode == "light_akk" else 0
