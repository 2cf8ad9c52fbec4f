"""Selectors of GPUs, and what a HIP index means in this process."""

from __future__ import annotations

import inspect
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

from . import _errors

_PCI = re.compile(r"([0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)
_DEVICE = re.compile(r"(?:cuda|hip|rocm):(\d+)")
_UUID = re.compile(r"GPU-[0-9a-f]{1,16}", re.IGNORECASE)
_NODE = re.compile(r"node:(\d+)")
_RENDER = re.compile(r"(?:/dev/dri/)?renderD(\d+)")
# The name of a product, such as mi300x, has a digit; gpu0 and the like are not products.
_PRODUCT = re.compile(r"(?!(?:cuda|hip|rocm|cpu|gpu|card)[-_ ]?\d*$)[a-z][\w -]*\d[\w -]*", re.IGNORECASE)
_FORMS = '"cuda:0", a product such as "mi300x", a PCI address such as "0000:c1:00.0", or a UUID "GPU-..."'
_NODES = "/sys/class/kfd/kfd/topology/nodes"


class _Set:
    """The type of ALL and OWN."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return "gpreempt." + self._name


# ALL as gpus means all GPUs of the host.
ALL = _Set("ALL")
# OWN as gpus means those on which this process has queues when it announces; all of the host while it has none.
OWN = _Set("OWN")


@dataclass(frozen=True)
class Gpu:
    """A GPU by one of its names; the functions below make one."""

    by: str
    value: Union[int, str]

    def __repr__(self) -> str:
        return repr(self.value) if self.by in ("index", "uuid", "bdf", "name") else f"gpreempt.{self.by.replace('_minor', '')}({self.value})"


def gpu_id(value: int) -> Gpu:
    """Select by KFD gpu_id, decimal as in /sys/class/kfd."""
    return Gpu("gpu_id", value)


def node(value: int) -> Gpu:
    """Select by KFD topology node number."""
    return Gpu("node", value)


def render(minor: int) -> Gpu:
    """Select by N of /dev/dri/renderDN."""
    return Gpu("render_minor", minor)


def pci(address: str) -> Gpu:
    """Select by PCI address, "0000:c1:00.0" or "c1:00.0"."""
    if not _PCI.fullmatch(address):
        raise ValueError(f"invalid PCI address {address!r}: use the form 0000:c1:00.0")
    return Gpu("bdf", address.lower())


def uuid(value: str) -> Gpu:
    """Select by UUID, "GPU-" and 16 hexadecimal digits, as rocminfo prints it."""
    if not _UUID.fullmatch(value):
        raise ValueError(f"invalid UUID {value!r}: use the form GPU-1234567890abcdef")
    return Gpu("uuid", value.lower())


def index(value: int) -> Gpu:
    """Select by HIP index: the N of torch.device("cuda:N") in this process."""
    if value < 0:
        raise ValueError(f"invalid HIP index {value}: use 0 or more")
    return Gpu("index", value)


# Selector is what gpus consists of: a Gpu, a HIP index, a string ("cuda:0", "node:2", "renderD128", the name of a
# product, a PCI address or a UUID), or an object with type and index, such as a torch.device.
Selector = Union[Gpu, int, str, Any]


def parse(selector: Selector) -> Gpu:
    """Return the Gpu of a selector."""
    if isinstance(selector, Gpu):
        return selector
    if isinstance(selector, int) and not isinstance(selector, bool):
        return index(selector)
    if isinstance(selector, str):
        device = _DEVICE.fullmatch(selector)
        if device:
            return index(int(device.group(1)))
        if selector.isascii() and selector.isdigit():
            return index(int(selector))
        if selector.startswith("GPU-"):
            return uuid(selector)
        if _PCI.fullmatch(selector):
            return pci(selector)
        for pattern, by in ((_NODE, "node"), (_RENDER, "render_minor")):
            match = pattern.fullmatch(selector)
            if match:
                return Gpu(by, int(match.group(1)))
        if _PRODUCT.fullmatch(selector):
            return Gpu("name", selector)
        if "," in selector:
            raise ValueError(f"invalid GPU {selector!r}: use {[part.strip() for part in selector.split(',')]}")
        raise ValueError(f"invalid GPU {selector!r}: use {_FORMS}")
    kind, number = getattr(selector, "type", None), getattr(selector, "index", None)
    if kind in ("cuda", "hip") and isinstance(number, int):
        return index(number)
    if kind in ("cuda", "hip"):
        raise ValueError(f"{selector!r} has no index: use torch.device('cuda:0')")
    raise TypeError(f"invalid GPU {selector!r}: use a HIP index such as 0, or {_FORMS}")


def parse_all(gpus: Any) -> Union[_Set, Tuple[Gpu, ...]]:
    """Return the selection of an argument gpus: ALL, OWN or selectors. "all" is ALL, and "own" is OWN."""
    if gpus is None:
        raise ValueError(
            "gpus is not set: name the GPUs, such as gpus=[0], or use gpreempt.ALL for all of the host, "
            "or gpreempt.OWN for those on which this process has queues"
        )
    if isinstance(gpus, _Set):
        return gpus
    if isinstance(gpus, str) and gpus.lower() in ("all", "own"):
        return ALL if gpus.lower() == "all" else OWN
    if inspect.isroutine(gpus) or inspect.isclass(gpus):
        raise TypeError(f"gpus is {gpus.__name__}: use @gpreempt.online(gpus=[0]), with arguments, as a decorator")
    if isinstance(gpus, Mapping):
        raise TypeError(f"gpus is {gpus!r}: use a list, such as {list(gpus)!r}")
    if isinstance(gpus, (str, int, Gpu)) or not isinstance(gpus, Iterable):
        gpus = [gpus]
    selected = tuple(parse(s) for s in gpus)
    if not selected:
        raise ValueError("gpus is empty: name GPUs, or use gpreempt.ALL")
    return selected


@dataclass(frozen=True)
class Node:
    """A GPU of the host."""

    node: int
    gpu_id: int
    unique_id: int = 0
    name: str = ""


def topology(root: str = _NODES) -> Optional[List[Node]]:
    """Return the GPUs that this process may use, in the order of ROCr; None without the driver's topology.

    Nodes that a device cgroup denies cannot be read (kfd_devcgroup_check_permission) and are left out,
    as ROCr does.
    """
    try:
        names = sorted((n for n in os.listdir(root) if n.isdigit()), key=int)
    except OSError:
        return None
    nodes = []
    for name in names:
        try:
            number = int(Path(root, name, "gpu_id").read_text())
            properties = dict(line.split(None, 1) for line in Path(root, name, "properties").read_text().splitlines() if " " in line)
        except (OSError, ValueError):
            continue
        if number:
            nodes.append(Node(int(name), number, int(properties.get("unique_id", "0"))))
    return nodes


def visible(nodes: Sequence[Node], environ: Mapping[str, str]) -> List[Node]:
    """Return the GPUs that HIP enumerates in a process with this environment, by index.

    ROCR_VISIBLE_DEVICES selects of the host's GPUs, even when it is empty; HIP_VISIBLE_DEVICES, or
    CUDA_VISIBLE_DEVICES without it, selects of those. Both end at the first invalid entry.
    """
    shown = list(nodes)
    if "ROCR_VISIBLE_DEVICES" in environ:
        shown = _pick(shown, environ["ROCR_VISIBLE_DEVICES"])
    filter = environ.get("HIP_VISIBLE_DEVICES") or environ.get("CUDA_VISIBLE_DEVICES")
    if filter:
        shown = _pick(shown, filter)
    return shown


def _pick(nodes: List[Node], text: str) -> List[Node]:
    picked: List[Node] = []
    for entry in text.split(","):
        entry = entry.strip()
        if entry.isdigit() and int(entry) < len(nodes):
            found = nodes[int(entry)]
        else:
            matches = [n for n in nodes if n.unique_id and entry and f"gpu-{n.unique_id:016x}".startswith(entry.lower())]
            if len(matches) != 1 or not _UUID.fullmatch(entry):
                break
            found = matches[0]
        if found in picked:
            break
        picked.append(found)
    return picked


def resolve(
    selected: Sequence[Gpu], ask: Callable[[], List[Node]], root: str = _NODES, environ: Optional[Mapping[str, str]] = None
) -> List[Tuple[str, Union[int, str]]]:
    """Return the selectors of the API. ask lists the daemon's GPUs, for a process that sees no topology."""
    environ = os.environ if environ is None else environ
    nodes: Optional[List[Node]] = None
    result: List[Tuple[str, Union[int, str]]] = []
    for gpu in selected:
        if gpu.by == "name":  # which the topology does not have
            result.append(("gpu_id", _of_product(str(gpu.value), ask())))
            continue
        if gpu.by not in ("index", "uuid"):
            result.append((gpu.by, gpu.value))
            continue
        if nodes is None:
            nodes = topology(root)
            if nodes is None:
                nodes = ask()
        if gpu.by == "index":
            shown = visible(nodes, environ)
            if int(gpu.value) >= len(shown):
                set_ = ", ".join(f"{k}={environ[k]}" for k in _VARIABLES if k in environ) or "no variable hides any"
                raise _errors.UnknownGpu(
                    "UNKNOWN_GPU", f"no GPU has the HIP index {gpu.value}: this process sees {len(shown)} ({set_})",
                    "use one of these, or gpreempt.gpu_id(N); gpctl gpu list shows all", 3,
                )  # fmt: skip
            found = shown[int(gpu.value)]
        else:
            matches = [n for n in nodes if n.unique_id and f"gpu-{n.unique_id:016x}" == f"gpu-{str(gpu.value)[4:].zfill(16)}"]
            if not matches:
                raise _errors.UnknownGpu(
                    "UNKNOWN_GPU", f"no GPU that this process can see has the UUID {gpu.value}", "rocminfo prints the UUIDs", 3
                )
            found = matches[0]
        result.append(("gpu_id", found.gpu_id))
    return result


def _of_product(name: str, nodes: Sequence[Node]) -> int:
    """Return the gpu_id of the only GPU of a product, as gpctl does."""
    found = [n.gpu_id for n in nodes if n.name.lower() == name.lower()]
    if len(found) == 1:
        return found[0]
    message = f"no GPU of this host is a {name}" if not found else f"{len(found)} GPUs of this host are a {name}"
    names: Dict[str, int] = {}
    for n in nodes:
        names[n.name] = names.get(n.name, 0) + 1
    of_host = ", ".join(f"{count} {product}" for product, count in sorted(names.items()))
    raise _errors.UnknownGpu("UNKNOWN_GPU", message, f"use the HIP index of one, such as 0; the host has {of_host or 'none'}; gpctl gpu list shows all", 3)


def resolve_remote(selected: Sequence[Gpu]) -> List[Tuple[str, Union[int, str]]]:
    """Return the selectors for another host. A client there may not list its GPUs, which takes an admin."""
    for gpu in selected:
        if gpu.by in ("index", "uuid", "name"):
            raise _errors.UnknownGpu(
                "UNKNOWN_GPU", f"a GPU of another host cannot be named by its {gpu.by.replace('uuid', 'UUID')}",
                "use its PCI address, gpreempt.node(N), gpreempt.gpu_id(N) or gpreempt.ALL; gpctl gpu list there shows all", 3,
            )  # fmt: skip
    return [(gpu.by, gpu.value) for gpu in selected]


_VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
