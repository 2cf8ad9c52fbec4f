"""ASGI middleware: requests are announced.

    app.add_middleware(gpreempt.asgi.Middleware, gpus=[0], paths=["/v1/"])     # FastAPI, Starlette
    app = gpreempt.asgi.Middleware(app, gpus=[0])                              # any ASGI application
"""

from __future__ import annotations

from typing import Any, Awaitable, Callable, MutableMapping, Optional, Sequence

from ._online import online

Scope = MutableMapping[str, Any]
Application = Callable[[Scope, Callable[..., Awaitable[Any]], Callable[..., Awaitable[Any]]], Awaitable[None]]


class Middleware:
    """Announces each HTTP request for as long as the application handles it, the stream of its answer included.

    gpus names the GPUs of the engine: the server itself often has no queues. paths are the beginnings of the paths that
    are announced, all without it; a health check needs no GPU. The other arguments are those of online.
    """

    def __init__(self, app: Application, *, gpus: Any, paths: Optional[Sequence[str]] = None, **request: Any) -> None:
        if isinstance(paths, str):
            raise TypeError(f"paths is {paths!r}: use a list, such as [{paths!r}]")
        self._app = app
        self._paths = None if paths is None else tuple(paths)
        self._online = online(gpus, **request)

    async def __call__(self, scope: Scope, receive: Callable[..., Awaitable[Any]], send: Callable[..., Awaitable[Any]]) -> None:
        if scope["type"] != "http" or (self._paths is not None and not scope["path"].startswith(self._paths)):
            await self._app(scope, receive, send)
            return
        lease = await self._online.acquire_async()
        try:
            await self._app(scope, receive, send)
        finally:
            lease.release()
