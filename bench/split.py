"""What a split costs at the scheduler: a macro instance of 12 with streams in flight becomes two.

A real Envoy and scheduler, and played workers that stream a token every ``--gap`` seconds. While
``--streams`` streams run, the macro instance is declared anew as two of 6; calls of a few
conversations go on all the time. Told are the time from the decision (the declaration is sent)
until it is in force and until the first call has its first token that was sent after it; that every
conversation then keeps to one of the two; and what the streams saw: those that did not end whole,
and the longest gap between two tokens before the split and after it.

    python bench/split.py --out docs/results/split.json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import instant
import uvloop
from router import PATH, Processes, free_port, processes, until

from ecoserve import gateway, headers
from ecoserve.bench.prompts import chat
from ecoserve.proto.v1 import admin_pb2, admin_pb2_grpc, session_pb2

WORKERS = [f"w{i}" for i in range(12)]
CONVERSATIONS = 24


@dataclass
class Answer:
    """A streamed answer: when it was asked for, when its tokens came, from which worker."""

    asked: float
    worker: str = ""
    tokens: list[float] = field(default_factory=list)
    whole: bool = False


def declared(*sizes: int) -> admin_pb2.Cluster:
    """The cluster with its workers in macro instances of these sizes."""
    names = iter(WORKERS)
    return admin_pb2.Cluster(
        name="c",
        model="m",
        slo=session_pb2.SLO(ttft_s=5.0, tpot_s=1.0),
        macro_instances=[
            admin_pb2.MacroInstance(name=f"m{i}", instances=itertools.islice(names, size))
            for i, size in enumerate(sizes)
        ],
    )


async def ask(port: int, conversation: str, tokens: int) -> Answer:
    """One call through the gateway, to its end."""
    body = json.dumps(chat("m", f"hello from {conversation}", tokens)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"POST {PATH} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        f"{headers.CONVERSATION}: {conversation}\r\n"
        f"content-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    answer = Answer(time.monotonic())
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            return answer
        while (line := await reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            if name == "x-worker":
                answer.worker = value.strip()
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                answer.tokens.append(time.monotonic())
            elif line.startswith(b"data: [DONE]"):
                answer.whole = len(answer.tokens) == tokens
                break
    except OSError:
        pass
    finally:
        writer.close()
    return answer


def longest_gap(answers: list[Answer], low: float, high: float) -> float:
    """Seconds between two tokens of an answer, the later of them within the span."""
    gaps = (
        after - before
        for answer in answers
        for before, after in itertools.pairwise(answer.tokens)
        if low <= after < high
    )
    return max(gaps, default=0.0)


async def measure(options: Any, them: Processes, port: int, stub: Any) -> dict[str, Any]:
    length = int((options.before + options.after) / options.gap) + 4
    streams = []
    for i in range(options.streams):
        streams.append(asyncio.create_task(ask(port, f"stream {i}", length)))
        await asyncio.sleep(1 / options.streams)
    calls: list[asyncio.Task[Answer]] = []
    stop = asyncio.Event()

    async def call_on() -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            calls.append(asyncio.create_task(ask(port, f"talk {number % CONVERSATIONS}", 2)))
            await asyncio.sleep(1 / options.rate)

    calling = asyncio.create_task(call_on())
    await asyncio.sleep(options.before)
    cpu = them.cpu("scheduler")
    decided = time.monotonic()
    await stub.Apply(admin_pb2.ApplyRequest(cluster=declared(6, 6)))
    in_force = time.monotonic()
    cpu = them.cpu("scheduler") - cpu
    first = await ask(port, "the first one", 1)
    await asyncio.sleep(options.after)
    stop.set()
    await calling
    short = [await call for call in calls]
    answers = [await stream for stream in streams]
    halves: dict[str, set[str]] = {}
    place = {instant.address(i): "m0" if i < 6 else "m1" for i in range(12)}
    number = itertools.cycle(range(CONVERSATIONS))
    for talk, answer in zip(number, short, strict=False):
        if answer.asked > in_force and answer.worker:
            halves.setdefault(f"talk {talk}", set()).add(place[answer.worker])
    return {
        "streams": len(answers),
        "streams_not_whole": sum(not answer.whole for answer in answers),
        "calls": len(short),
        "calls_failed": sum(not answer.whole for answer in short),
        "scheduler_cpu_until_in_force_s": round(cpu, 3),
        "in_force_s": round(in_force - decided, 4),
        "first_routed_s": round(first.tokens[0] - decided, 4),
        "conversations": len(halves),
        "conversations_of_both_halves": sum(len(found) > 1 for found in halves.values()),
        "halves": sorted(set.union(*halves.values())),
        "longest_gap_before_s": round(
            longest_gap(answers, decided - options.before / 2, decided), 3
        ),
        "longest_gap_after_s": round(longest_gap(answers, decided, decided + options.after), 3),
    }


async def main(options: Any) -> None:
    backend, scheduler, http, ours, admin = (free_port() for _ in range(5))
    with processes() as them:
        them.start(
            "scheduler", sys.executable, "-m", "ecoserve.scheduler",
            "--grpc", f"127.0.0.1:{scheduler}", "--http", f"127.0.0.1:{http}",
        )  # fmt: skip
        async with grpc.aio.insecure_channel(f"127.0.0.1:{scheduler}") as channel:
            stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]

            async def applied() -> bool:
                await stub.Apply(admin_pb2.ApplyRequest(cluster=declared(12)))
                return True

            async def accepted() -> bool:
                state = await stub.Get(admin_pb2.GetRequest(name="c"))
                return bool(sum(i.state == "accepted" for i in state.instances) == len(WORKERS))

            await until("the scheduler is up", applied, 60.0)
            them.start(
                "workers", sys.executable, str(Path(instant.__file__)), str(backend),
                f"127.0.0.1:{scheduler}", str(len(WORKERS)), "20", str(options.gap),
            )  # fmt: skip
            await until("the workers are accepted", accepted, 60.0)
            config = gateway.GatewayConfig(
                listen=f"127.0.0.1:{ours}",
                admin=f"127.0.0.1:{admin}",
                scheduler=f"127.0.0.1:{scheduler}",
                cluster="c",
            )
            bootstrap = them.folder / "envoy.json"
            bootstrap.write_text(gateway.dump(config))
            them.start("envoy", *gateway.command(config, bootstrap, threads=1))

            async def answers() -> bool:
                return (await ask(ours, "is it up", 1)).whole

            await until("the gateway answers", answers, 60.0)
            found = await measure(options, them, ours, stub)
    found |= {"load": [round(x, 1) for x in os.getloadavg()], "cores": os.cpu_count()}
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--gap", type=float, default=0.5, help="seconds between tokens")
    parser.add_argument("--rate", type=float, default=20.0, help="calls a second beside them")
    parser.add_argument("--before", type=float, default=10.0, help="seconds before the split")
    parser.add_argument("--after", type=float, default=10.0, help="seconds after it")
    parser.add_argument("--out", type=Path)
    uvloop.run(main(parser.parse_args()))
