"""Runs one state's gens and selects: the request, what is shown of it, and where it is written.

Knows nothing of queues, branches or roles.
"""

from typing import cast

from zipage_lang.backend import Backend
from zipage_lang.calls import Endpoint, Publish, generate, ignore, score_choices, with_turn_end
from zipage_lang.choices import ScoreResult
from zipage_lang.door import StateDoor
from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.ir import Score
from zipage_lang.kv_report import KVReport, report_of
from zipage_lang.plan import GenCall, SelectCall
from zipage_lang.replies import fill_variables, read_output
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.state_text import StateText
from zipage_lang.stream import Delta, DeltaLog
from zipage_lang.trace_events import CallKind
from zipage_lang.trace_node import NodeTrace


class CallRunner:
    """Runs calls that go on from one state's text, one at a time. Used on the loop only."""

    def __init__(self, door: StateDoor, text: StateText, group_id: str) -> None:
        self.deltas = DeltaLog()
        self.kv_report = KVReport()  # of all calls since the root or the fork
        self._door = door
        self._text = text
        self._endpoint = Endpoint(cast("Backend", door), group_id)

    async def run(self, call: GenCall | SelectCall, trace: NodeTrace | None) -> None:
        """Fill the call's variables. Where a budget ends the call early, with what there is."""
        if not self._may_begin(call):
            _trace_stop(trace, call, self._door)
        elif isinstance(call, SelectCall):
            await self._run_select(call, trace)
        else:
            self._door.has_stopped_call = False
            await self._run_gen(call, trace)
            if self._door.has_stopped_call:
                _trace_stop(trace, call, self._door)

    def _may_begin(self, call: GenCall | SelectCall) -> bool:
        """Whether a budget is left for the call; where none is, it ends here with nothing."""
        self._door.is_generating = isinstance(call, GenCall)
        account = self._door.account
        if account is None or account.take_call():
            return True
        sampling = call.sampling if isinstance(call, GenCall) else SamplingParams()
        _fill_with_nothing(call, self._door.refused(account.reason or "calls", sampling))
        return False

    async def _run_gen(self, call: GenCall, trace: NodeTrace | None) -> None:
        prompt = self._text.prompt()
        sampling = with_turn_end(self._endpoint.backend, call.sampling, self._text.turn_end)
        if trace is not None:
            trace.start_gen(call, len(prompt))
        outputs = await generate(
            self._endpoint,
            prompt,
            sampling,
            self._text.protecting(call.kv),
            lambda output, num_new: self._publish(call, output, num_new, trace),
            call.node.stop_pattern,
        )
        if trace is not None:
            trace.end_call(call)
        self.kv_report = self.kv_report.and_then(report_of([output.kv for output in outputs]))
        is_watched = sampling.think is not None
        readings = [read_output(call.node, output, is_watched=is_watched) for output in outputs]
        self._text.add_generated(outputs[0], sampling, readings[0].text, call.node.thoughts)
        fill_variables(call, readings, outputs)

    def _publish(
        self, call: GenCall, output: RequestOutput, num_new_tokens: int, trace: NodeTrace | None
    ) -> None:
        if trace is not None:
            trace.saw(call, output)
        delta = Delta(
            name=call.node.name,
            text=output.text_delta,
            num_tokens=num_new_tokens,
            call_index=call.variable.call_index,
            sample_index=output.sample_index,
        )
        self.deltas.publish(delta)

    async def _run_select(self, call: SelectCall, trace: NodeTrace | None) -> None:
        prompt, kv = self._text.prompt(), self._text.protecting(call.kv)
        if trace is not None:
            kind: CallKind = "score" if isinstance(call.node, Score) else "select"
            trace.start_select(call, len(prompt), kind)
        watch = _watch(trace, call)
        scored = await score_choices(self._endpoint, prompt, call.node, kv, watch)
        if trace is not None:
            trace.end_call(call, scored)
        self.kv_report = self.kv_report.and_then(report_of([scored.kv]))
        if isinstance(call.node, Score):
            call.variable.fill(scored, scored)
        else:
            self._go_on_from_choice(call, scored)

    def _go_on_from_choice(self, call: SelectCall, scored: ScoreResult) -> None:
        variable, token_ids = call.variable, scored.token_ids[scored.index]
        self._text.add_chosen(token_ids, scored.choice)
        delta = Delta(variable.name, scored.choice, len(token_ids), variable.call_index)
        self.deltas.publish(delta)
        variable.fill(scored.choice, scored)


def _watch(trace: NodeTrace | None, call: SelectCall) -> Publish:
    """What sees the outputs of scored choices: the trace, or nobody."""
    if trace is None:
        return ignore
    return lambda output, num_new_tokens: trace.saw(call, output)


def _trace_stop(trace: NodeTrace | None, call: GenCall | SelectCall, door: StateDoor) -> None:
    """A budget ended the call, or kept it from beginning."""
    if trace is not None:
        trace.emit("budget", reason=door.stop_reason, call=call.variable.call_index)


def _fill_with_nothing(call: GenCall | SelectCall, outputs: list[RequestOutput]) -> None:
    """What a call leaves that could not begin: no text, or None where the value is no text."""
    is_text = isinstance(call, GenCall) and call.node.type is None
    nothing = "" if is_text else None
    is_one = len(outputs) == 1
    for variable in call.variables:
        values = [nothing] * len(outputs)
        variable.fill(values[0] if is_one else values, outputs[0] if is_one else outputs)
