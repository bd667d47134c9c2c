"""Known texts scored under a bounded cache: what the model makes of each next token.

A text is given as a prompt whose log-probabilities are asked for, with only its head protected. The
engine computes it in chunks and compacts between them exactly where it would while decoding, so
each token is scored against the cache it would have been drawn from (a test holds this against
decoding). Knows nothing of files, pages or what a text is about.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from zipage_lang.evaluation.grid import Setting
from zipage_lang.evaluation.runner import Job, Runner
from zipage_lang.evaluation.sweep_progress import SweepProgress
from zipage_lang.runtime.messages import LogprobEntry
from zipage_lang.runtime.sampling_params import SamplingParams

SEED = 0  # for policies that draw lots


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeText:
    """Tokens from `scored_from` on are scored; those before `protected_len` may be protected."""

    token_ids: list[int]
    scored_from: int
    protected_len: int
    group: str = ""  # texts of a group also have a figure of their own

    def __post_init__(self) -> None:
        num_tokens = len(self.token_ids)
        assert 1 <= self.scored_from < num_tokens, f"scored from {self.scored_from} of {num_tokens}"


def score_texts(
    runner: Runner,
    texts: Sequence[ProbeText],
    settings: Sequence[Setting],
    progress: SweepProgress,
) -> dict[Setting, list[list[LogprobEntry]]]:
    """Per setting and text the entries of the scored tokens. Raises EvaluationError."""
    found: dict[Setting, dict[int, list[LogprobEntry]]] = {setting: {} for setting in settings}
    progress.begin("texts under each setting", len(texts) * len(settings))
    for output in runner.run(_jobs(texts, settings)):
        setting, index = output.key
        entries = (output.prompt_logprobs or [])[texts[index].scored_from :]
        scored = [entry for entry in entries if entry is not None]
        wanted = len(texts[index].token_ids) - texts[index].scored_from
        assert len(scored) == wanted, f"{len(scored)} of {wanted} tokens were scored"
        found[setting][index] = scored
        progress.count(None)
    return {
        setting: [scores[index] for index in range(len(texts))] for setting, scores in found.items()
    }


def _jobs(texts: Sequence[ProbeText], settings: Sequence[Setting]) -> Iterator[Job]:
    for setting in settings:
        for index, text in enumerate(texts):
            sampling = SamplingParams(
                max_tokens=1,
                temperature=0,
                seed=SEED,
                prompt_logprobs=0,
                prompt_logprobs_start=text.scored_from,
            )
            kv = setting.kv()
            if not setting.is_full:
                kept = text.protected_len if setting.protect == "prompt" else 0
                kv = dataclasses.replace(kv, protected_len=kept)
            yield Job((setting, index), text.token_ids, sampling, kv)
