"""A loop that announces each batch."""

import sys
import time

import gpreempt

chat = gpreempt.online(gpus=[0], label="example")


def model(text: str) -> str:
    time.sleep(0.005)  # your GPU work
    return text.upper()


for line in sys.stdin:
    with chat as lease:
        answer = model(line.strip())
    print(answer, "protected" if lease.protected else "unprotected", lease.reason)
