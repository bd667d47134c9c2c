"""A model runner without a model: carries out StepPlans on simulated memory, checking each word.

Every slot remembers which token of which history it stands for, so a wrong block, a stale slot, a
missing copy or a survivor in the wrong place fails an assert in the step that reads it.
Knows nothing of the scheduler, requests or the radix tree.

A slot's `history` is the rolling hash of all logical tokens up to its own: two slots with equal
histories stand for the same token after the same text. After a compaction each surviving tail slot
carries a CompactionMark, the stand-in for slot state. A row's resident slots must then read

    [0, protected_len)             unmarked, positions 0, 1, ...
    [protected_len, + num_keep)    all with the same mark, exactly the marked positions
    [protected_len + num_keep, ..) unmarked, positions mark.logical_len, + 1, ...

The marked positions must be those that a request alone in the world would have kept, had it
compacted at the same lengths: a mark carries its chain of compactions, and `lone_survivors` follows
it over the row's own tokens.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from test_support.lone_run import (
    EMPTY_HISTORY,
    Chain,
    draw_token,
    extend_history,
    histories_of,
    lone_survivors,
    select_survivors,
)

from zipage_lang.runtime.step_plan import (
    BlockCopy,
    BlockSwap,
    BlockUpdate,
    Chunk,
    Compaction,
    PromptLogprobs,
    RowSetup,
    Sample,
    StepPlan,
    StepResult,
    TokenLogprobs,
)


@dataclasses.dataclass(frozen=True, slots=True)
class CompactionMark:
    """Which compactions a surviving slot came through."""

    policy: str
    protected_len: int
    chain: Chain
    positions: frozenset[int]

    @property
    def logical_len(self) -> int:
        """Tokens there were at the last compaction."""
        return self.chain[-1][0]


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """What K and V of one token would hold."""

    position: int
    token_id: int
    history: int
    exact: bool  # computed while attending to its whole history
    mark: CompactionMark | None = None


@dataclasses.dataclass(slots=True)
class Row:
    """What the runner keeps of a running request between steps."""

    setup: RowSetup
    token_ids: list[int]
    histories: list[int]
    block_ids: list[int] = dataclasses.field(default_factory=list)
    num_computed: int | None = None  # None: nothing computed since the setup

    def append(self, token_id: int) -> None:
        last = self.histories[-1] if self.histories else EMPTY_HISTORY
        self.token_ids.append(token_id)
        self.histories.append(extend_history(last, token_id))


class FakeRunner:
    """Carries out plans to the letter; raises AssertionError where a plan breaks the contract."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        num_query_slots: int = 8,
        window: int = 4,
        max_rows: int = 64,
        max_model_len: int = 4096,
        vocab_size: int = 50,
        eos_token_ids: Iterable[int] = (),
        policy_queries: Mapping[str, int] | None = None,
        compacts_late: bool = False,
    ) -> None:
        """compacts_late: slots move when `finish_compactions` is called, not in their step, as on a
        stream that lags behind."""
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_host_blocks, self.num_query_slots = num_host_blocks, num_query_slots
        self.window, self.max_rows = window, max_rows
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.policy_queries = dict(policy_queries or {"zipage": window, "random": 0})
        # usable block ids are 1..num_blocks; block 0 is the dummy
        self.blocks: dict[int, list[Slot | None]] = {
            block_id: [None] * block_size for block_id in range(1, num_blocks + 1)
        }
        self.host: dict[int, list[Slot | None]] = {}
        self.rings: list[list[int | None]] = [[None] * window for _ in range(num_query_slots)]
        self.rows: dict[int, Row] = {}
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.num_compactions = 0
        self.num_swapped_blocks = 0
        self.compacted_rows: dict[int, CompactionMark] = {}  # drew from such a state in this step
        self.compacts_late = compacts_late
        self._late: dict[int, tuple[Compaction, Row]] = {}  # by ident
        self._lone: dict[tuple[object, ...], frozenset[int]] = {}  # what `lone_survivors` said
        self._writers: dict[int, int] = {}  # block -> row that writes it in this step
        self._readers: dict[int, set[int]] = {}  # block -> rows that read it in this step

    def run(self, plan: StepPlan) -> StepResult:
        """One step, in the order that step_plan.py lays down."""
        self._writers, self._readers, self.compacted_rows = {}, {}, {}
        self._check_shape(plan)
        for swap in plan.swap_outs:
            self._swap_out(swap)
        self._copy_blocks(plan.block_copies)
        for setup in plan.row_setups:
            self._set_up(setup)
        for update in plan.block_updates:
            self._update_blocks(update)
        samples: list[Sample] = []
        prompt_logprobs: list[PromptLogprobs] = []
        for chunk in plan.chunks:
            self._forward(chunk)
        for chunk in plan.chunks:
            samples += self._sample(chunk)
            prompt_logprobs += self._prompt_logprobs(chunk)
        for compaction in plan.compactions:
            self._start_compaction(compaction)
        self._check_writers()
        for swap in plan.swap_ins:
            self._swap_in(swap)
        self.num_steps += 1
        self.num_computed_tokens += plan.num_tokens
        return StepResult(
            step=plan.step,
            samples=tuple(samples),
            prompt_logprobs=tuple(prompt_logprobs),
            done_compactions=tuple(compaction.ident for compaction in plan.compactions),
        )

    def _check_shape(self, plan: StepPlan) -> None:
        """Each row has at most one chunk, one compaction and one ring; no target is named twice."""
        _assert_distinct("rows with a chunk", [chunk.row for chunk in plan.chunks])
        _assert_distinct("rows with a compaction", [act.row for act in plan.compactions])
        _assert_distinct("rows set up", [setup.row for setup in plan.row_setups])
        _assert_distinct("rows sampled", [row for c in plan.chunks for row in c.sample_rows])
        _assert_distinct("host blocks written", [swap.host_id for swap in plan.swap_outs])
        filled = [*(s.block_id for s in plan.swap_ins), *(c.dst for c in plan.block_copies)]
        _assert_distinct("blocks swapped in or copied to", filled)
        ring_of: dict[int, int] = {}
        for act in (*plan.chunks, *plan.compactions):
            if act.query_slot is not None:
                assert 0 <= act.query_slot < self.num_query_slots, f"no ring {act.query_slot}"
                owner = ring_of.setdefault(act.query_slot, act.row)
                assert owner == act.row, f"rows {owner} and {act.row} share ring {act.query_slot}"

    # 1., 2. and 6. swaps and copies

    def _swap_out(self, swap: BlockSwap) -> None:
        assert 0 <= swap.host_id < self.num_host_blocks, f"no host block {swap.host_id}"
        self.host[swap.host_id] = list(self._block(swap.block_id))
        self.num_swapped_blocks += 1

    def _swap_in(self, swap: BlockSwap) -> None:
        assert swap.host_id in self.host, f"host block {swap.host_id} holds nothing"
        users = {self._writers.get(swap.block_id), *self._readers.get(swap.block_id, ())} - {None}
        assert not users, f"rows {users} use block {swap.block_id} before it has come back"
        self._block(swap.block_id)[:] = self.host.pop(swap.host_id)
        self.num_swapped_blocks += 1

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """All sources are read before any target is written."""
        _assert_distinct("copy targets", [copy.dst for copy in copies])
        contents = [list(self._block(copy.src)) for copy in copies]
        for copy, content in zip(copies, contents, strict=True):
            self._block(copy.dst)[:] = content

    # 3. and 4. rows

    def _set_up(self, setup: RowSetup) -> None:
        assert 0 <= setup.row < self.max_rows, f"no row {setup.row} of {self.max_rows}"
        num_tokens = len(setup.token_ids)
        assert 1 <= setup.num_prompt_tokens <= num_tokens <= self.max_model_len, (
            f"row {setup.row}: {setup.num_prompt_tokens} prompt tokens of {num_tokens}"
        )
        token_ids = list(setup.token_ids)
        self.rows[setup.row] = Row(setup, token_ids, histories_of(token_ids))

    def _update_blocks(self, update: BlockUpdate) -> None:
        table = self._row(update.row).block_ids
        assert 0 <= update.first <= len(table), (
            f"row {update.row}: update from {update.first} leaves a gap after {len(table)} blocks"
        )
        table[update.first :] = update.block_ids
        for block_id in update.block_ids:
            self._block(block_id)
        _assert_distinct(f"blocks of row {update.row}", table)

    # 5. forward pass and sampling

    def _forward(self, chunk: Chunk) -> None:
        row = self._row(chunk.row)
        token_ids = self._chunk_tokens(chunk, row)
        resident = self._read_resident(chunk.row, chunk.resident_start, chunk.position)
        exact = all(slot.mark is None for slot in resident)
        for offset, token_id in enumerate(token_ids):
            position = chunk.position + offset
            slot = Slot(position, token_id, row.histories[position], exact)
            self._write(chunk.row, chunk.resident_start + offset, slot)
            if chunk.query_slot is not None:
                self.rings[chunk.query_slot][position % self.window] = slot.history
        row.num_computed = chunk.position + chunk.num_tokens

    def _chunk_tokens(self, chunk: Chunk, row: Row) -> Sequence[int]:
        """The chunk's tokens, which must be the row's own at these positions, and follow on."""
        end = chunk.position + chunk.num_tokens
        assert chunk.num_tokens >= 1, f"row {chunk.row}: a chunk of {chunk.num_tokens} tokens"
        assert end <= len(row.token_ids), (
            f"row {chunk.row}: chunk ends at {end}, only {len(row.token_ids)} tokens are known"
        )
        assert row.num_computed in (None, chunk.position), (
            f"row {chunk.row}: chunk starts at {chunk.position}, computed {row.num_computed}"
        )
        own = row.token_ids[chunk.position : end]
        if chunk.token_ids is None:
            assert chunk.num_tokens == 1, f"row {chunk.row}: no ids for {chunk.num_tokens} tokens"
            assert end == len(row.token_ids), f"row {chunk.row}: {end - 1} is not its last token"
        else:
            assert list(chunk.token_ids) == own, (
                f"row {chunk.row}: chunk {chunk.token_ids} at {chunk.position} is not {own}"
            )
        return own

    def _sample(self, chunk: Chunk) -> list[Sample]:
        if not chunk.sample_rows:
            return []
        end = chunk.position + chunk.num_tokens
        slots = self._read_resident(chunk.row, chunk.resident_start + chunk.num_tokens, end)
        mark = next((slot.mark for slot in slots if slot.mark is not None), None)
        if mark is not None:
            self.compacted_rows.update(dict.fromkeys(chunk.sample_rows, mark))
        resident = sorted((slot.position, slot.token_id) for slot in slots)
        source = self._row(chunk.row)
        assert end == len(source.token_ids) or chunk.row not in chunk.sample_rows, (
            f"row {chunk.row} samples after {end} of {len(source.token_ids)} known tokens"
        )
        history = source.histories[end - 1]
        return [self._draw(index, resident, history) for index in chunk.sample_rows]

    def _draw(self, index: int, resident: list[tuple[int, int]], history: int) -> Sample:
        row = self._row(index)
        assert row.histories[-1] == history, f"row {index} samples from logits of other tokens"
        setup = row.setup
        output_index = len(row.token_ids) - setup.num_prompt_tokens
        token_id = draw_token(
            setup.seed, resident, output_index, setup.sampling, self.vocab_size, self.eos_token_ids
        )
        row.append(token_id)
        wanted = setup.sampling.logprobs is not None
        return Sample(index, token_id, _logprobs(token_id) if wanted else None)

    def _prompt_logprobs(self, chunk: Chunk) -> list[PromptLogprobs]:
        wanted = chunk.prompt_score
        if wanted is None:
            return []
        row, count = self._row(chunk.row), len(wanted.next_token_ids)
        assert 0 <= wanted.first < wanted.first + count <= chunk.num_tokens, (
            f"row {chunk.row}: {count} logprobs from {wanted.first} of {chunk.num_tokens} tokens"
        )
        begin = chunk.position + wanted.first + 1
        prompt = row.token_ids[: row.setup.num_prompt_tokens]
        assert list(wanted.next_token_ids) == prompt[begin : begin + count], (
            f"row {chunk.row}: {wanted.next_token_ids} do not follow position {begin - 1}"
        )
        return [PromptLogprobs(chunk.row, tuple(_logprobs(i) for i in wanted.next_token_ids))]

    # 7. compaction

    def finish_compactions(self, idents: Iterable[int]) -> None:
        """Before these are told as done: what is still to be moved is moved."""
        for ident in idents:
            if ident in self._late:
                self._writers, self._readers = {}, {}
                self._compact(*self._late.pop(ident))

    def _start_compaction(self, act: Compaction) -> None:
        row = self._row(act.row)
        self._check_compaction(act, row)
        self._check_queries(act, row)
        if self.compacts_late:
            self._late[act.ident] = (act, dataclasses.replace(row, block_ids=list(row.block_ids)))
            row.block_ids = list(act.block_ids)
        else:
            self._compact(act, row)

    def _compact(self, act: Compaction, row: Row) -> None:
        """`row`: as it was when the compaction was launched; another may have its place by now."""
        slots = self._read_row(act.row, row, act.protected_len + act.tail_len, act.logical_len)
        tail = slots[act.protected_len :]
        self._check_state(act, tail)
        self._copy_blocks(act.block_copies)
        row.block_ids = list(act.block_ids)
        self._fill_holes(act, row, tail)
        self.num_compactions += 1

    def _check_compaction(self, act: Compaction, row: Row) -> None:
        name = f"row {act.row}"
        assert act.policy in self.policy_queries, f"{name}: no policy {act.policy}"
        assert 0 < act.num_keep < act.tail_len, f"{name}: keep {act.num_keep} of {act.tail_len}"
        assert row.num_computed in (None, act.logical_len), (
            f"{name}: logical_len {act.logical_len}, computed {row.num_computed}"
        )
        assert list(act.block_ids_before) == row.block_ids, (
            f"{name}: block_ids_before {act.block_ids_before} is not its table {row.block_ids}"
        )
        before = self._num_blocks(act.protected_len + act.tail_len)
        after = self._num_blocks(act.protected_len + act.num_keep)
        assert len(act.block_ids_before) >= before, f"{name}: table is short of {before} blocks"
        assert len(act.block_ids) == after, f"{name}: {len(act.block_ids)} blocks, not {after}"
        _assert_distinct(f"blocks of {name}", act.block_ids)
        self._check_table_change(act)

    def _check_table_change(self, act: Compaction) -> None:
        """The new table is the old one's front, where a block stays or is replaced by its copy."""
        copied = {copy.dst: copy.src for copy in act.block_copies}
        assert set(copied) <= set(act.block_ids), f"row {act.row}: a copy that no one uses"
        for old, new in zip(act.block_ids_before, act.block_ids, strict=False):
            assert copied.get(new, new) == old, f"row {act.row}: block {new} is no copy of {old}"
        reused = set(copied) & set(act.block_ids_before)
        assert not reused, f"row {act.row}: copies into its own blocks {reused}"

    def _check_state(self, act: Compaction, tail: Sequence[Slot]) -> None:
        for index, slot in enumerate(tail):
            has_state = slot.mark is not None
            assert has_state == (index < act.stateful_len), (
                f"row {act.row}: tail slot {index} of {len(tail)}, stateful_len "
                f"{act.stateful_len}, but state is {'there' if has_state else 'missing'}"
            )
            if slot.mark is not None:
                assert slot.mark.protected_len == act.protected_len, f"row {act.row}: protection"
                assert slot.mark.policy == act.policy, f"row {act.row}: state of another policy"

    def _check_queries(self, act: Compaction, row: Row) -> None:
        """The ring holds the queries of this row's newest `num_queries` tokens."""
        if self.policy_queries[act.policy] == 0:
            return
        assert act.query_slot is not None, f"row {act.row}: {act.policy} needs a ring"
        assert 1 <= act.num_queries <= min(self.window, act.logical_len), (
            f"row {act.row}: {act.num_queries} queries of {act.logical_len} tokens"
        )
        ring = self.rings[act.query_slot]
        for position in range(act.logical_len - act.num_queries, act.logical_len):
            assert ring[position % self.window] == row.histories[position], (
                f"row {act.row}: ring {act.query_slot} lacks the query of position {position} "
                f"(logical_len {act.logical_len})"
            )

    def _fill_holes(self, act: Compaction, row: Row, tail: Sequence[Slot]) -> None:
        positions = select_survivors(
            act.policy,
            self.window,
            act.num_keep,
            [slot.position for slot in tail],
            row.histories,
        )
        survivors = {index for index, slot in enumerate(tail) if slot.position in positions}
        holes = [index for index in range(act.num_keep) if index not in survivors]
        movers = sorted(index for index in survivors if index >= act.num_keep)
        assert len(holes) == len(movers), f"{len(holes)} holes, {len(movers)} movers"
        past = next((slot.mark.chain for slot in tail if slot.mark is not None), ())
        chain = (*past, (act.logical_len, act.num_keep))
        mark = CompactionMark(act.policy, act.protected_len, chain, positions)
        source = list(range(act.num_keep))
        for hole, mover in zip(holes, movers, strict=True):
            source[hole] = mover
        # slot state is written for every survivor, so each block of the kept tail is written
        for index, origin in enumerate(source):
            slot = dataclasses.replace(tail[origin], mark=mark)
            self._write_to(row.block_ids, act.row, act.protected_len + index, slot)

    # memory

    def _num_blocks(self, num_slots: int) -> int:
        return -(-num_slots // self.block_size)

    def _row(self, index: int) -> Row:
        assert index in self.rows, f"row {index} was never set up"
        return self.rows[index]

    def _block(self, block_id: int) -> list[Slot | None]:
        assert block_id in self.blocks, f"block {block_id} is not one of 1..{self.num_blocks}"
        return self.blocks[block_id]

    def _write(self, row: int, resident_index: int, slot: Slot) -> None:
        self._write_to(self._row(row).block_ids, row, resident_index, slot)

    def _write_to(self, table: Sequence[int], row: int, resident_index: int, slot: Slot) -> None:
        index, offset = divmod(resident_index, self.block_size)
        assert index < len(table), (
            f"row {row}: slot {resident_index} is past its {len(table)} blocks"
        )
        owner = self._writers.setdefault(table[index], row)
        assert owner == row, f"rows {owner} and {row} both write block {table[index]}"
        self._block(table[index])[offset] = slot

    def _read_resident(self, index: int, resident_len: int, logical_len: int) -> list[Slot]:
        """The row's first `resident_len` slots, which must stand for its `logical_len` tokens."""
        return self._read_row(index, self._row(index), resident_len, logical_len)

    def _read_row(self, index: int, row: Row, resident_len: int, logical_len: int) -> list[Slot]:
        num_blocks = self._num_blocks(resident_len)
        assert num_blocks <= len(row.block_ids), (
            f"row {index}: {resident_len} resident slots, {len(row.block_ids)} blocks"
        )
        slots: list[Slot | None] = []
        for block_id in row.block_ids[:num_blocks]:
            self._readers.setdefault(block_id, set()).add(index)
            slots += self._block(block_id)
        return self._check_history(index, row.histories, slots[:resident_len], logical_len)

    def _check_history(
        self,
        index: int,
        histories: Sequence[int],
        slots: Sequence[Slot | None],
        logical_len: int,
    ) -> list[Slot]:
        whole: list[Slot] = []
        for number, slot in enumerate(slots):
            assert slot is not None, f"row {index}: resident slot {number} was never written"
            own = histories[slot.position] if slot.position < len(histories) else None
            assert slot.history == own, (
                f"row {index}: resident slot {number} holds {slot}, which is not its history"
            )
            whole.append(slot)
        marks = {slot.mark for slot in whole if slot.mark is not None}
        assert len(marks) <= 1, f"row {index}: slots of {len(marks)} different compactions"
        num_exact, expected = len(whole), [*range(logical_len)]
        if marks:
            self._check_marked(index, whole, mark := marks.pop())
            self._check_survivors(index, histories, mark)
            num_exact = mark.protected_len
            expected = [*range(num_exact), *range(mark.logical_len, logical_len)]
        got = [slot.position for slot in whole if slot.mark is None]
        assert got == expected, f"row {index}: positions {got}, not {expected}"
        inexact = [slot.position for slot in whole[:num_exact] if not slot.exact]
        assert not inexact, f"row {index}: positions {inexact} were computed on a compacted cache"
        return whole

    def _check_marked(self, index: int, slots: Sequence[Slot], mark: CompactionMark) -> None:
        """The marked slots stand together behind the protected ones and are all the survivors."""
        begin, end = mark.protected_len, mark.protected_len + len(mark.positions)
        inside = [number for number, slot in enumerate(slots) if slot.mark is not None]
        assert inside == list(range(begin, end)), (
            f"row {index}: survivors in slots {inside}, not [{begin}, {end})"
        )
        positions = {slots[number].position for number in inside}
        assert positions == mark.positions, (
            f"row {index}: survivors {sorted(positions)}, not {sorted(mark.positions)}"
        )

    def _check_survivors(self, index: int, histories: Sequence[int], mark: CompactionMark) -> None:
        """The survivors are those that the row, alone with this chain, would have."""
        history = histories[mark.logical_len - 1]
        key = (history, mark.policy, mark.protected_len, mark.chain)
        if key not in self._lone:
            self._lone[key] = lone_survivors(
                mark.policy, self.window, mark.protected_len, mark.chain, histories
            )
        assert mark.positions == self._lone[key], (
            f"row {index}: {sorted(mark.positions)} survived, alone {sorted(self._lone[key])} would"
        )

    def _check_writers(self) -> None:
        """No row reads a block that another row writes in the same step."""
        for block_id, writer in self._writers.items():
            others = self._readers.get(block_id, set()) - {writer}
            assert not others, f"row {writer} writes block {block_id} that rows {others} read"


def _logprobs(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -1.0, 1, ())


def _assert_distinct(what: str, items: Sequence[int]) -> None:
    assert len(set(items)) == len(items), f"{what}: {sorted(items)} has repeats"
