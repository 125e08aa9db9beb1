"""Our simulator beside two independent ones: simdistserve (of DistServe) and Vidur.

The same requests at the same times, the same step times, the same SLOs and the same judge: what is
compared is scheduling and queueing. Step times are either simdistserve's own profile, put into our
simulator, or our cost model, put into theirs (all of theirs are then asked through `StepCost`).
For each case the goodput is searched in both, by bisection over several seeds, and at shares of
ours the percentiles of TTFT and TPOT are set side by side.

    git clone https://github.com/LLMServe/DistServe OTHERS/DistServe
    git clone https://github.com/microsoft/vidur OTHERS/vidur
    python3.11 -m venv OTHERS/venv
    OTHERS/venv/bin/pip install simpy pandas scikit-learn ddsketch plotly_express matplotlib \\
        seaborn wandb fasteners
    PYTHONPATH=. OTHERS/venv/bin/python bench/outside.py OTHERS --out FILE
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from outside_players import Simdistserve, Times, Vidur

from ecoserve.bench.search import Bisection
from ecoserve.policy.state import SLO
from ecoserve.sim import hardware, models
from ecoserve.sim.cost import CostModel
from ecoserve.sim.engine import simulate
from ecoserve.sim.records import Arrival, Cluster, Options, StepCost, Wire
from ecoserve.sim.systems import VLLM, DistServe, Sarathi, System
from ecoserve.sim.workload import DATASETS

TARGET = 0.9
SHARES = (0.5, 0.8, 0.95)
PERCENTS = (50, 90, 99)
# Neither of the others charges for KV on its way.
AT_ONCE = Wire(1e30, 1.0, 0.0)
UNLIMITED = 10**9
# Tokens of a request, prompt and answer: neither of the others takes a prompt above its budget.
LONGEST = 2048


@dataclass(frozen=True, slots=True)
class Case:
    """A system that both can express. ``ours`` and ``theirs`` play arrivals, in order of time;
    ``known`` is what else is alike."""

    name: str
    against: str
    ours: Callable[[Sequence[Arrival]], Times]
    theirs: Callable[[Sequence[Arrival]], Times]
    slo: SLO
    instances: int
    guess: float
    known: str


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """Step times of a cost model, with room for so many tokens of KV."""

    cost: StepCost
    kv_tokens: int
    stages: int = 1
    kv_bytes: float = 0.0

    def step(self, tokens: int, pairs: float, batch: int, context: int) -> float:
        return self.cost.step(tokens, pairs, batch, context)

    def handoff(self, tokens: int) -> float:
        return 0.0


def own(system: System, cost: StepCost, instances: int, slo: SLO, most: int) -> Any:
    """Plays arrivals in our simulator; a batch holds ``most`` requests."""
    cluster = Cluster(cost, instances, pcie=AT_ONCE)

    def play(arrivals: Sequence[Arrival]) -> Times:
        result = simulate(system, cluster, arrivals, slo, Options(max_num_seqs=most))
        return np.array([(o.ttft, o.tpot) for o in result.outcomes])

    return play


def cases() -> list[Case]:
    """What is compared; see docs/performance.md for what differs, known beforehand."""
    opt = Simdistserve.profile("facebook/opt-13b", "vllm")
    opt_distserve = Simdistserve.profile("facebook/opt-13b", "distserve")
    l20 = hardware.gpu("L20")
    llama = CostModel(models.model("Llama-30B"), l20, tp=4)
    codellama = CostModel(models.model("CodeLlama-34B"), l20, tp=4)
    interactive, usual = SLO(0.2, 0.1), SLO(5.0, 0.1)
    found = []

    def against_simdistserve(
        name: str, ours: System, sim: Simdistserve, cost: StepCost, slo: SLO, guess: float
    ) -> None:
        instances = sim.prefill + sim.decode
        play = own(ours, OwnMemory(cost, UNLIMITED), instances, slo, UNLIMITED)
        known = "no KV limit in either; KV moves in no time"
        if not sim.capped:
            known += "; simdistserve without its cap on the context of a decode step"
            name += ", no cap"
        found.append(Case(name, "simdistserve", play, sim.play, slo, instances, guess, known))

    whole = 66144  # tokens of a prefill step, as simdistserve has them for this model and GPU
    against_simdistserve(
        "vLLM, OPT-13B on an A100, their profile",
        VLLM(budget=whole),
        Simdistserve(1, 0, whole),
        opt,
        interactive,
        3.0,
    )
    against_simdistserve(
        "vLLM, Llama-30B on L20 TP4, our profile",
        VLLM(),
        Simdistserve(1, 0, 2048, llama),
        llama,
        usual,
        2.0,
    )
    for capped in (True, False):
        against_simdistserve(
            "DistServe 1:1, OPT-13B on two A100, their profile",
            DistServe(1, budget=whole),
            Simdistserve(1, 1, whole, capped=capped),
            opt_distserve,
            interactive,
            8.0,
        )
        against_simdistserve(
            "DistServe 1:1, CodeLlama-34B on L20 TP4, our profile",
            DistServe(1),
            Simdistserve(1, 1, 2048, codellama, capped),
            codellama,
            usual,
            7.0,
        )
    scarce = OwnMemory(llama, 20_000)
    for system, setting, instances, cost, name, guess in (
        (VLLM("round-robin"), ("vllm", 2048), 1, llama, "Llama-30B", 2.0),
        (Sarathi(512, "round-robin"), ("sarathi", 512), 1, llama, "Llama-30B", 2.0),
        (Sarathi(512, "round-robin"), ("sarathi", 512), 1, scarce, "Llama-30B, scarce KV", 1.5),
        (Sarathi(256, "round-robin"), ("sarathi", 256), 4, llama, "Llama-30B", 8.0),
        (Sarathi(512, "round-robin"), ("sarathi", 512), 1, codellama, "CodeLlama-34B", 2.5),
    ):
        play = own(system, OwnMemory(cost, cost.kv_tokens), instances, usual, 256)
        vidur = Vidur(*setting, instances, cost)
        label = f"{system.name}, {name} on L20 TP4, our profile"
        if instances > 1:
            label = f"{label}, {instances} instances, round-robin"
        known = "the same KV blocks, watermark and batch limit in both"
        found.append(Case(label, "vidur", play, vidur.play, usual, instances, guess, known))
    return found


def workload(rate: float, count: int, seed: int) -> list[Arrival]:
    """ShareGPT requests of at most ``LONGEST`` tokens; the next ones take longer ones' place."""
    pool = DATASETS["sharegpt"].arrivals(rate, 2 * count, seed)
    fitting = [a for a in pool if a.prompt + a.output <= LONGEST]
    return [Arrival(t.at, a.prompt, a.output) for t, a in zip(pool[:count], fitting, strict=False)]


def measured(times: Times) -> Times:
    """Without the first fifth."""
    return times[len(times) // 5 :]


def attainment(times: Times, slo: SLO) -> float:
    """Share of the measured requests that kept both SLOs."""
    ttft, tpot = measured(times).T
    return float(np.mean((ttft <= slo.ttft) & (tpot <= slo.tpot)))


def goodput(play: Callable[[Sequence[Arrival]], Times], case: Case, seed: int, o: Any) -> float:
    search = Bisection(case.guess, precision=o.precision, most=40)
    while (rate := search.next) is not None:
        times = play(workload(rate, o.requests * case.instances, seed))
        search.tell(rate, attainment(times, case.slo) >= TARGET)
    return search.low


def figures(times: Times, slo: SLO) -> dict[str, float]:
    ttft, tpot = np.percentile(measured(times), PERCENTS, axis=0).T
    return {
        "attainment": attainment(times, slo),
        **{f"ttft_p{p}_s": float(v) for p, v in zip(PERCENTS, ttft, strict=True)},
        **{f"tpot_p{p}_s": float(v) for p, v in zip(PERCENTS, tpot, strict=True)},
    }


def compare(case: Case, o: Any) -> dict[str, Any]:
    began = time.perf_counter()
    seeds = range(1, o.seeds + 1)
    rates = {
        "ours": [goodput(case.ours, case, seed, o) for seed in seeds],
        "theirs": [goodput(case.theirs, case, seed, o) for seed in seeds],
    }
    middle = {who: mean(found) for who, found in rates.items()}
    rows: list[dict[str, Any]] = []
    for share in SHARES:
        rate = share * middle["ours"]
        arrivals = workload(rate, o.requests * case.instances, 1)
        both = {
            "ours": figures(case.ours(arrivals), case.slo),
            "theirs": figures(case.theirs(arrivals), case.slo),
        }
        ratio = {k: v / both["theirs"][k] for k, v in both["ours"].items() if both["theirs"][k]}
        rows.append({"share": share, "rate": rate, **both, "ratio": ratio})
    result = {
        "case": case.name,
        "against": case.against,
        "slo": {"ttft_s": case.slo.ttft, "tpot_s": case.slo.tpot, "attainment": TARGET},
        "known": case.known,
        "goodput": rates,
        "goodput_mean": middle,
        "ratio": middle["ours"] / middle["theirs"],
        "at": rows,
    }
    worst = max(abs(r - 1) for row in rows for r in row["ratio"].values())
    print(
        f"{case.name} against {case.against}: {middle['ours']:.3f} / {middle['theirs']:.3f} = "
        f"{result['ratio']:.3f}; percentiles within {worst:.1%}"
        f" ({time.perf_counter() - began:.0f} s)",
        flush=True,
    )
    return result


def commit(checkout: Path) -> str:
    command = ("git", "-C", str(checkout), "rev-parse", "HEAD")
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("others", type=Path, help="where DistServe and vidur are checked out")
    parser.add_argument("--only", default="", help="cases whose name or simulator holds this")
    parser.add_argument("--requests", type=int, default=2000, help="of a run, an instance")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--precision", type=float, default=0.01, help="of the searches")
    parser.add_argument("--out", type=Path)
    o = parser.parse_args()
    sys.path += [str(o.others / name) for name in ("DistServe", "vidur")]
    rows: list[dict[str, Any]] = []
    for case in cases():
        if o.only not in case.name and o.only not in case.against:
            continue
        rows.append(compare(case, o))
        if o.out:
            of = {name: commit(o.others / name) for name in ("DistServe", "vidur")}
            of |= {name: version(name) for name in ("simpy", "numpy")}
            result = {"versions": of, "requests": o.requests, "seeds": o.seeds, "cases": rows}
            o.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
