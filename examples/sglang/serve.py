"""SGLang's HTTP server with its requests announced: serve.py takes the arguments of sglang.launch_server."""

import os
import runpy

import gpreempt.asgi

if __name__ == "__main__":
    from sglang.srt.entrypoints import http_server

    http_server.app.add_middleware(
        gpreempt.asgi.Middleware,
        # The HTTP server has no queues of its own: its scheduler processes have. So the GPUs are named.
        gpus=[int(i) for i in os.environ.get("GPREEMPT_GPUS", "0").split(",")],
        paths=["/generate", "/encode", "/v1/chat/completions", "/v1/completions", "/v1/embeddings"],
        label="sglang",
    )
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
