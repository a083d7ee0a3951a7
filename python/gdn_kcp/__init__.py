"""Gated DeltaNet for training on packed long documents, over ranks.

``chunk_gated_delta_rule`` is a drop-in for FLA's function. ``partition``, ``build_context`` and
``chunk_gdn_kcp`` spread packed documents over context-parallel ranks.
"""

import importlib as _importlib

from ._library import ops as _ops
from .chunk import chunk_gated_delta_rule
from .context import (
    Bytes,
    Context,
    RecomputeHandle,
    Workspace,
    build_context,
    call_bytes,
    comm_bytes,
    saved_bytes,
    workspace_bytes,
)
from .conv import causal_conv1d
from .errors import (
    DeviceError,
    Error,
    InternalError,
    InvalidArgumentError,
    MissingPackageError,
    PeerFailedError,
    UnsupportedError,
    WorkspaceTooSmallError,
)
from .in_process import InProcessGroup
from .info import backends, is_supported, last_path
from .kcp import Saved, chunk_gdn_kcp, chunk_gdn_kcp_backward, chunk_gdn_kcp_forward
from .packed import packed_qkv_views
from .partition import Crossing, Fragment, Partition, partition

__version__: str = _ops.library_version()

__all__ = [
    "Bytes",
    "Context",
    "Crossing",
    "DeviceError",
    "Error",
    "Fragment",
    "InProcessGroup",
    "InternalError",
    "InvalidArgumentError",
    "MissingPackageError",
    "Partition",
    "PeerFailedError",
    "RecomputeHandle",
    "Saved",
    "UnsupportedError",
    "Workspace",
    "WorkspaceTooSmallError",
    "backends",
    "build_context",
    "call_bytes",
    "causal_conv1d",
    "chunk_gated_delta_rule",
    "chunk_gdn_kcp",
    "chunk_gdn_kcp_backward",
    "chunk_gdn_kcp_forward",
    "comm_bytes",
    "is_supported",
    "last_path",
    "packed_qkv_views",
    "partition",
    "saved_bytes",
    "workspace_bytes",
]


def __getattr__(name: str):
    if name == "compat":  # on first use
        return _importlib.import_module(".compat", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
