"""What a pick costs the scheduler's own code as instances become many, while they report.

In one process, without gRPC: clusters of each size in turn, in rounds. Every instance holds some
running requests and reports as often as the scheduler would tell it to (at most 20 times a second,
all together 2,000); calls of 1 kB, each of another conversation, come at ``--rate``, are picked and
end a little later. The CPU time of picks (the body read, the decision made, the answer serialised)
and of reports is taken apart, the median over rounds. Times of a shared machine are worth little:
what counts is the ratio to the smallest cluster, whose rounds alternate with the others'.

    python bench/instances.py --out docs/results/instances.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

import instant

from ecoserve import headers
from ecoserve.bench.prompts import chat, words
from ecoserve.policy.mitosis import default_sizes
from ecoserve.policy.state import SLO
from ecoserve.proto.v1 import session_pb2
from ecoserve.scheduler import extproc, hello, work
from ecoserve.scheduler.cluster import Cluster
from ecoserve.scheduler.config import ClusterSpec, Macro, Slo
from ecoserve.scheduler.metrics import Metrics
from ecoserve.scheduler.requests import Picked
from ecoserve.scheduler.sessions import REPORTS_A_SECOND, REPORTS_OF_ONE

PATH = "/v1/chat/completions"
# A call's answer takes so long.
ANSWER_S = 0.5
# Calls between two looks at the clock, which costs as much as a pick.
TOGETHER = 10


class World:
    """A cluster of ``count`` instances and its calls, on a clock that goes by calls."""

    def __init__(self, count: int, upper: int, policy: str, rate: float) -> None:
        self.count, self.rate = count, rate
        self.now = 100.0
        names = [f"w{i}" for i in range(count)]
        spec = ClusterSpec(
            name="c",
            slo=Slo(ttft_s=5.0, tpot_s=0.5),
            policy=policy,
            macro_instances=tuple(
                Macro(name=f"m{i}", instances=tuple(names[i : i + upper]))
                for i in range(0, count, upper)
            ),
        )
        self.cluster = Cluster(spec, self.now, Metrics())
        self.instances = []
        for i in range(count):
            instance = self.cluster.connect(hello.check(_hello(i)))
            instance.accept(self.now, 0.0)
            self.instances.append(instance)
        self.running = [
            session_pb2.Decode(
                id=f"eco-f{i:015x}", context=400, generated=20, slack_s=3.0, tpot_s=0.5
            )
            for i in range(16)
        ]
        self.finished: list[list[session_pb2.Finished]] = [[] for _ in names]
        self.numbers = [0] * count
        self.answering: deque[tuple[float, str, int]] = deque()
        self.bodies = [json.dumps(chat("m", words(200, i), 8)).encode() for i in range(64)]
        self.calls = self.reports = 0
        self.due = 0.0
        for i in range(count):
            self.take(i, self.report(i))

    @property
    def reports_a_second(self) -> float:
        return min(self.count * REPORTS_OF_ONE, REPORTS_A_SECOND)

    def report(self, i: int) -> bytes:
        """A report of instance ``i``, as it comes over the wire."""
        message = instant.report(self.reports + 1, self.running, self.finished[i])
        self.finished[i] = []
        return message.SerializeToString()

    def take(self, i: int, data: bytes) -> None:
        self.cluster.report(self.instances[i], session_pb2.Report.FromString(data), self.now)

    def pick(self) -> None:
        """One call, picked."""
        body = self.bodies[self.calls % len(self.bodies)]
        key = f"conversation {self.calls}".encode()
        name = f"eco-{self.calls:016x}"
        self.calls += 1
        ticket = self.cluster.offer(
            name, work.read(PATH, body), SLO(5.0, 0.5), self.now, patience=50.0, conversation=key
        )
        picked = ticket.outcome
        assert isinstance(picked, Picked), picked
        rest = {headers.TTFT_SLO: "5", headers.TPOT_SLO: "0.5"}
        addresses = ",".join(picked.addresses)
        extproc.routed("metadata", name, f"{picked.waited:.6f}", addresses, rest)
        self.answering.append((self.now + ANSWER_S, name, int(picked.instance[1:])))

    def play(self, calls: int) -> tuple[float, float]:
        """So many calls with the reports beside them; CPU seconds a pick and a report."""
        picks = reports = 0.0
        sent = 0
        for _ in range(0, calls, TOGETHER):
            self.end_answers()
            self.due += TOGETHER * self.reports_a_second / self.rate
            due = [(self.reports + i) % self.count for i in range(int(self.due))]
            self.due -= len(due)
            self.reports += len(due)
            coming = [(i, self.report(i)) for i in due]
            begun = time.thread_time()
            for i, data in coming:
                self.take(i, data)
            between = time.thread_time()
            for _ in range(TOGETHER):
                self.now += 1 / self.rate
                self.pick()
            picks += time.thread_time() - between
            reports += between - begun
            sent += len(due)
        return picks / calls, reports / max(sent, 1)

    def end_answers(self) -> None:
        while self.answering and self.answering[0][0] <= self.now:
            _, name, i = self.answering.popleft()
            self.numbers[i] += 1
            self.finished[i].append(instant.finished(self.numbers[i], name))


def _hello(i: int) -> session_pb2.Hello:
    return instant.hello(i, 8000, prefill_token=1e-5, decode_sequence=1e-4)


def main(options: Any) -> None:
    sizes = [int(size) for size in options.instances.split(",")]
    worlds = {}
    for count in sizes:
        upper = options.upper or default_sizes(count)[1]
        worlds[count] = (upper, World(count, upper, options.policy, options.rate))
    found: dict[int, list[tuple[float, float]]] = {count: [] for count in sizes}
    for _ in range(options.rounds):
        for count, (_, world) in worlds.items():
            world.play(options.calls // 10)
            found[count].append(world.play(options.calls))
    base = statistics.median(pick for pick, _ in found[sizes[0]])
    rows = []
    for count in sizes:
        upper, world = worlds[count]
        pick = statistics.median(pick for pick, _ in found[count])
        rows.append(
            {
                "instances": count,
                "macro_instance_of": upper,
                "reports_a_second": world.reports_a_second,
                "pick_us": round(pick * 1e6, 1),
                "ratio": round(pick / base, 2),
                "report_us": round(statistics.median(r for _, r in found[count]) * 1e6, 1),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    if options.out:
        told = {"policy": options.policy, "rate": options.rate, "rows": rows}
        options.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", default="8,64,250,1000", help="of each cluster")
    parser.add_argument(
        "--upper", type=int, help="of a macro instance; else the usual for the size"
    )
    parser.add_argument("--policy", default="paced")
    parser.add_argument("--rate", type=float, default=500.0, help="calls a second")
    parser.add_argument("--calls", type=int, default=500, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    main(parser.parse_args())
