"""Interceptors of gRPC servers: calls are announced. They need grpcio.

    grpc.server(pool, interceptors=[gpreempt.interceptors.Interceptor(gpus=[0])])
    grpc.aio.server(interceptors=[gpreempt.interceptors.AsyncInterceptor(gpus=[0])])
"""

from __future__ import annotations

import inspect
from typing import Any, Awaitable, Callable, Optional, Sequence

import grpc
import grpc.aio

from ._online import online


class _Announcer:
    def __init__(self, *, gpus: Any, methods: Optional[Sequence[str]] = None, **request: Any) -> None:
        if isinstance(methods, str):
            raise TypeError("methods must be a list of strings")
        self._methods = None if methods is None else tuple(methods)
        self._online = online(gpus, **request)

    def _announces(self, method: str) -> bool:
        return self._methods is None or method.startswith(self._methods)


class Interceptor(_Announcer, grpc.ServerInterceptor):  # type: ignore[misc]  # grpcio has no types
    """Announces each call of a server with threads until its last answer.

    gpus names the GPUs of the engine: the server itself often has no queues. methods are the beginnings of the methods that
    are announced, such as "/package.Service/", all without it. The other arguments are those of online.
    """

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        handler = continuation(details)
        if handler is None or not self._announces(details.method):
            return handler
        return _wrap(handler, self._one, self._many)

    def _one(self, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        return self._online(behaviour)

    def _many(self, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        def run(request: Any, context: Any) -> Any:
            lease = self._online.acquire()
            try:
                yield from behaviour(request, context)
            finally:
                lease.release()

        return run


class AsyncInterceptor(_Announcer, grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpcio has no types
    """Interceptor for a server of grpc.aio, whose handlers are coroutine functions or asynchronous generators."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or not self._announces(details.method):
            return handler
        return _wrap(handler, self._one, self._many)

    def _one(self, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        return self._online(behaviour) if inspect.iscoroutinefunction(behaviour) else behaviour

    def _many(self, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(behaviour):  # it writes its answers to the context
            return self._online(behaviour)

        async def run(request: Any, context: Any) -> Any:
            lease = await self._online.acquire_async()
            try:
                async for answer in behaviour(request, context):
                    yield answer
            finally:
                lease.release()

        return run


def _wrap(handler: Any, one: Callable[..., Any], many: Callable[..., Any]) -> Any:
    """Return a handler whose behaviour is wrapped: by one for one answer, by many for a stream of them."""
    for kind, wrap in (("unary_unary", one), ("stream_unary", one), ("unary_stream", many), ("stream_stream", many)):
        behaviour = getattr(handler, kind)
        if behaviour is not None:
            make = getattr(grpc, kind + "_rpc_method_handler")
            return make(wrap(behaviour), handler.request_deserializer, handler.response_serializer)
    return handler
