"""Every name and behaviour of vLLM that the worker leans on without vLLM promising it.

When this fails after an upgrade, the part of the worker named by the test is what to look at.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import vllm
from ecoserve_operator.api.worker import RESERVED as OPERATORS
from ecoserve_worker import vllm_plugin
from ecoserve_worker.engine import parse_engine_arguments
from ecoserve_worker.listen import StartError
from ecoserve_worker.options import parse
from ecoserve_worker.vllm_plugin import scheduler as plugin
from engines import Engine
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from ecoserve import engine_args
from ecoserve.local.options import RESERVED as LAUNCHERS

SOURCE = inspect.getsource(Scheduler.schedule)


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_release() -> None:
    assert vllm.__version__.startswith("0.32.")


def test_overrides_are_exactly_these() -> None:
    names = {n for n in vars(plugin._Mixin) if not n.startswith("__")}
    ours = {n for n in names if n.startswith("_eco_")}
    assert names - ours == {"schedule", "update_from_output", "finish_requests", "shutdown"}
    for base in (Scheduler, AsyncScheduler):
        assert not ours & set(dir(base))
        assert not [n for n in dir(base) if n.startswith("_eco")]


def test_signatures_of_what_is_overridden() -> None:
    schedule = inspect.signature(Scheduler.schedule).parameters
    assert list(schedule) == ["self", "throttle_prefills"]
    assert schedule["throttle_prefills"].default is False
    assert _parameters(Scheduler.update_from_output) == [
        "self",
        "scheduler_output",
        "model_runner_output",
    ]
    assert _parameters(Scheduler.finish_requests) == ["self", "request_ids", "finished_status"]
    assert _parameters(Scheduler.shutdown) == ["self"]
    assert AsyncScheduler.schedule is Scheduler.schedule
    assert AsyncScheduler.update_from_output is Scheduler.update_from_output


@pytest.mark.parametrize(
    "line",
    [
        # the levers
        "throttle_prefills and not self.prefill_capacity_bound",
        "any(not r.is_prefill_chunk for r in self.running)",
        "if defer_prefills and request.is_prefill_chunk:",
        "if self.current_step < request.next_decode_eligible_step:",
        "token_budget = self.max_num_scheduled_tokens",
        "while token_budget > 0:",
        "if num_running >= self.max_num_active_reqs:",
        # how many tokens a decode takes, and when it takes none
        "request.num_tokens_with_spec\n                + request.num_output_placeholders\n"
        "                - request.num_computed_tokens",
        "request.num_computed_tokens + 2 - request.num_output_placeholders",
        ">= request.num_prompt_tokens + request.max_tokens",
        # a preemption admits nothing in the same step
        "if not preempted_reqs and self._pause_state != PauseState.PAUSED_ALL:",
    ],
)
def test_schedule_works_as_the_levers_need(line: str) -> None:
    assert line in SOURCE


def test_step_counter_advances_before_it_is_compared() -> None:
    assert SOURCE.index("self.current_step += 1") < SOURCE.index("self.current_step < request")


def test_fields_of_what_passes_through() -> None:
    assert {
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "preempted_req_ids",
    } <= set(SchedulerOutput.__annotations__)
    assert {"req_id", "num_computed_tokens"} <= set(NewRequestData.__annotations__)
    assert {"req_ids", "resumed_req_ids", "num_computed_tokens"} <= set(
        CachedRequestData.__annotations__
    )
    assert {"request_id", "new_token_ids", "finish_reason"} <= set(
        EngineCoreOutput.__struct_fields__
    )
    assert "outputs" in EngineCoreOutputs.__struct_fields__
    assert {"UNPAUSED", "PAUSED_ALL"} <= set(PauseState.__members__)
    assert "FINISHED_ABORTED" in RequestStatus.__members__


def test_scheduler_class_is_chosen_by_path() -> None:
    from vllm.config import SchedulerConfig

    for path, kind in (
        (vllm_plugin.SCHEDULER, plugin.EcoScheduler),
        (vllm_plugin.ASYNC_SCHEDULER, plugin.EcoAsyncScheduler),
    ):
        config = SchedulerConfig.default_factory(scheduler_cls=path)
        assert config.get_scheduler_cls() is kind


@pytest.mark.engine
def test_attributes_of_a_live_scheduler(eco: Engine) -> None:
    scheduler = eco.scheduler
    for name in (
        "vllm_config",
        "scheduler_config",
        "kv_cache_config",
        "kv_cache_manager",
        "block_size",
        "current_step",
        "max_num_scheduled_tokens",
        "max_num_active_reqs",
        "prefill_capacity_bound",
        "running",
        "waiting",
        "kv_holding_waiting",
        "requests",
        "_pause_state",
    ):
        assert hasattr(scheduler, name), name
    assert scheduler.kv_cache_config.num_blocks > 0
    assert scheduler.scheduler_config.enable_chunked_prefill in (True, False)
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() > 0
    eco.use("paper")
    eco.add([1, 2, 3], 2)
    (request,) = scheduler.requests.values()
    assert isinstance(request, Request)
    for name in (
        "request_id",
        "arrival_time",
        "num_prompt_tokens",
        "num_tokens",
        "num_tokens_with_spec",
        "num_computed_tokens",
        "num_output_placeholders",
        "max_tokens",
        "is_prefill_chunk",
        "next_decode_eligible_step",
        "block_hashes",
    ):
        assert hasattr(request, name), name
    manager = scheduler.kv_cache_manager
    assert manager.prefix_cache_lookup_enabled(request)
    assert len(manager.coordinator.find_longest_cache_hit(request.block_hashes, 2)) == 3
    tokens: dict[str, list[int]] = {}
    while eco.llm.llm_engine.has_unfinished_requests():
        eco.step(tokens)


def test_front_end_names() -> None:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.launchers.launcher import NoSignalServer
    from vllm.entrypoints.serve.engine.serving import BaseServing
    from vllm.v1.engine.async_llm import AsyncLLM

    assert _parameters(build_app) == ["args", "supported_tasks", "model_config"]
    assert _parameters(init_app_state) == ["engine_client", "state", "args", "supported_tasks"]
    assert callable(make_arg_parser)
    assert callable(validate_parsed_serve_args)
    assert "config" in _parameters(NoSignalServer.__init__)
    assert isinstance(AsyncLLM.errored, property)
    assert "timeout" in _parameters(AsyncLLM.shutdown)
    assert "reset_prefix_cache" in dir(AsyncLLM)
    assert '"X-Request-Id"' in inspect.getsource(BaseServing._base_request_id)


def test_reserved_options_are_vllms() -> None:
    """All spellings of one option are reserved together, and no option that is free is taken for
    the abbreviation of a reserved one."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    actions = make_arg_parser(FlexibleArgumentParser(prog="test"))._actions
    reserved = {o for item in (*OPERATORS, *LAUNCHERS) for o in item.options}
    spellings = [set(action.option_strings) for action in actions]
    assert reserved <= set().union(*spellings)
    for names in spellings:
        taken = names & reserved
        assert taken in (set(), names), names
        for name in names - reserved:
            engine_args.check([name, f"{name}=x"], (*OPERATORS, *LAUNCHERS))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--port", "1"), "engine arguments[2]: --port must not be given here"),
        (("--scheduler_cls=x",), "engine arguments[2]: --scheduler-cls must not be given here"),
        (("-dp", "2"), "an instance is one engine; start more workers"),
        (("x",), "engine arguments: 'x' belongs to no option"),
        (('--additional-config={"ecoserve": {}}',), "--additional-config: ecoserve in it is"),
        (("--additional-config.ecoserve.policy", "paper"), "--additional-config: ecoserve in it"),
    ],
)
def test_arguments_that_the_worker_would_overrule_are_refused(
    arguments: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    given = ["--stand-alone", "--state-dir", str(tmp_path), "--", "--model", str(tmp_path)]
    assert parse_engine_arguments(parse(given)).model == str(tmp_path)
    with pytest.raises(StartError, match=re.escape(says)):
        parse_engine_arguments(parse([*given, *arguments]))


def test_a_failed_stream_ends_with_an_error_event_that_the_gate_knows() -> None:
    from vllm.entrypoints.openai.chat_completion import serving as chat
    from vllm.entrypoints.openai.completion import serving as completion

    for module in (chat, completion):
        source = inspect.getsource(module)
        failed = source.rindex("data = self.create_streaming_error_response(e)")
        assert source.index("data: [DONE]", failed) > failed


def test_what_the_continuation_of_a_stream_leans_on() -> None:
    from vllm.entrypoints.generate import api_router
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
    from vllm.parser.abstract_parser import DelegatingParser
    from vllm.tool_parsers.abstract_tool_parser import ToolParser
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer, check_stop_strings

    for handler in (OpenAIServingChat, OpenAIServingCompletion):
        source = inspect.getsource(handler.__init__)
        assert "self.default_sampling_params" in source
        assert "self.override_max_tokens" in source
        assert "return_token_ids" in inspect.getsource(handler)
    assert "self.parser_cls" in inspect.getsource(OpenAIServingChat.__init__)
    for state in ("state.openai_serving_chat =", "state.openai_serving_completion ="):
        assert state in inspect.getsource(api_router)
    assert DelegatingParser.reasoning_parser_cls is None
    assert DelegatingParser.tool_parser_cls is None
    assert "parse_delta" in vars(DelegatingParser)
    assert ToolParser.engine_based_streaming is False
    # A call without tools: text as it is, and nothing for tokens that have none.
    source = inspect.getsource(DelegatingParser._extract_tool_calls_streaming)
    assert "return (DeltaMessage(content=delta_text) if delta_text else None), False" in source
    assert _parameters(get_max_tokens)[1:5] == [
        "max_tokens",
        "input_length",
        "default_sampling_params",
        "override_max_tokens",
    ]
    assert _parameters(IncrementalDetokenizer.from_new_request) == ["tokenizer", "request"]
    # The stop string that is complete first counts, and then its place in the list.
    assert check_stop_strings("xabc", 4, ["bc", "ab", "xab"], False) == ("ab", 1)


def test_start_method_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs
    from vllm.utils.system_utils import get_mp_context

    envs.disable_envs_cache()  # an engine in this process has turned it on
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    assert get_mp_context().get_start_method() == "fork"
