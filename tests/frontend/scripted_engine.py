"""A tiny engine process that speaks the real protocol and acts by script, with no model.

Run as `scripted_engine.py MODEL_PATH SOCKET_DIR CONFIG_JSON`. The first prompt token says what to
do (the constants below); any other prompt is echoed. Knows nothing of text or tensors.
"""

import os
import signal
import sys
import time

import msgspec
import zmq

from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.messages import (
    Abort,
    AddRequest,
    Failed,
    FlushCache,
    Fork,
    GetStats,
    KVUsage,
    LogprobEntry,
    MessageError,
    Outputs,
    Ready,
    Release,
    Shutdown,
    Starting,
    StatsReply,
    Stop,
    TokenOutput,
    Usage,
    decode_for_engine,
    encode,
)

VOCAB_SIZE = 1000
MAX_MODEL_LEN = 512
EOS = 0

REFUSE = 901  # error output
STALL = 902  # no output until aborted
EXIT = 903  # one output, last words on stderr, exit code 7
KILL = 904  # one output, then SIGKILL
GARBAGE = 905  # bytes that are no message and outputs for no sample, then echo
SLOW = 906  # repeats the rest of the prompt, a token every few ms, until stopped or aborted
FAIL = 907  # Failed message, then exit
LAST_WORDS = 908  # echo and exit in the same breath
STUBBORN = 909  # from now on: ignores Shutdown

STEP_S = 0.002


class Sample:
    """One sample that repeats its script."""

    def __init__(self, request: AddRequest, sample_index: int) -> None:
        opcode = request.token_ids[0]
        self.request = request
        self.sample_index = sample_index
        self.is_endless = opcode == SLOW
        self.script = request.token_ids[1:] if opcode > 900 else request.token_ids
        self.num_sent = 0

    def next_output(self) -> TokenOutput:
        """One more token; the last one says why it ended: the script, or max_tokens."""
        if self.num_sent >= len(self.script) and not self.is_endless:
            return self.output([EOS], finish_reason="stop", stop_token_id=EOS)
        token_id = self.script[self.num_sent % len(self.script)]
        at_limit = self.num_sent + 1 >= self.request.sampling.max_tokens
        return self.output([token_id], finish_reason="length" if at_limit else None)

    def output(self, token_ids: list[int], **fields: object) -> TokenOutput:
        is_first = self.num_sent == 0
        self.num_sent += len(token_ids)
        num_prompt_tokens = len(self.request.token_ids)
        sampling = self.request.sampling
        entries = [LogprobEntry(token_id, -0.5, 1, [(token_id, -0.5)]) for token_id in token_ids]
        prompt_entries = [None, *[LogprobEntry(1, -1.0, 2, [])] * (num_prompt_tokens - 1)]
        wants_prompt = sampling.prompt_logprobs is not None and is_first and not self.sample_index
        return TokenOutput(
            request_id=self.request.request_id,
            sample_index=self.sample_index,
            token_ids=token_ids,
            logprobs=entries if sampling.logprobs is not None else None,
            prompt_logprobs=prompt_entries if wants_prompt else None,
            usage=Usage(prompt_tokens=num_prompt_tokens, completion_tokens=self.num_sent),
            kv=KVUsage(logical_len=num_prompt_tokens + self.num_sent),
            **fields,  # type: ignore[arg-type]
        )


class ScriptedEngine:
    """The loop: receive, one token for each running sample, send."""

    def __init__(self, socket_dir: str) -> None:
        context = zmq.Context()
        self.inbox = context.socket(zmq.PULL)
        self.outbox = context.socket(zmq.PUSH)
        self.outbox.setsockopt(zmq.LINGER, 1000)  # nobody may be left to read the rest
        self.inbox.connect(f"ipc://{socket_dir}/to_engine")
        self.outbox.connect(f"ipc://{socket_dir}/to_client")
        self.parent = os.getppid()
        self.running: dict[tuple[str, int], Sample] = {}
        self.stats: dict[str, int | float | str] = {}
        self.is_stubborn = False
        self.is_over = False

    def send(self, message: object) -> None:
        self.outbox.send(encode(message))  # type: ignore[arg-type]

    def run(self) -> None:
        while not self.is_over and os.getppid() == self.parent:
            while self.inbox.poll(0 if self.running else 50):
                self.receive(self.inbox.recv())
            outputs = [self.advance(sample) for sample in list(self.running.values())]
            if outputs:
                self.send(Outputs(items=outputs))
                time.sleep(STEP_S)

    def receive(self, data: bytes) -> None:
        try:
            message = decode_for_engine(data)
        except MessageError:
            return self.count("malformed")
        self.count(type(message).__name__)
        match message:
            case AddRequest():
                self.add(message)
            case Fork(parent_id=parent_id, children=children):
                self.stats["last_parent"] = parent_id
                for child in children:
                    self.add(child)
            case Stop():
                self.stats["last_stop_tokens"] = message.num_output_tokens
                sample = self.running.pop((message.request_id, message.sample_index), None)
                if sample is not None:
                    sample.num_sent = message.num_output_tokens
                    self.send(Outputs(items=[sample.output([], finish_reason="stop")]))
            case Abort(request_ids=request_ids, group_ids=group_ids):
                for key, sample in list(self.running.items()):
                    if key[0] in request_ids or sample.request.group_id in group_ids:
                        del self.running[key]
                        self.send(Outputs(items=[sample.output([], finish_reason="abort")]))
            case Release(request_ids=request_ids):
                self.stats["last_released"] = ",".join(request_ids)
            case GetStats(call_id=call_id) | FlushCache(call_id=call_id):
                self.stats["running"] = len(self.running)
                self.send(StatsReply(call_id=call_id, stats=self.stats))
            case Shutdown():
                self.is_over = not self.is_stubborn

    def count(self, name: str) -> None:
        self.stats[name] = int(self.stats.get(name, 0)) + 1

    def add(self, request: AddRequest) -> None:
        samples = [Sample(request, index) for index in range(request.sampling.n)]
        opcode = request.token_ids[0]
        if opcode == REFUSE:
            return self.refuse(samples)
        if opcode == STALL:
            return None
        if opcode in (EXIT, KILL):
            self.send(Outputs(items=[self.advance(samples[0])]))
            return self.end_badly(opcode)
        if opcode == FAIL:
            self.send(Failed(error="out of memory; lower num_blocks"))
            self.is_over = True
        if opcode == GARBAGE:
            self.outbox.send(b"\xc1 no message")
            self.outbox.send(encode(Outputs(items=[]))[:-1])
            self.send(Outputs(items=[samples[0].output([], error="x")] * 0))
            self.send(Outputs(items=[Sample(request, 99).next_output()]))
        if opcode == LAST_WORDS:
            self.send(Outputs(items=[samples[0].output([5], finish_reason="length")]))
            self.is_over = True
        self.is_stubborn |= opcode == STUBBORN
        self.running.update({(request.request_id, s.sample_index): s for s in samples})

    def refuse(self, samples: list[Sample]) -> None:
        """As the engine does: what was not taken in has used nothing."""
        items = [
            TokenOutput(
                request_id=sample.request.request_id,
                sample_index=sample.sample_index,
                error="refused: pool",
            )
            for sample in samples
        ]
        self.send(Outputs(items=items))

    def end_badly(self, opcode: int) -> None:
        time.sleep(0.1)  # let the first output through
        if opcode == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        print("RuntimeError: the card fell out", file=sys.stderr, flush=True)
        os._exit(7)

    def advance(self, sample: Sample) -> TokenOutput:
        output = sample.next_output()
        if output.is_final:
            self.running.pop((output.request_id, output.sample_index), None)
        return output


def main() -> None:
    model_path, socket_dir, config_json = sys.argv[1:]
    config = msgspec.json.decode(config_json, type=EngineConfig)
    engine = ScriptedEngine(socket_dir)
    if config.model.model == "crashes":
        print("Segmentation fault in weights", file=sys.stderr, flush=True)
        os._exit(3)
    if config.model.model == "fails":
        engine.send(Failed(error="model 'fails' is not known; try smollm2-135m"))
        return
    if config.model.model == "silent":
        time.sleep(60)
    ready = Ready(
        model=config.model.model,
        model_path=model_path,
        architecture="Scripted",
        backend="cpu",
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[EOS],
        num_blocks=64,
        block_size=16,
    )
    engine.send(Starting(stage="loading weights", done=1, total=2))
    engine.send(ready)
    engine.run()


if __name__ == "__main__":
    main()
