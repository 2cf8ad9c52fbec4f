from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List

import pytest

import gpreempt
from gpreempt import _gpus, _proto, _request

A, B, C = _gpus.Node(2, 51234, 0xA), _gpus.Node(3, 7, 0xB0), _gpus.Node(4, 8, 0xC000)


def never() -> List[_gpus.Node]:
    raise AssertionError("the daemon was asked")


@pytest.fixture
def topology(tmp_path: Path) -> str:
    """A topology with a CPU, three GPUs, and a GPU that a device cgroup denies."""
    for number, gpu_id, unique_id in ((0, 0, 0), (2, 51234, 0xA), (3, 7, 0xB0), (4, 8, 0xC000), (10, 9, 0xD)):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "gpu_id").write_text(f"{gpu_id}\n")
        if number != 10:
            (directory / "properties").write_text(f"cpu_cores_count 0\nsimd_count 304\nunique_id {unique_id}\ndomain 0\n")
    return str(tmp_path)


def test_gpus_of_the_topology_are_listed_in_the_order_of_rocr(topology: str) -> None:
    assert _gpus.topology(topology) == [A, B, C]
    assert _gpus.topology(topology + "/none") is None


@pytest.mark.parametrize(
    "environ, shown",
    [
        ({}, [A, B, C]),
        ({"ROCR_VISIBLE_DEVICES": "2,0"}, [C, A]),
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
        ({"ROCR_VISIBLE_DEVICES": "1,5,0"}, [B]),
        ({"ROCR_VISIBLE_DEVICES": "1,1,0"}, [B]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000000000b0, GPU-000000000000000a"}, [B, A]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-ffffffffffffffff"}, []),
        ({"HIP_VISIBLE_DEVICES": "1"}, [B]),
        ({"HIP_VISIBLE_DEVICES": ""}, [A, B, C]),
        ({"CUDA_VISIBLE_DEVICES": "2"}, [C]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "2"}, [B]),
        ({"ROCR_VISIBLE_DEVICES": "2,1", "HIP_VISIBLE_DEVICES": "1,0"}, [B, C]),
        ({"ROCR_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "1"}, []),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
        ({"HIP_VISIBLE_DEVICES": "x"}, []),
    ],
)
def test_variables_decide_what_a_process_sees(environ: Dict[str, str], shown: List[_gpus.Node]) -> None:
    assert _gpus.visible([A, B, C], environ) == shown


@pytest.mark.parametrize(
    "gpus, selectors",
    [
        (1, [("gpu_id", 7)]),
        ([0, 2], [("gpu_id", 51234), ("gpu_id", 8)]),
        ("cuda:1", [("gpu_id", 7)]),
        ("1", [("gpu_id", 7)]),
        (["hip:0"], [("gpu_id", 51234)]),
        (["node:6", "renderD128", "/dev/dri/renderD129"], [("node", 6), ("render_minor", 128), ("render_minor", 129)]),
        ([SimpleNamespace(type="cuda", index=2)], [("gpu_id", 8)]),
        (["0000:C1:00.0", "c1:00.0"], [("bdf", "0000:c1:00.0"), ("bdf", "c1:00.0")]),
        (["GPU-00000000000000B0"], [("gpu_id", 7)]),
        ([gpreempt.gpu_id(5), gpreempt.node(6), gpreempt.render(128)], [("gpu_id", 5), ("node", 6), ("render_minor", 128)]),
        ((gpreempt.index(0), gpreempt.pci("0000:01:00.1"), gpreempt.uuid("GPU-a")), [("gpu_id", 51234), ("bdf", "0000:01:00.1"), ("gpu_id", 51234)]),
    ],
)
def test_selectors_name_gpus(gpus: Any, selectors: Any, topology: str) -> None:
    assert _gpus.resolve(_gpus.parse_all(gpus), never, topology, {}) == selectors  # type: ignore[arg-type]


@pytest.mark.parametrize("gpus, error", [
    ([], ValueError), ("cuda", ValueError), ("GPU-x", ValueError), ("0000:c1:00", ValueError), ([None], TypeError), ([1.0], TypeError),
    ([False], TypeError), ([SimpleNamespace(type="cpu", index=0)], TypeError), ([SimpleNamespace(type="cuda", index=None)], ValueError),
])  # fmt: skip
def test_what_is_no_selector_is_an_error(gpus: Any, error: Any) -> None:
    with pytest.raises(error):
        _gpus.parse_all(gpus)


@pytest.mark.parametrize(
    "gpus, encoded",
    [
        (gpreempt.ALL, [("all", True)]),
        ("all", [("all", True)]),
        (gpreempt.OWN, []),
        ("own", []),
        ([gpreempt.gpu_id(5)], [("gpu_id", 5)]),
    ],
)
def test_sets_of_gpus_are_announced_without_a_list(gpus: Any, encoded: Any) -> None:
    message = _proto.NotifyOnlineRequest.FromString(_request.Request(gpus).encode(never))
    assert [(g.WhichOneof("by"), getattr(g, g.WhichOneof("by"))) for g in message.gpus] == encoded


def test_gpus_are_shown_as_they_are_written() -> None:
    gpus = [0, "0000:c1:00.0", gpreempt.gpu_id(5), gpreempt.node(6), gpreempt.render(128)]
    assert _request.Request(gpus).text == "gpus=[0, '0000:c1:00.0', gpreempt.gpu_id(5), gpreempt.node(6), gpreempt.render(128)]"
    assert (_request.Request(gpreempt.ALL).text, _request.Request(gpreempt.OWN).text) == ("gpus=gpreempt.ALL", "gpus=gpreempt.OWN")


def test_index_that_no_gpu_has_names_the_variables(topology: str) -> None:
    with pytest.raises(gpreempt.UnknownGpu, match=r"this process sees 1 \(HIP_VISIBLE_DEVICES=1\)"):
        _gpus.resolve([gpreempt.index(1)], never, topology, {"HIP_VISIBLE_DEVICES": "1"})


def test_daemon_is_asked_where_the_topology_is_missing() -> None:
    assert _gpus.resolve([gpreempt.index(1)], lambda: [A, B], "/none", {}) == [("gpu_id", 7)]


def test_product_names_the_only_gpu_of_it(topology: str) -> None:
    hosts = [_gpus.Node(2, 51234, 0, "MI300X"), _gpus.Node(3, 7, 0, "MI210"), _gpus.Node(4, 8, 0, "MI210")]
    assert _gpus.resolve(_gpus.parse_all(["mi300x"]), lambda: hosts, topology, {}) == [("gpu_id", 51234)]  # type: ignore[arg-type]
    for name, text in (("mi210", "2 GPUs of this host are a mi210: use the HIP index of one, such as 0; the host has 2 MI210, 1 MI300X"), ("mi100", "no GPU of this host is a mi100")):
        with pytest.raises(gpreempt.UnknownGpu, match=text):
            _gpus.resolve(_gpus.parse_all(name), lambda: hosts, topology, {})  # type: ignore[arg-type]
