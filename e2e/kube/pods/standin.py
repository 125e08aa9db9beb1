"""A worker without an engine: the worker's own process around an app that streams words in time.

It runs as ``python -c`` in a Pod of the operator's image, in place of the worker's command.
"""

import asyncio
import json
import signal
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import uvicorn
import uvloop
from ecoserve_worker import metrics
from ecoserve_worker.gate import Gate
from ecoserve_worker.listen import bind
from ecoserve_worker.messages import DecodeState, FromEngine, SequenceDone, State
from ecoserve_worker.options import parse
from ecoserve_worker.server import Worker
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from ecoserve.policy.latency import LatencyModel

TOKEN_S = 0.05
KV_TOKENS = 100_000


class StandIn(Worker):
    """The worker, where vLLM is concerned."""

    def start_engine(self, errors):
        limits = Namespace(cache_config=Namespace(num_gpu_blocks=KV_TOKENS // 16, block_size=16))
        limits.scheduler_config = Namespace(
            max_num_seqs=64, max_num_scheduled_tokens=2048, max_num_batched_tokens=2048
        )
        limits.model_config = Namespace(max_model_len=8192)
        self.engine = SimpleNamespace(errored=False, vllm_config=limits)
        self.answers = {}

    def stop_engine(self):
        self.channel.close()

    async def _calibrated(self):
        return LatencyModel(0.01, 0.0001, 0.0, TOKEN_S, 0.001, 0.0)

    async def _server(self):
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/metrics", lambda _: PlainTextResponse(generate_latest())),
            ]
        )
        self.tell()
        metrics.register(self.ledger)
        self.gate = Gate(self.app, self.ledger)
        return self._http_server(self.gate)

    def _http_server(self, app, lifespan="auto", **more):
        config = uvicorn.Config(app, access_log=False, lifespan=lifespan, **more)
        config.load()
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None
        server.capture_signals = _no_signals
        return server

    async def chat(self, request):
        body = await request.json()
        tokens = int(body.get("max_tokens", 16))
        words = self.words(request.headers["x-request-id"], tokens)
        if body.get("stream"):
            return StreamingResponse(events(words), media_type="text/event-stream")
        text = "".join([word async for word in words])
        message = {"role": "assistant", "content": text}
        return JSONResponse({"choices": [{"message": message, "finish_reason": "length"}]})

    async def words(self, id, tokens):
        began = first = time.monotonic()
        self.answers[id] = 0
        self.tell()
        try:
            for number in range(tokens):
                await asyncio.sleep(TOKEN_S)
                if not number:
                    first = time.monotonic()
                self.answers[id] = number + 1
                yield f"{number} "
        finally:
            made = self.answers.pop(id)
            slo = (self.ledger.slo.ttft, self.ledger.slo.tpot)
            self.tell(SequenceDone(id, 10, 0, made, first - began, TOKEN_S, *slo, made < tokens))

    def tell(self, *done):
        """As the engine's scheduler tells the front end what it does."""
        tpot = self.ledger.slo.tpot
        running = [DecodeState(i, 10 + n, n, 1.0, tpot, False) for i, n in self.answers.items()]
        use = min(1.0, len(running) / 64)
        state = State(
            time.monotonic(),
            "prefill",
            0.0,
            [],
            running,
            KV_TOKENS,
            use,
            use,
            "",
            0.0,
            64,
            *[0] * 3,
        )
        self.ledger.received(FromEngine(state, done=list(done)))


async def events(words):
    async for word in words:
        yield f"data: {json.dumps({'choices': [{'delta': {'content': word}}]})}\n\n"
    yield "data: [DONE]\n\n"


class _no_signals:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def interrupted(*_):
    raise KeyboardInterrupt


def main():
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, interrupted)
    with tempfile.TemporaryDirectory() as folder:
        worker = StandIn(options, Namespace(served_model_name=["m"], model="m"), Path(folder))
        worker.start_engine(None)
        try:
            sockets = bind(options.host, options.port), bind(options.host, options.health_port)
            return uvloop.run(worker.run(*sockets))
        finally:
            worker.stop_engine()


sys.exit(main())
