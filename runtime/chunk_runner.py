"""Runs the chunks of a step: forward pass, prompt log-probabilities, draws.

Where memory is refused it goes on in smaller parts. That is safe because K, V and kept queries may
be written again, and drawing is the last thing a part does.
Knows nothing of requests, block copies or compactions.
"""

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from zipage_lang.kernels.backend import Backend
from zipage_lang.runtime.batch_builder import BatchBuilder
from zipage_lang.runtime.chunk_cuts import Chunks, halved_chunks, without_rows
from zipage_lang.runtime.decode_graphs import DecodeGraphs
from zipage_lang.runtime.device_copy import send_ints
from zipage_lang.runtime.draws import Draws
from zipage_lang.runtime.kv_cache import KVCache
from zipage_lang.runtime.models.decoder import Decoder
from zipage_lang.runtime.out_of_memory import Retries
from zipage_lang.runtime.row_tables import RowTables
from zipage_lang.runtime.sampler import Sampler
from zipage_lang.runtime.step_plan import Chunk, PromptLogprobs, PromptScore, TokenLogprobs
from zipage_lang.runtime.wanted_states import wanted_of

LOGPROB_LINES = 64  # prompt positions whose logits are made at a time; bounds their memory


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkResults:
    """What chunks yielded."""

    draws: tuple[Draws, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


class ChunkRunner:
    """One per runner; see `ModelRunner` for what the parts are."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        backend: Backend,
        *,
        tables: RowTables,
        sampler: Sampler,
        graphs: DecodeGraphs | None,
        retries: Retries,
    ) -> None:
        self._model, self._cache, self._sampler = model, cache, sampler
        self._graphs, self._retries = graphs, retries
        self._batches = BatchBuilder(cache, backend, tables)

    def run(self, chunks: Chunks, failed_rows: set[int]) -> ChunkResults:
        """Launch the chunks of all rows that have not failed.

        A row whose work finds no memory even one token at a time is added to `failed_rows`, and so
        are the rows that would have drawn after it.
        """

        def run_part(part: Chunks) -> ChunkResults:
            return self._run(without_rows(part, failed_rows))

        def give_up(part: Chunks) -> None:
            failed_rows.update(chunk.row for chunk in part)

        results = self._retries.run(chunks, run_part, halved_chunks, give_up)
        if failed_rows:
            for chunk in chunks:
                if chunk.row in failed_rows:
                    failed_rows.update(chunk.sample_rows)
        if len(results) == 1:
            return results[0]
        return ChunkResults(
            tuple(draws for result in results for draws in result.draws),
            tuple(item for result in results for item in result.prompt_logprobs),
        )

    def _run(self, chunks: Chunks) -> ChunkResults:
        if not chunks:
            return ChunkResults()
        if self._graphs is not None and self._graphs.can_run(chunks):
            logits = self._graphs.run(chunks)  # [num_chunks, vocab_size]
            return ChunkResults((self._draw(logits, [chunk.row for chunk in chunks]),))
        batch = self._batches.build(chunks, self._sampler.last_token_ids)
        hidden = self._model.forward(batch, self._cache)  # [num_wanted, hidden_size]
        prompt_logprobs = self._prompt_logprobs(chunks, hidden)
        states = hidden[batch.logits_index]  # [num_drawing, hidden_size]
        del hidden  # a scored prompt's states must not stay beside the draws' logits
        return ChunkResults(self._sample(chunks, states), prompt_logprobs)

    def _sample(self, chunks: Sequence[Chunk], states: Tensor) -> tuple[Draws, ...]:
        drawing = [chunk for chunk in chunks if chunk.sample_rows]
        if not drawing:
            return ()
        logits = self._model.logits(states)  # [num_drawing, vocab_size]
        rows = [row for chunk in drawing for row in chunk.sample_rows]
        if len(rows) > len(drawing):  # samples of one request draw from the same logits
            lines = [i for i, chunk in enumerate(drawing) for _ in chunk.sample_rows]
            logits = logits[send_ints(lines, logits.device)]  # [num_rows, vocab_size]
        return (self._draw(logits, rows),)

    def _draw(self, logits: Tensor, rows: Sequence[int]) -> Draws:
        draws = self._sampler.draw(logits, rows)
        draws.start_copy()
        return draws

    def _prompt_logprobs(
        self, chunks: Sequence[Chunk], hidden: Tensor
    ) -> tuple[PromptLogprobs, ...]:
        found, start = [], 0
        for chunk in chunks:
            if chunk.prompt_score is not None:
                states = hidden[start : start + len(chunk.prompt_score.next_token_ids)]
                found.append(PromptLogprobs(chunk.row, self._score(chunk.prompt_score, states)))
            start += len(wanted_of(chunk))
        return tuple(found)

    def _score(self, score: PromptScore, hidden: Tensor) -> tuple[TokenLogprobs, ...]:
        """hidden: [num_scored, hidden_size], the states that the scored tokens follow."""
        next_ids = send_ints(score.next_token_ids, hidden.device)  # [num_scored]
        entries: list[TokenLogprobs] = []
        parts = zip(hidden.split(LOGPROB_LINES), next_ids.split(LOGPROB_LINES), strict=True)
        for states, token_ids in parts:
            logits = self._model.logits(states)  # [num_lines, vocab_size]
            entries += self._sampler.score_prompt(logits, token_ids, score.num_top)
        return tuple(entries)
