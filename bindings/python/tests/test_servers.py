"""The middleware and the interceptors, in real servers."""

from __future__ import annotations

import asyncio
import concurrent.futures
from pathlib import Path
from typing import Any, List

import pytest

import gpreempt
import gpreempt.asgi
from conftest import Daemon


def test_requests_of_an_asgi_application_are_announced(daemon: Daemon, client: gpreempt.Client) -> None:
    seen: List[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["type"], scope.get("path"), daemon.labels()))
        if scope.get("path") == "/v1/bad":
            raise KeyError
        await send("answer")
        seen.append(daemon.labels())

    async def main() -> None:
        wrapped = gpreempt.asgi.Middleware(app, gpus=[0], paths=["/v1/"], label="http", max_wait=10, client=client)

        async def send(_: Any) -> None:
            pass

        await wrapped({"type": "lifespan"}, None, send)  # type: ignore[arg-type]
        await wrapped({"type": "http", "path": "/health"}, None, send)  # type: ignore[arg-type]
        await wrapped({"type": "http", "path": "/v1/chat"}, None, send)  # type: ignore[arg-type]
        daemon.eventually_free()
        with pytest.raises(KeyError):
            await wrapped({"type": "http", "path": "/v1/bad"}, None, send)  # type: ignore[arg-type]
        daemon.eventually_free()

    asyncio.run(main())
    assert seen == [
        ("lifespan", None, []), [], ("http", "/health", []), [], ("http", "/v1/chat", ["http"]), ["http"], ("http", "/v1/bad", ["http"]),
    ]  # fmt: skip


def test_paths_are_a_list() -> None:
    with pytest.raises(TypeError):
        gpreempt.asgi.Middleware(None, gpus=[0], paths="/v1")  # type: ignore[arg-type]


def test_fastapi_application_is_announced(daemon: Daemon, client: gpreempt.Client) -> None:
    fastapi = pytest.importorskip("fastapi", reason="python3-fastapi is not installed")
    httpx = pytest.importorskip("httpx", reason="python3-httpx is not installed")
    from fastapi.responses import StreamingResponse

    app = fastapi.FastAPI()
    app.add_middleware(gpreempt.asgi.Middleware, gpus=[0], label="fastapi", max_wait=10, client=client)

    @app.get("/one")
    async def one() -> Any:
        return daemon.labels()

    @app.get("/many")
    async def many() -> Any:
        async def parts() -> Any:
            for _ in range(3):
                yield ",".join(daemon.labels()) + ";"

        return StreamingResponse(parts())

    async def main() -> None:
        async with httpx.AsyncClient(app=app, base_url="http://test") as http:
            assert (await http.get("/one")).json() == ["fastapi"]
            daemon.eventually_free()
            assert (await http.get("/many")).text == "fastapi;" * 3

    asyncio.run(main())
    daemon.eventually_free()


def test_calls_of_a_grpc_server_are_announced(daemon: Daemon, client: gpreempt.Client, directory: Path) -> None:
    grpc = pytest.importorskip("grpc", reason="python3-grpcio is not installed")
    from gpreempt.interceptors import Interceptor

    def labels(*_: Any) -> bytes:
        return ",".join(daemon.labels()).encode()

    def stream(*_: Any) -> Any:
        for _ in range(2):
            yield labels()

    def fail(_: Any, context: Any) -> bytes:
        context.abort(grpc.StatusCode.NOT_FOUND, "none")

    handlers = {
        "One": grpc.unary_unary_rpc_method_handler(labels), "Many": grpc.unary_stream_rpc_method_handler(stream),
        "In": grpc.stream_unary_rpc_method_handler(labels), "Both": grpc.stream_stream_rpc_method_handler(stream),
        "Fail": grpc.unary_unary_rpc_method_handler(fail),
    }  # fmt: skip
    announced = Interceptor(gpus=[0], label="grpc", max_wait=10, methods=["/a.A/"], client=client)
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(2), interceptors=[announced])
    for service in ("a.A", "b.B"):
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    server.add_insecure_port(f"unix:{directory}/s.sock")
    server.start()
    try:
        with grpc.insecure_channel(f"unix:{directory}/s.sock") as channel:
            for service, label in (("a.A", b"grpc"), ("b.B", b"")):
                assert channel.unary_unary(f"/{service}/One")(b"", timeout=60) == label
                daemon.eventually_free()
                assert list(channel.unary_stream(f"/{service}/Many")(b"", timeout=60)) == [label] * 2
                daemon.eventually_free()
                assert channel.stream_unary(f"/{service}/In")(iter([b""]), timeout=60) == label
                daemon.eventually_free()
                assert list(channel.stream_stream(f"/{service}/Both")(iter([b""]), timeout=60)) == [label] * 2
                daemon.eventually_free()
            for method in ("/a.A/Fail", "/c.C/None"):
                with pytest.raises(grpc.RpcError):
                    channel.unary_unary(method)(b"", timeout=60)
            daemon.eventually_free()
    finally:
        server.stop(None).wait()


def test_calls_of_an_asyncio_grpc_server_are_announced(daemon: Daemon, client: gpreempt.Client, directory: Path) -> None:
    grpc = pytest.importorskip("grpc", reason="python3-grpcio is not installed")
    from gpreempt.interceptors import AsyncInterceptor

    async def labels(*_: Any) -> bytes:
        return ",".join(daemon.labels()).encode()

    async def stream(*_: Any) -> Any:
        for _ in range(2):
            yield await labels()

    async def write(_: Any, context: Any) -> None:
        for _ in range(2):
            await context.write(await labels())

    async def main() -> None:
        handlers = {
            "One": grpc.unary_unary_rpc_method_handler(labels), "Many": grpc.unary_stream_rpc_method_handler(stream),
            "Write": grpc.unary_stream_rpc_method_handler(write),
        }  # fmt: skip
        server = grpc.aio.server(interceptors=[AsyncInterceptor(gpus=[0], label="aio", max_wait=10, client=client)])
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("a.A", handlers)])
        server.add_insecure_port(f"unix:{directory}/s.sock")
        await server.start()
        async with grpc.aio.insecure_channel(f"unix:{directory}/s.sock") as channel:
            assert await channel.unary_unary("/a.A/One")(b"", timeout=60) == b"aio"
            for method in ("/a.A/Many", "/a.A/Write"):
                daemon.eventually_free()
                assert [answer async for answer in channel.unary_stream(method)(b"", timeout=60)] == [b"aio"] * 2
        await server.stop(None)

    asyncio.run(main())
    daemon.eventually_free()
