"""Needle recall: a number stated once in a long text, asked for behind it.

Knows nothing of engines or of how scores are made.
"""

import random
from collections.abc import Sequence

from zipage_lang.evaluation.probe import ProbeText
from zipage_lang.evaluation.statistics import Interval, difference_interval, mean_interval
from zipage_lang.frontend.tokenizer import Tokenizer
from zipage_lang.runtime.messages import LogprobEntry

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)  # where in the text the fact stands
_INTRO = "Here are some notes. A code number is hidden in them; remember it."
_QUESTION = "What is the code number of the {place}?"
_FACT = "The code number of the {place} is {number}."
_LEAD = "The code number of the {place} is"
_PLACES = ("harbour", "library", "old mill", "market", "railway station", "green bridge", "school")
_OPENINGS = (
    "In the morning",
    "Later that week",
    "After the rain",
    "On most days",
    "Toward the evening",
    "Once in a while",
    "By the end of the month",
    "Before anyone noticed",
    "During the long summer",
    "As far as I know",
)
_SUBJECTS = (
    "the baker",
    "a tired gardener",
    "my neighbour",
    "the youngest of the sisters",
    "an old fisherman",
    "the postman",
    "a group of students",
    "the doctor's dog",
    "nobody in particular",
    "the woman with the umbrella",
)
_ACTS = (
    "carried a basket of apples up the hill",
    "painted the fence in a pale colour",
    "talked about the weather for an hour",
    "looked for a lost glove under the table",
    "sang a song that had no ending",
    "repaired the clock above the door",
    "wrote a short letter and never sent it",
    "waited for the bus in front of the bakery",
    "counted the boats that came back",
    "slept through the whole concert",
)


def needle_texts(
    tokenizer: Tokenizer, window_len: int, num_rounds: int, seed: int
) -> list[ProbeText]:
    """Texts of about `window_len` tokens, one per depth and round, with another fact each."""
    texts = []
    for round_number in range(num_rounds):
        for depth in DEPTHS:
            rng = random.Random(f"needle/{seed}/{round_number}/{depth}")
            texts.append(_text(tokenizer, window_len, depth, rng))
    return texts


def needle_figures(
    texts: Sequence[ProbeText],
    scores: Sequence[Sequence[LogprobEntry]],
    full_scores: Sequence[Sequence[LogprobEntry]],
) -> dict[str, Interval]:
    """Figures by name: the share of facts that greedy decoding would give back, whole and by depth,
    and the mean surprise at the number's tokens."""
    recalled = [_is_recalled(entries) for entries in scores]
    full_recalled = [_is_recalled(entries) for entries in full_scores]
    figures = {
        "recalled": mean_interval(recalled),
        "recalled - full": difference_interval(recalled, full_recalled),
    }
    for group in dict.fromkeys(text.group for text in texts):
        pairs = zip(texts, recalled, strict=True)
        figures[f"at {group}"] = mean_interval([r for text, r in pairs if text.group == group])
    nats = [-sum(entry.logprob for entry in entries) / len(entries) for entries in scores]
    figures["nats per token"] = mean_interval(nats)
    return figures


def _is_recalled(entries: Sequence[LogprobEntry]) -> float:
    """1.0 where each token of the number was the likeliest."""
    return float(all(entry.rank == 1 for entry in entries))


def _text(tokenizer: Tokenizer, window_len: int, depth: float, rng: random.Random) -> ProbeText:
    place, number = rng.choice(_PLACES), str(rng.randint(10_000, 99_999))
    lead = tokenizer.encode(_LEAD.format(place=place), add_special_tokens=False)
    answer = tokenizer.encode(f" {number}", add_special_tokens=False)
    notes = _notes(tokenizer, window_len, depth, _FACT.format(place=place, number=number), rng)
    before, after = _around(tokenizer, _QUESTION.format(place=place))
    head = tokenizer.encode(before, add_special_tokens=not tokenizer.has_chat_template)
    middle = tokenizer.encode(notes + after, add_special_tokens=False)
    prompt = [*head, *middle, *lead]
    return ProbeText([*prompt, *answer], len(prompt), len(head), f"{depth:.0%}")


def _around(tokenizer: Tokenizer, question: str) -> tuple[str, str]:
    """What stands before and behind the notes, by the model's chat template where it has one."""
    mark = "\x00"
    message = f"{_INTRO}\n\n{mark}\n\n{question}"
    text = message + "\n"
    if tokenizer.has_chat_template:
        text = tokenizer.render_chat([{"role": "user", "content": message}])
    before, _, after = text.partition(mark)
    return before, after


def _notes(
    tokenizer: Tokenizer, window_len: int, depth: float, fact: str, rng: random.Random
) -> str:
    """Sentences of about `window_len` tokens in all, the fact after `depth` of them."""
    sentences, num_tokens = [], 0
    while num_tokens < window_len:
        words = (rng.choice(_OPENINGS), rng.choice(_SUBJECTS), rng.choice(_ACTS))
        sentences.append(f"{words[0]}, {words[1]} {words[2]}.")
        num_tokens += len(tokenizer.encode(f" {sentences[-1]}", add_special_tokens=False))
    sentences.insert(round(depth * len(sentences)), fact)
    return " ".join(sentences)
