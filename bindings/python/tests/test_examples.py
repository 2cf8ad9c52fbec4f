"""The examples, against a real daemon."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import os
import socket as sockets
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Iterator, List

import pytest

import gpreempt
from conftest import HERE, ROOT, Daemon, eventually

EXAMPLES = ROOT / "examples"


# On a busy host the daemon may not answer in the time that an announcement without max_wait has.
ENOUGH = "import gpreempt._request\ngpreempt._request.UNSTATED_MAX_WAIT = 60.0\n"


@pytest.fixture
def socket(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The default client's socket is the daemon's."""
    monkeypatch.setenv("GPREEMPT_SOCKET", daemon.socket)
    monkeypatch.setattr("gpreempt._request.UNSTATED_MAX_WAIT", 60.0)
    yield daemon.socket
    gpreempt.default_client().close()


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_" + name.replace("/", "_").removesuffix(".py"), EXAMPLES / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(path: str, **environ: str) -> List[str]:
    answer = subprocess.run(
        [sys.executable, str(EXAMPLES / path)], input="hello\nworld\n", capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(HERE.parent), **environ},
    )  # fmt: skip
    return answer.stdout.splitlines()


def test_python(daemon: Daemon) -> None:
    lines = run("python/answer.py", GPREEMPT_SOCKET=daemon.socket)
    assert [line.split()[0] for line in lines] == ["HELLO", "WORLD"]
    daemon.eventually_free()


def test_python_without_a_daemon() -> None:
    lines = run("python/answer.py", GPREEMPT_SOCKET="/nonexistent/socket")
    assert lines == ["HELLO unprotected DAEMON_UNAVAILABLE", "WORLD unprotected DAEMON_UNAVAILABLE"]


def test_fastapi(daemon: Daemon, socket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi", reason="python3-fastapi is not installed")
    httpx = pytest.importorskip("httpx", reason="python3-httpx is not installed")
    announced: List[Any] = []
    acquire = gpreempt.online.acquire_async

    async def record(self: gpreempt.online) -> gpreempt.Lease:
        lease = await acquire(self)
        announced.append(lease)
        return lease

    monkeypatch.setattr(gpreempt.online, "acquire_async", record)
    app = load("fastapi/app.py").app

    async def main() -> None:
        async with httpx.AsyncClient(app=app, base_url="http://test") as http:
            assert (await http.get("/health")).json() == "ok"
            assert announced == []
            assert (await http.get("/v1/answer", params={"text": "hello"})).json() == {"answer": "HELLO"}

    asyncio.run(main())
    assert len(announced) == 1
    daemon.eventually_free()


def test_vllm_takes_the_middleware_by_name(daemon: Daemon, socket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is a stub; the application is built as vLLM builds its own, and the daemon's answers are real."""
    fastapi = pytest.importorskip("fastapi", reason="python3-fastapi is not installed")
    monkeypatch.syspath_prepend(str(EXAMPLES / "vllm"))
    serve = importlib.import_module("serve")
    app = fastapi.FastAPI()
    app.add_middleware(serve.Announce)
    app.mount("/", serve.stub)
    held: List[Any] = []
    body = b""

    async def main() -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": b"{}"}

        async def send(message: Any) -> None:
            nonlocal body
            held.append(daemon.labels())
            body += message.get("body", b"")

        await app({"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}, receive, send)

    asyncio.run(main())
    assert body.endswith(b"data: [DONE]\n\n") and b"stub" in body
    assert held == [["vllm"]] * 6
    daemon.eventually_free()


@contextlib.contextmanager
def serving(daemon: Daemon, directory: Path, command: List[str], cwd: Path, *path: Path) -> Iterator[Any]:
    """Run a server on a socket, and return a client of it."""
    httpx = pytest.importorskip("httpx", reason="python3-httpx is not installed")
    pytest.importorskip("uvicorn", reason="python3-uvicorn is not installed")
    pytest.importorskip("fastapi", reason="python3-fastapi is not installed")
    uds = str(directory / "http.sock")
    log = directory / "http.log"
    (directory / "sitecustomize.py").write_text(ENOUGH)
    server = subprocess.Popen(
        [sys.executable, *command, "--uds", uds], cwd=cwd, stdout=subprocess.DEVNULL, stderr=log.open("w"),
        env={**os.environ, "GPREEMPT_SOCKET": daemon.socket, "PYTHONPATH": os.pathsep.join(map(str, (directory, HERE.parent, *path)))},
    )  # fmt: skip

    def listens() -> bool:
        assert server.poll() is None, log.read_text()
        with sockets.socket(sockets.AF_UNIX) as s:
            return s.connect_ex(uds) == 0

    try:
        eventually("the server listens", listens)
        with httpx.Client(transport=httpx.HTTPTransport(uds=uds), base_url="http://test", timeout=60) as http:
            yield http
    finally:
        server.terminate()
        server.wait()


def test_fastapi_under_uvicorn(daemon: Daemon, directory: Path) -> None:
    with serving(daemon, directory, ["-m", "uvicorn", "app:app"], EXAMPLES / "fastapi") as http:
        assert http.get("/health").json() == "ok"
        assert daemon.announcements() == 0
        assert http.get("/v1/answer", params={"text": "hello"}).json() == {"answer": "HELLO"}
    assert daemon.announcements() == 1


def test_vllm_stub_under_uvicorn(daemon: Daemon, directory: Path) -> None:
    with serving(daemon, directory, ["-m", "uvicorn", "serve:stubbed"], ROOT, EXAMPLES / "vllm") as http:
        assert http.post("/v1/completions", json={}).text.endswith("data: [DONE]\n\n")
    assert daemon.announcements() == 1


# What examples/sglang uses of the package sglang, by its names. The stream waits in its middle for /go.
SGLANG = {
    "srt/entrypoints/http_server.py": """
import asyncio
import fastapi
from fastapi.responses import StreamingResponse

app = fastapi.FastAPI()
go = asyncio.Queue()

@app.post("/generate")
async def generate():
    async def words():
        yield "first"
        yield await go.get()
    return StreamingResponse(words())

@app.post("/go")
async def last():
    await go.put("last")
""",
    "launch_server.py": """
import sys
import uvicorn
from sglang.srt.entrypoints.http_server import app

if __name__ == "__main__":
    assert sys.argv[1] == "--uds"
    uvicorn.run(app, uds=sys.argv[2])
""",
}


def test_sglang_server_is_announced_until_the_last_token(daemon: Daemon, directory: Path) -> None:
    """The package sglang is a stub; the example, its middleware, uvicorn and the daemon's answers are real."""
    for name, text in SGLANG.items():
        path = directory / "stub" / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with serving(daemon, directory, [str(EXAMPLES / "sglang/serve.py")], ROOT, directory / "stub") as http:
        assert daemon.labels() == []
        with http.stream("POST", "/generate") as answer:
            words = answer.iter_text()
            assert next(words) == "first"
            assert daemon.labels() == ["sglang"]
            http.post("/go")
            assert "".join(words) == "last"
        daemon.eventually_free()
    assert daemon.announcements() == 1


def test_triton_model_announces_each_batch(daemon: Daemon, socket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's module for models is a stub; the model and the daemon's answers are real."""
    stub: Any = ModuleType("triton_python_backend_utils")
    held: List[Any] = []

    class Tensor:
        def __init__(self, name: str, value: Any) -> None:
            self.name, self.value = name, value

        def as_numpy(self) -> Any:
            held.append(daemon.labels())
            return self.value

    stub.Tensor = Tensor
    stub.InferenceResponse = lambda output_tensors: {t.name: t.value for t in output_tensors}
    stub.get_input_tensor_by_name = lambda request, name: Tensor(name, request[name])
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stub)
    model = load("triton/answer/1/model.py").TritonPythonModel()
    model.initialize({"model_name": "answer", "model_instance_device_id": "0"})
    assert model.execute([{"TEXT": "a"}, {"TEXT": "b"}]) == [{"ANSWER": "a"}, {"ANSWER": "b"}]
    assert held == [["triton answer"]] * 2
    daemon.eventually_free()
