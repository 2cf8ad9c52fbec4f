"""The package as pip installs it, and what has no other place."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

import gpreempt
from gpreempt import _errors
from conftest import HERE

PACKAGE = HERE.parent


@pytest.mark.skipif(
    any(importlib.util.find_spec(m) is None for m in ("pip", "setuptools", "wheel")),
    reason="python3-pip, python3-setuptools or python3-wheel is not installed",
)
def test_wheel_built_without_a_network_has_the_whole_package(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a build writes beside its sources
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    environ = {**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    built = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"gpreempt-{gpreempt.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as z:
        inside = {name for name in z.namelist() if name.startswith("gpreempt/")}
    assert inside == {f"gpreempt/{p.name}" for p in (PACKAGE / "gpreempt").iterdir() if p.is_file()}
    assert {"gpreempt/api.binpb", "gpreempt/py.typed"} <= inside

    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as z:
        z.extractall(site)
    used = subprocess.run(
        [sys.executable, "-c", "import gpreempt\nwith gpreempt.online(gpus=[gpreempt.gpu_id(1)]) as l: print(gpreempt.__file__, l.protected)"],
        env={**environ, "PYTHONPATH": str(site), "GPREEMPT_SOCKET": str(tmp_path / "none")}, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert used.stdout.split() == [str(site / "gpreempt" / "__init__.py"), "False"]


@pytest.mark.parametrize(
    "code, reason, kind, temporary",
    [
        (3, "UNKNOWN_GPU", gpreempt.UnknownGpu, False),
        (3, "TTL_OUT_OF_RANGE", gpreempt.InvalidRequest, False),
        (6, "REQUEST_ID_REUSED", gpreempt.InvalidRequest, False),
        (5, "UNKNOWN_LEASE", gpreempt.UnknownLease, False),
        (7, "FOREIGN_LEASE", gpreempt.UnknownLease, False),
        (7, "ONLINE_RIGHT_MISSING", gpreempt.PermissionDenied, False),
        (16, "", gpreempt.PermissionDenied, False),
        (8, "LEASES_PER_CLIENT", gpreempt.Overloaded, True),
        (14, "SHUTTING_DOWN", gpreempt.Unavailable, True),
        (13, "", gpreempt.Error, True),
        (12, "", gpreempt.Error, False),
    ],
)
def test_reason_and_code_decide_the_exception(code: int, reason: str, kind: type, temporary: bool) -> None:
    error = _errors.of_status(code, reason, "what", "do this")
    assert type(error) is kind and error.temporary is temporary
    assert (error.code, error.reason, str(error)) == (code, reason, "what: do this")


def test_pauses_between_attempts_double_to_two_seconds(tmp_path: Path) -> None:
    with gpreempt.Client(str(tmp_path / "none"), on_unprotected=lambda _: None) as client:
        keeper = client._keeper
        keeper.stop()  # its thread would look as well
        pauses = []
        for _ in range(7):
            keeper._probe_at = time.monotonic()
            begun = time.monotonic()
            keeper._work(client)
            assert keeper._probe_at >= begun + keeper._pause
            pauses.append(keeper._pause)
    assert pauses == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]
