"""What a call's meta says, in the shapes that programs ask for: SGLang's dict, and the KV report.

Knows nothing of states or how meta is waited for.
"""

from collections.abc import Callable, Sequence
from typing import Any

from zipage_lang.choices import ScoreResult
from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.kv_report import KVReport, report_of
from zipage_lang.runtime.messages import LogprobEntry

Entry = tuple[float | None, int | None, str | None]  # logprob, token id, its text
Spell = Callable[[int], str]
MetaInfo = dict[str, Any] | list[dict[str, Any]]


def meta_info(meta: Any, spell: Spell) -> MetaInfo | None:
    """SGLang's meta info of a generation, a list of them for several samples, or of a select.

    `spell` gives a token's text. None for a value that no call made.
    """
    match meta:
        case RequestOutput():
            return _of_output(meta, spell)
        case ScoreResult():
            return _of_scores(meta, spell)
        case list():
            infos = [meta_info(item, spell) for item in meta]
            return [info for info in infos if isinstance(info, dict)]
    return None


def kv_report_of(meta: Any) -> KVReport:
    """What the call behind this meta kept and dropped; a report of no calls where none is behind
    it. After a join the calls of all branches add up.
    """
    match meta:
        case RequestOutput() | ScoreResult():
            return report_of([meta.kv])
        case list():
            outputs = [item for item in meta if isinstance(item, RequestOutput | ScoreResult)]
            return report_of([item.kv for item in outputs]) if outputs else KVReport()
    return KVReport()


def _of_output(output: RequestOutput, spell: Spell) -> dict[str, Any]:
    info: dict[str, Any] = {
        "id": output.request_id,
        "finish_reason": {"type": output.finish_reason, "matched": output.stop_reason},
        "prompt_tokens": output.usage.prompt_tokens,
        "completion_tokens": output.usage.completion_tokens,
        "cached_tokens": output.usage.cached_tokens,
    }
    if output.logprobs is not None:
        info["output_token_logprobs"] = _entries(output.logprobs, spell)
        info["output_top_logprobs"] = _top_entries(output.logprobs, spell)
    if output.prompt_logprobs is not None:
        info["input_token_logprobs"] = _entries(output.prompt_logprobs, spell)
        info["input_top_logprobs"] = _top_entries(output.prompt_logprobs, spell)
    return info


def _of_scores(scores: ScoreResult, spell: Spell) -> dict[str, Any]:
    return {
        "normalized_prompt_logprobs": scores.means,
        "input_token_logprobs": [
            [(logprob, i, spell(i)) for logprob, i in zip(row, token_ids, strict=True)]
            for row, token_ids in zip(scores.logprobs, scores.token_ids, strict=True)
        ],
    }


def _entries(logprobs: Sequence[LogprobEntry | None], spell: Spell) -> list[Entry]:
    return [
        (None, None, None)
        if entry is None
        else (entry.logprob, entry.token_id, spell(entry.token_id))
        for entry in logprobs
    ]


def _top_entries(logprobs: Sequence[LogprobEntry | None], spell: Spell) -> list[list[Entry] | None]:
    return [
        None if entry is None else [(logprob, i, spell(i)) for i, logprob in entry.top]
        for entry in logprobs
    ]
