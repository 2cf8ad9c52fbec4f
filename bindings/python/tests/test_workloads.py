"""The workloads, where PyTorch is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Dict, List

import pytest

from conftest import ROOT

if importlib.util.find_spec("torch") is None:
    pytest.skip("the workloads need PyTorch", allow_module_level=True)

WORKLOADS = ROOT / "examples" / "workloads"
ENVIRON = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def run(*command: str, requests: str = "") -> List[str]:
    done = subprocess.run(command, input=requests, capture_output=True, text=True, timeout=300, env=ENVIRON)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def script(name: str, *options: str) -> List[str]:
    return [sys.executable, str(WORKLOADS / (name + ".py")), "--seconds", "1", *options]


@pytest.mark.parametrize("name", ["gemm", "cnn", "transformer", "bert"])
def test_training_says_where_it_runs_and_how_far_it_is(name: str) -> None:
    lines = run(*script(name, "--device", "cpu", "--scale", "0.05"))
    assert lines[0].startswith("device cpu: PyTorch ") and "gpreempt can suspend nothing" in lines[0]
    assert lines[2].startswith("step 1")
    assert lines[-1].startswith("ended after step ")


def test_the_same_seed_gives_the_same_losses() -> None:
    first, second, other = (run(*script("bert", "--device", "cpu", "--scale", "0.05", "--seed", seed))[2] for seed in "778")
    assert first.startswith("step 1 loss ") and first == second and first != other


def test_inference_answers_each_line() -> None:
    lines = run(*script("resnet18", "--device", "cpu", "--scale", "0.1", "--seconds", "0"), requests="\n\n\n")
    assert lines[2] == "ready"
    assert [line.split()[0] for line in lines[3:]] == ["answer"] * 3


def test_streams_compare_priorities() -> None:
    lines = run(*script("streams", "--device", "cpu", "--scale", "0.05"))
    last = [line for line in lines if ": " in line][-4:]
    assert [line.split(":")[0] for line in last[:3]] == ["alone", "equal priority", "high priority"]
    assert last[3].startswith("This ran on the CPU, which has no streams:")


def test_sizes() -> None:
    code = """
import json, torch, models
from torch.utils.flop_counter import FlopCounterMode
sizes = {}
for name, x in (("cnn", torch.randn(16, 3, 64, 64)), ("transformer", torch.randint(1000, (16, 128))), ("resnet18", torch.randn(1, 3, 224, 224))):
    model = getattr(models, name)(1)
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        model(x)
    sizes[name] = sum(p.numel() for p in model.parameters()), flops.get_total_flops()
sizes["bert"] = sum(p.numel() for p in models.bert(1).parameters()), 0
print(json.dumps(sizes))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=WORKLOADS, capture_output=True, text=True, check=True, env=ENVIRON)
    sizes: Dict[str, List[float]] = json.loads(done.stdout)
    assert sizes["resnet18"][0] == 11_689_512  # that of the paper's, as in torchvision
    assert 100e6 < sizes["bert"][0] < 115e6  # BERT-base has 110 million
    for cnn, transformer in zip(sizes["cnn"], sizes["transformer"]):
        assert 0.8 < cnn / transformer < 1.25


def test_emulated_queues_keep_step(kfdemu: str) -> None:
    if subprocess.run([kfdemu, "check"], capture_output=True).returncode:
        pytest.skip("kfdemu cannot run a machine here")
    path = f"PATH={Path(kfdemu).parent}:{os.environ['PATH']}"
    lines = run("env", path, kfdemu, "run", "--", *script("cnn", "--scale", "0.05"))
    assert lines[0].startswith("device emulated: PyTorch ") and "2 EMULATED queues" in lines[0]
    steps = int(lines[-2].removeprefix("ended after step "))
    proof = json.loads(lines[-1])
    assert (proof["ok"], proof["count"]) == (True, steps * 2 * 8)
