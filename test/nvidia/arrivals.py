"""Arrivals of requests of a language model, after the Azure LLM inference trace.

arrivals.py CSV writes arrivals.json, the extract in this folder. schedule() makes a list from it.
"""

import csv
import datetime
import json
import pathlib
import sys

EXTRACT = pathlib.Path(__file__).resolve().parent / "arrivals.json"
COMMENT = (
    "300 requests of AzureLLMInferenceTrace_conv.csv (2023; github.com/Azure/AzurePublicDataset, CC-BY), those from 600 s after its"
    " first. Each: the seconds since the one before; the prompt's tokens, limited to 256..2048 and rounded up to a multiple of 256;"
    " the generated tokens, limited to 16..96. arrivals.schedule stretches the gaps, all by one factor."
)


def schedule(requests, seconds, duty, cost):
    """The requests that keep the server busy for a share of some seconds: [at, prompt, generated] each.

    cost(prompt, generated) is how many seconds a request takes alone. All gaps are stretched by one
    factor, so that bursts stay bursts.
    """
    busy, chosen = 0.0, []
    for gap, prompt, generated in requests:
        if busy >= duty * seconds:
            break
        busy += cost(prompt, generated)
        chosen.append((gap, prompt, generated))
    # The first arrives at once; the time after the last is left for its answer.
    factor = (seconds - cost(*chosen[-1][1:])) / max(sum(gap for gap, _, _ in chosen[1:]), 1e-9)
    at, answer = 0.0, []
    for i, (gap, prompt, generated) in enumerate(chosen):
        at += gap * factor if i else 0.0
        answer.append([round(at, 6), prompt, generated])
    return answer


def read():
    return json.loads(EXTRACT.read_text())["requests"]


def extract(path, after=600, count=300):
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    # The file has seven digits of the second; fromisoformat reads six.
    times = [datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    begin = next(i for i, t in enumerate(times) if t - times[0] >= after)
    requests = []
    for i in range(begin, begin + count):
        prompt, generated = int(rows[i]["ContextTokens"]), int(rows[i]["GeneratedTokens"])
        prompt = min(max(-(-prompt // 256) * 256, 256), 2048)
        requests.append([round(times[i] - times[i - 1], 4), prompt, min(max(generated, 16), 96)])
    lines = ",\n".join("  " + json.dumps(r) for r in requests)
    EXTRACT.write_text('{\n "comment": %s,\n "requests": [\n%s\n ]\n}\n' % (json.dumps(COMMENT), lines))


if __name__ == "__main__":
    extract(sys.argv[1])
