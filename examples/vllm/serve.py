"""vLLM's OpenAI server with its requests announced:

    vllm serve MODEL --middleware serve.Announce

vLLM imports the class by its name and calls it with its application.
"""

import asyncio
import json
import os
from typing import Any

import gpreempt.asgi


def gpus() -> Any:
    """Return the GPUs of the engine: GPREEMPT_GPUS, such as "0,1", as HIP indices of this process; 0 without it."""
    return [int(i) for i in os.environ.get("GPREEMPT_GPUS", "0").split(",")]


class Announce(gpreempt.asgi.Middleware):
    """The API server of vLLM has no queues of its own: its engine processes have. So the GPUs are named."""

    def __init__(self, app: Any) -> None:
        super().__init__(app, gpus=gpus(), paths=["/v1/chat/completions", "/v1/completions", "/v1/embeddings"], label="vllm")


async def stub(scope: Any, receive: Any, send: Any) -> None:
    """Answer a completion as vLLM streams it: events, a word each. It computes nothing."""
    if scope["type"] != "http":
        return
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for word in ("this", "is", "a", "stub"):
        await asyncio.sleep(0.005)
        data = json.dumps({"choices": [{"text": word + " "}]})
        await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


stubbed = Announce(stub)  # python3 -m uvicorn serve:stubbed: needs neither vLLM nor a GPU
