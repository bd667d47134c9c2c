import zipage_lang as zipage
from zipage_lang.testing import ScriptedBackend, WordTokenizer
from zipage_lang.transcript import Transcript, split_at_cut


class BosBackend(ScriptedBackend):
    """Puts a mark in front where special tokens are asked for."""

    def encode(self, text, *, add_special_tokens):
        return super().encode(
            ("<s>" if add_special_tokens else "") + text, add_special_tokens=False
        )


def run(backend, *parts, **options):
    @zipage.function
    def program(s):
        for part in parts:
            s += part

    return program.run(backend=backend, **options)


def test_each_prompt_extends_the_tokens_of_the_request_before_it():
    backend = ScriptedBackend(["one two", "three"], tokenizer=WordTokenizer())
    state = run(backend, "Say", zipage.gen("a"), " and", zipage.gen("b"))
    first, second = backend.calls
    generated = state.meta("a").token_ids[:-1]  # without the end of sequence
    assert second.token_ids[: len(first.token_ids) + len(generated)] == first.token_ids + generated
    assert state.text() == "Sayone two andthree"


def test_generated_tokens_are_kept_where_encoding_their_text_would_give_others():
    """The tokenizer would make one word of "ab" + "cd"; the model made two tokens."""
    backend = ScriptedBackend(["cd", "x"], tokenizer=WordTokenizer())
    run(backend, "ab", zipage.gen("a"), zipage.gen("b"))
    assert backend.calls[1].prompt == "abcd"
    assert len(backend.calls[1].token_ids) == 2
    assert len(backend.encode("abcd", add_special_tokens=False)) == 1


def test_author_text_is_tokenised_as_one_piece_however_it_was_appended():
    backend = ScriptedBackend("x", tokenizer=WordTokenizer())
    run(backend, "uni", "form", " text", zipage.gen("a"))
    assert backend.calls[0].token_ids == backend.encode("uniform text", add_special_tokens=False)


def test_stop_string_inside_a_token_leaves_the_rest_of_the_text_for_the_author():
    backend = ScriptedBackend(["The answer is 42.Then", "x"], tokenizer=WordTokenizer())
    state = run(backend, "Q:", zipage.gen("a", stop="."), " units", zipage.gen("b"))
    assert state["a"] == "The answer is 42"
    assert backend.calls[1].prompt == "Q:The answer is 42 units"
    kept = state.meta("a").token_ids[:3]  # The, answer, is
    assert backend.calls[1].token_ids[1:4] == kept
    tail = backend.encode(" 42 units", add_special_tokens=False)
    assert backend.calls[1].token_ids[4:] == tail


def test_stop_string_on_a_token_border_keeps_all_tokens_before_it():
    backend = ScriptedBackend("one two END more", tokenizer=WordTokenizer())
    token_ids = backend.encode("one two END", add_special_tokens=False)
    kept, rest = split_at_cut(backend, token_ids, "one two", skip_special_tokens=True)
    assert (kept, rest) == (token_ids[:2], "")


def test_cut_in_the_first_token_keeps_none():
    backend = ScriptedBackend(tokenizer=WordTokenizer())
    token_ids = backend.encode("yes.no", add_special_tokens=False)
    assert split_at_cut(backend, token_ids, "yes", skip_special_tokens=True) == ([], "yes")


def test_output_cut_by_length_goes_on_token_by_token():
    backend = ScriptedBackend(["one two three", " four"], tokenizer=WordTokenizer())
    state = run(backend, "Q:", zipage.gen("a", max_tokens=2), zipage.gen("b"))
    assert state["a"] == "one two"
    assert backend.calls[1].prompt == "Q:one two"


def test_stop_token_is_no_part_of_the_text_that_goes_on():
    backend = ScriptedBackend(["one two three", "x"], tokenizer=WordTokenizer())
    stop_id = backend.encode("w two", add_special_tokens=False)[1]
    run(backend, "Q:", zipage.gen("a", stop_token_ids=[stop_id]), zipage.gen("b"))
    assert backend.calls[1].token_ids[-1] != stop_id


def test_plain_text_opens_with_the_tokenizers_special_tokens_once():
    backend = BosBackend(["a", "b"])
    run(backend, "x", zipage.gen("p"), "y", zipage.gen("q"))
    assert [call.prompt for call in backend.calls] == ["<s>x", "<s>xay"]


def test_a_chat_template_brings_its_own_special_tokens():
    backend = BosBackend("a")
    run(backend, zipage.user("hi"), zipage.assistant(zipage.gen("p")))
    assert backend.calls[0].prompt.startswith("<|im_start|>system")


def test_protected_are_the_tokens_before_the_first_generated_one():
    backend = ScriptedBackend(["abc", "def", "g"])
    run(backend, "12345", zipage.gen("a"), "678", zipage.gen("b"), zipage.gen("c"))
    assert [call.kv.protected_len for call in backend.calls] == [5, 5, 5]


def test_branches_protect_what_the_root_author_wrote():
    @zipage.function
    def program(s):
        s += "12345" + zipage.gen("a")
        branches = s.fork(2)
        branches += "678" + zipage.gen("b")

    backend = ScriptedBackend("abc")
    program.run(backend=backend)
    assert {call.kv.protected_len for call in backend.calls} == {5}


def test_branches_forked_before_any_generation_protect_their_whole_prompt():
    @zipage.function
    def program(s):
        s += "12345"
        branches = s.fork(2)
        branches += lambda i: "x" * (i + 1) + zipage.gen("b") + "y" + zipage.gen("c")
        branches.join()

    backend = ScriptedBackend("abc")
    program.run(backend=backend)
    assert sorted(call.kv.protected_len for call in backend.calls) == [6, 6, 7, 7]


def test_a_copy_shares_the_tokens_and_then_goes_its_own_way():
    transcript = Transcript(ScriptedBackend())
    transcript.write("ab")
    twin = transcript.copy()
    twin.write("c")
    assert transcript.settle() == twin.settle()[:2]
    assert (transcript.text, twin.text) == ("ab", "abc")
