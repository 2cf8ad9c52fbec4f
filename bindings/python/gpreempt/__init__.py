"""The client of gpreemptd for inference servers: announce work, run it, and report its end.

    import gpreempt

    with gpreempt.online(gpus=[0], label="chat"):
        model(batch)

Inference continues without a daemon: an announcement then returns a lease whose protected is False, and one
line is logged. README.md has the details.
"""

from importlib import import_module as _import_module

from ._client import DEFAULT_SOCKET, Client, default_client
from ._errors import Error, InvalidRequest, Overloaded, PermissionDenied, Unavailable, UnknownGpu, UnknownLease
from ._gpus import ALL, OWN, Gpu, gpu_id, index, node, pci, render, uuid
from ._group import Group, GroupLease
from ._lease import Lease
from ._online import online
from ._request import Request
from ._session import Session

__all__ = [
    "ALL", "DEFAULT_SOCKET", "Client", "Error", "Gpu", "Group", "GroupLease", "InvalidRequest", "Lease", "OWN", "Overloaded",
    "PermissionDenied", "Request", "Session", "Unavailable", "UnknownGpu", "UnknownLease", "default_client", "gpu_id", "index", "node", "online",
    "pci", "render", "uuid",
]  # fmt: skip

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import a module of the package at its first use: interceptors needs grpcio."""
    if name in ("asgi", "compat", "interceptors"):
        return _import_module("." + name, __name__)
    hint = "announce work with gpreempt.online(gpus=[0])"
    if "offline" in name.lower():
        hint = "jobs become offline by the rules of the daemon, or by gpctl run --class offline -- COMMAND"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {hint}")
