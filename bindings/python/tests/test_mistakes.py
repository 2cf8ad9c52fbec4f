from __future__ import annotations

import logging
from pathlib import Path
from typing import Dict

import pytest
from conftest import Daemon

import gpreempt
from gpreempt import _client

# Blocks of lines: those with "$ " are a program, the others the whole answer, in which the remedy stands between « and ».
GOLDEN = Path(__file__).with_name("mistakes.golden")


def test_mistakes_are_answered_with_their_remedy(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    want: Dict[str, str] = {}
    got: Dict[str, str] = {}
    for block in GOLDEN.read_text().strip().split("\n\n"):
        lines = block.split("\n")
        program = "\n".join(line[2:] for line in lines if line.startswith("$ "))
        if not program:
            continue
        answer = "\n".join(line for line in lines if not line.startswith("$ "))
        _, mark, after = answer.partition("«")
        assert mark and after.find("»") > 0, f"the remedy is not marked: {block}"
        want[program] = answer.replace("«", "").replace("»", "")
        got[program] = answer_of(program, daemon.socket, monkeypatch, caplog)
    assert len(want) >= 15
    assert got == want


def answer_of(program: str, socket: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> str:
    monkeypatch.setenv("GPREEMPT_SOCKET", socket)
    monkeypatch.setattr(_client, "_defaults", {})  # each cause is logged once for a client
    caplog.clear()
    try:
        exec(program, {"gpreempt": gpreempt})
    except Exception as e:
        return f"{type(e).__name__}: {e}".replace(socket, "SOCKET")
    return "\n".join(f"{record.levelname}: {record.getMessage()}" for record in caplog.records)
