"""A client that asks all the time, plain and streaming, until the file /tmp/stop is there.

Usage: URL MODEL CLIENTS TOKENS. A line of JSON a second says how many answers came whole and which
did not; the last line has "ended".
"""

import asyncio
import itertools
import json
import random
import sys
from pathlib import Path

import httpx

URL, MODEL, CLIENTS, TOKENS = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
STOP = Path("/tmp/stop")

whole = {"plain": 0, "stream": 0}
failed = []


async def ask(client, number):
    stream = number % 2 == 0
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Question {number}: tell me a story."}],
        "max_tokens": random.randint(1, TOKENS),
        "stream": stream,
    }
    try:
        async with client.stream("POST", f"{URL}/chat/completions", json=body) as answer:
            text = (await answer.aread()).decode()
        if answer.status_code != 200:
            failed.append(f"{number}: {answer.status_code}: {text[:300]}")
        elif stream and (not text.rstrip().endswith("data: [DONE]") or '"error"' in text):
            failed.append(f"{number}: broken stream: {text[-300:]}")
        elif not stream and not json.loads(text)["choices"][0]["message"]["content"]:
            failed.append(f"{number}: empty answer: {text[:300]}")
        else:
            whole["stream" if stream else "plain"] += 1
    except (httpx.HTTPError, ValueError) as error:
        failed.append(f"{number}: {type(error).__name__}: {error}")


def stopped():
    return STOP.exists()


async def ask_on(client, numbers):
    while not stopped():
        await ask(client, next(numbers))
        if failed:
            await asyncio.sleep(0.5)


def say(**more):
    print(
        json.dumps({**whole, "failed": failed[-20:], "failures": len(failed), **more}), flush=True
    )


async def main():
    numbers = itertools.count(1)
    async with httpx.AsyncClient(
        timeout=120, limits=httpx.Limits(max_connections=CLIENTS)
    ) as client:
        asking = asyncio.gather(*(ask_on(client, numbers) for _ in range(CLIENTS)))
        while not asking.done():
            await asyncio.wait([asking], timeout=1)
            say()
        asking.result()
    say(ended=True)


asyncio.run(main())
