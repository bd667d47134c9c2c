"""Stop strings in a text cut anywhere, against the obvious search over the whole text.

Knows nothing of tokens or engines.
"""

from test_support.fuzz_input import Choices

from zipage_lang.frontend.stop_strings import StopMatcher


def target(data: bytes) -> None:
    choices = Choices(data)
    stops = tuple(filter(None, (choices.text(6) for _ in range(1 + choices.below(4)))))
    min_tokens = choices.below(4)
    text = "".join(choices.pick((*stops, choices.text(4), "a")) for _ in range(choices.below(12)))
    pieces = choices.pieces(text)
    matcher = StopMatcher(stops, min_tokens)
    shown = [matcher.feed(piece, number) for number, piece in enumerate(pieces, 1)]
    if matcher.matched is None:
        shown.append(matcher.flush())
    assert ("".join(shown), matcher.matched) == cut_slowly(pieces, stops, min_tokens)


def cut_slowly(
    pieces: list[str], stops: tuple[str, ...], min_tokens: int
) -> tuple[str, str | None]:
    """The text up to the first end of a stop string, and the longest one that ends there."""
    text = ""
    for number, piece in enumerate(pieces, 1):
        for character in piece:
            text += character
            found = [stop for stop in stops if text.endswith(stop)]
            if found and number >= min_tokens:
                longest = max(found, key=len)
                return text[: len(text) - len(longest)], longest
    return text, None
