"""The constraint check before admission: TTFT, saved TPOT, KV memory.

``algorithm1`` is the published check. ``promises`` is ours; what it decides where the published one
is silent: time already spent waiting and the residue of the step under way count towards TTFT;
KV need includes the expected output; an instance with no decodes has no TPOT to break; the
least-ahead decode is protected, not the mean (the mean lets young decodes be ruined); the view it
is given is aged, with everything routed since the last report laid over it.
"""

from __future__ import annotations

import math

from ecoserve.policy.base import ADMITTED, Verdict
from ecoserve.policy.state import InstanceView, Request


def algorithm1(request: Request, instance: InstanceView) -> Verdict:
    """The check of the EcoServe paper's Algorithm 1, verbatim.

    Prefill time of what arrived since the last switch, the request included, against the TTFT SLO
    and against the mean saved TPOT of what arrived before; the request's KV against free memory.
    What it leaves open is taken literally: waiting before admission does not count, an empty
    decode set passes, KV need is the prompt's.
    """
    total = instance.backlog_since_switch + instance.prefill_seconds(request)
    if total > request.slo.ttft:
        return Verdict(False, "ttft")
    if instance.settled_slack < total:
        return Verdict(False, "tpot")
    if request.uncached(instance.name) > instance.free_kv:
        return Verdict(False, "kv")
    return ADMITTED


def fits(request: Request, instance: InstanceView) -> Verdict:
    """KV memory and batch room: what no policy can go without."""
    if request.kv_tokens(instance.name) > instance.free_kv:
        return Verdict(False, "kv")
    if request.sequences > instance.room:
        return Verdict(False, "batch")
    return ADMITTED


def meets_ttft(request: Request, instance: InstanceView, now: float) -> Verdict:
    """Whether the first token comes by the deadline, time already waited included.

    Before it are what is left of the step under way, then the instance's pending prefills and its
    own. An instance that warms up offers only its ``weight``.
    """
    work = instance.backlog + instance.prefill_seconds(request)
    if now + instance.residue + work / instance.weight > request.deadline:
        return Verdict(False, "ttft")
    return ADMITTED


def promises(request: Request, instance: InstanceView, now: float) -> Verdict:
    """TTFT with the wait so far, TPOT against the least saved, KV and batch room."""
    room = fits(request, instance)
    if not room.admitted:
        return room
    first_token = meets_ttft(request, instance, now)
    if not first_token.admitted:
        return first_token
    if instance.decodes.least_slack < instance.backlog + instance.prefill_seconds(request):
        return Verdict(False, "tpot")
    return ADMITTED


def decode_share(instance: InstanceView, tpot: float) -> float:
    """Share of the instance's time that its decodes need to keep their pace, 0 to 1 and above."""
    decodes = instance.decodes
    if not decodes.count:
        return 0.0
    return instance.latency.decode(decodes.count, decodes.context) / min(decodes.tpot, tpot)


def sustained(request: Request, instance: InstanceView, now: float, window: float) -> Verdict:
    """The check for engines that pace their prefills by the slack of their decodes.

    Such an engine never spends on prompts what its decodes need, so TPOT is safe as long as decode
    alone keeps pace with the request added. Prefill gets the slack saved up so far and the share
    of time that decode leaves: t seconds from now, slack + t (1 - decode share), in windows of
    ``window`` seconds that each pay a step's fixed cost and wait for a decode step to end. TTFT is
    checked against that.
    """
    room = fits(request, instance)
    if not room.admitted:
        return room
    decodes, latency = instance.decodes, instance.latency
    tpot = min(decodes.tpot, request.slo.tpot)
    grown = latency.decode(
        decodes.count + request.sequences, decodes.context + request.prompt_tokens
    )
    if decodes.count and grown > tpot:
        return Verdict(False, "tpot")
    work = instance.backlog + instance.prefill_seconds(request)
    wait = work
    if decodes.count:
        saved = min(max(decodes.least_slack, 0.0), work)
        windows = math.ceil((work - saved) / window)
        spare = max(1 - decode_share(instance, tpot), 1e-3)
        paced = (work - saved + windows * latency.prefill_fixed) / spare
        wait = saved + paced + window + latency.decode(decodes.count, decodes.context)
    if now + instance.residue + wait / instance.weight > request.deadline:
        return Verdict(False, "ttft")
    return ADMITTED
