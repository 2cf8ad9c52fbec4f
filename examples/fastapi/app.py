"""A FastAPI server whose requests under /v1/ are announced."""

import asyncio
from typing import Dict

import fastapi

import gpreempt.asgi

app = fastapi.FastAPI()
app.add_middleware(gpreempt.asgi.Middleware, gpus=[0], paths=["/v1/"], label="fastapi")


@app.get("/health")
async def health() -> str:
    return "ok"  # not announced: it needs no GPU


@app.get("/v1/answer")
async def answer(text: str) -> Dict[str, str]:
    await asyncio.sleep(0.005)  # your GPU work
    return {"answer": text.upper()}
