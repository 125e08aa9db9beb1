"""The HTTP headers by which picker, gateway and worker tell each other about a request.

Those in ``INTERNAL`` are ours alone: the gateway removes them from what a client sends, and the
picker sets them. The SLO headers may come from the client. Values are plain text, times seconds.
"""

from __future__ import annotations

REQUEST_ID = "x-ecoserve-request-id"
WAITED = "x-ecoserve-waited"  # seconds that the request has waited at the picker
TTFT_SLO = "x-ecoserve-ttft-slo"
TPOT_SLO = "x-ecoserve-tpot-slo"
CONVERSATION = "x-ecoserve-conversation"  # client's own key of a conversation

PRIORITY = "x-vllm-priority"  # vLLM's own: a whole number, the lower the sooner; before the body's

# The endpoint-picker protocol of the Gateway API Inference Extension.
TENANT = "x-gateway-inference-fairness-id"  # whose share of the capacity a call counts to
DESTINATION = "x-gateway-destination-endpoint"
DESTINATION_SUBSET = "x-gateway-destination-endpoint-subset"
METADATA_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"

# On a response: the worker did not begin this request and another one may (drain, dead engine).
RETRYABLE = "x-ecoserve-retryable"

# Streams that ask for the relay (`on`) are continued when their worker dies. On the response: `on`,
# or `off; ` and what stands against it.
RELAY = "x-ecoserve-relay"
# On a worker's stream that the relay can continue: what bounds its length
# (``ecoserve.relay.messages.Limits``).
LIMITS = "x-ecoserve-limits"

INTERNAL = (REQUEST_ID, WAITED, DESTINATION, DESTINATION_SUBSET, TENANT)

# What the picker sets, and what it reads.
PICKED = (DESTINATION, REQUEST_ID, WAITED, TTFT_SLO, TPOT_SLO)
# Attributes by which a gateway that sends no headers tells them, and the headers that they are.
ATTRIBUTES = {
    "request.url_path": ":path",
    **{
        f"request.headers['{name}']": name
        for name in (TTFT_SLO, TPOT_SLO, CONVERSATION, TENANT, PRIORITY)
    },
}

# The form of an id. Engines decorate it ("chatcmpl-<id>-3f2a", "0_cmpl-<id>-0"); the pattern finds
# it again.
REQUEST_ID_PATTERN = r"eco-[0-9a-f]{16}"
