"""StepPlan and StepResult: the only words between deciding (ints) and doing (tensors).

Frozen, plain, comparable with ==, and replayable from a file (`encode_plan`, `decode_plan`).
Knows nothing of requests, trees, tensors or models.

A *row* is the place a running request holds in the model runner: its block table, its sampling
settings and its last drawn token live there between steps, so that a plan says only what changed.

The runner carries a plan out in this order:
  1. swap_outs (whole blocks, all layers, K, V and slot state), 2. block_copies (all sources are
  read before any target is written), 3. row_setups, 4. block_updates,
  5. chunks: forward pass, then sampling; compactions (score, select, fill holes) beside it, in any
  order or at once: they touch no block that a chunk of the same plan touches,
  6. swap_ins: nothing else of the same plan touches their blocks. What comes back is read from the
  next plan on, so its way over the bus lies beside a step.
A block given up by one request may be another's in the same plan; in this order that is safe.
Where memory is refused the runner does the work in smaller parts, and says in a `StepTrouble` which
rows it could not serve at all.
"""

import dataclasses

import msgspec

from zipage_lang.runtime.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class RowSetup:
    """A request takes a row: at admission, after a preemption, at a swap-in, or as a branch."""

    row: int
    token_ids: tuple[int, ...]  # all logical tokens known so far: prompt, then generated
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int  # of this row's own random stream; already differs between the samples of one request


@dataclasses.dataclass(frozen=True, slots=True)
class BlockUpdate:
    """Row's block table from index `first` on becomes `block_ids`; what lay behind is void."""

    row: int
    first: int
    block_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one whole block (all layers, K, V and slot state) before anything writes to `dst`."""

    src: int
    dst: int


@dataclasses.dataclass(frozen=True, slots=True)
class BlockSwap:
    """Move one whole block between the pool (`block_id`) and host memory (`host_id`)."""

    block_id: int
    host_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class PromptScore:
    """Logprobs wanted of the prompt tokens that follow a chunk's tokens from `first` on."""

    first: int  # index into the chunk
    next_token_ids: tuple[int, ...]  # entry i follows the chunk's token first + i
    num_top: int


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """One row's tokens in this step's forward pass: a decode, or a prefill's or cache hit's rest.

    Token j of the chunk has logical position `position + j` and is stored in the row's resident
    slot `resident_start + j`; it attends to the resident slots [0, resident_start + j].
    """

    row: int
    num_tokens: int
    token_ids: tuple[int, ...] | None  # None: the row's last (drawn, or of its RowSetup)
    position: int
    resident_start: int
    sample_rows: tuple[int, ...]  # draw a token from the last position's logits; may be empty
    query_slot: int | None  # ring that the queries of the last tokens are written to
    prompt_score: PromptScore | None


@dataclasses.dataclass(frozen=True, slots=True)
class Compaction:
    """Keep the best `num_keep` of the row's tail slots per (layer, KV head) and drop the rest.

    The tail is the resident slots [protected_len, protected_len + tail_len). Survivors end up in
    [protected_len, protected_len + num_keep) of `block_ids`, which is the row's block table from
    now on. `block_copies` are made first (copy on write for shared blocks).
    """

    ident: int  # names this compaction in the result that says it is done
    row: int
    policy: str
    protected_len: int
    tail_len: int
    num_keep: int
    stateful_len: int  # leading tail slots that carry slot state from an earlier compaction
    logical_len: int  # tokens computed so far; the newest slot's position is logical_len - 1
    query_slot: int | None  # ring with the queries of the last tokens; None: the policy needs none
    num_queries: int  # how many of the last tokens have their query in the ring
    seed: int  # for policies that draw
    block_ids_before: tuple[int, ...]
    block_ids: tuple[int, ...]
    block_copies: tuple[BlockCopy, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """All that one step does."""

    step: int
    row_setups: tuple[RowSetup, ...] = ()
    block_updates: tuple[BlockUpdate, ...] = ()
    swap_outs: tuple[BlockSwap, ...] = ()
    swap_ins: tuple[BlockSwap, ...] = ()
    block_copies: tuple[BlockCopy, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    compactions: tuple[Compaction, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def is_idle(self) -> bool:
        """True when it moves no request forward."""
        acts = self.chunks, self.compactions, self.swap_outs, self.swap_ins
        return not any(acts)

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to carry out."""
        return not (
            self.chunks
            or self.compactions
            or self.swap_outs
            or self.swap_ins
            or self.row_setups
            or self.block_updates
            or self.block_copies
        )


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural, before temperature and filters) of a token and the likeliest."""

    token_id: int
    logprob: float
    rank: int  # 1 is the likeliest
    top: tuple[tuple[int, float], ...]  # (token id, logprob), likeliest first


class Sample(msgspec.Struct, frozen=True, gc=False):
    """The token one row drew."""

    row: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None  # why no token could be drawn; then token_id means nothing
    num_thinking: int | None = None  # leading output tokens that are thinking; None: not watched
    is_complete: bool = False  # the grammar has ended, and with it the output


@dataclasses.dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of the tokens that follow a chunk's positions, in order."""

    row: int
    entries: tuple[TokenLogprobs, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What a step yielded, and which compactions are done: of this step, or of earlier ones. Few of
    one step may be told even before, see `Compactor.go_on_behind`.

    A request may decode again from the next plan on once its compaction is done.
    """

    step: int
    samples: tuple[Sample, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    done_compactions: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class StepTrouble:
    """What a step could not do for want of memory; everything else of it is done.

    Told as soon as the step is launched, before any message is handled or another step is planned:
    nobody may continue from, share or copy what the failed rows hold.
    """

    step: int
    num_refusals: int  # times that memory was refused; work in smaller parts may have cured it
    failed_rows: tuple[int, ...]  # what their blocks hold of this step's work is not known
    lost_host_ids: tuple[int, ...]  # host blocks that were not written
    error: str  # for the requests that this ends


def encode_plan(plan: StepPlan | StepResult) -> bytes:
    """One JSON line, to record a run."""
    return msgspec.json.encode(plan)


def decode_plan(line: bytes) -> StepPlan:
    """The plan that `encode_plan` wrote."""
    return msgspec.json.decode(line, type=StepPlan)
