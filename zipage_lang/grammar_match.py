"""Whether a text is what a grammar lets through, without an engine or a model.

Knows nothing of programs; the grammar is compiled just as an engine compiles it.
"""

from typing import Any

from zipage_lang.gens import gen
from zipage_lang.ir import Gen
from zipage_lang.runtime.grammar import GrammarCompiler, new_matcher
from zipage_lang.runtime.sampling_params import SamplingParams

END_OF_TEXT = 256  # behind the tokens, one for each byte


def match(grammar: Any, text: str) -> bool:
    """Whether a gen with this grammar could generate `text`, whole.

    Parameters:
        grammar: a gen with type, regex, json_schema or ebnf; a SamplingParams with one of these; or
            a type, as for `gen(type=...)`.
        text: the whole output.

    Errors: ValueError for a gen without a grammar and for a grammar that can't be compiled.

    >>> zipage.testing.match(int, " 42"), zipage.testing.match(int, "many")
    (True, False)
    """
    source = _sampling(grammar).grammar
    if source is None:
        raise ValueError(f"{grammar!r} has no grammar: it lets every text through")
    pieces = (*(bytes([byte]) for byte in range(256)), b"")
    compiler = GrammarCompiler(pieces, [END_OF_TEXT])
    matcher = new_matcher(compiler.compile(source))
    return bool(matcher.accept_string(text)) and bool(matcher.accept_token(END_OF_TEXT))


def _sampling(grammar: Any) -> SamplingParams:
    if isinstance(grammar, SamplingParams):
        return grammar
    node = grammar if isinstance(grammar, Gen) else gen(type=grammar)
    assert isinstance(node, Gen), f"{node!r} generates"
    return node.sampling(SamplingParams())
