"""`keep`, and what `s.kv()` tells of what calls kept and dropped."""

import dataclasses

import pytest

import zipage_lang as zipage
from zipage_lang.runtime.messages import KVUsage
from zipage_lang.testing import ScriptedBackend


def run(backend, *parts, **options):
    @zipage.function
    def program(s):
        for part in parts:
            s += part

    return program.run(backend=backend, **options)


def protected(backend):
    return [(call.kv.protect, call.kv.protected_len) for call in backend.calls]


class TestKeep:
    def test_later_calls_protect_everything_up_to_the_kept_texts_end(self):
        backend = ScriptedBackend("abc")
        run(
            backend,
            "12345" + zipage.gen("a"),
            zipage.keep("RULE") + "more" + zipage.gen("b"),
            zipage.gen("c"),
        )
        up_to_rule = len("12345abcRULE")
        assert protected(backend) == [(None, 5), ("prompt", up_to_rule), ("prompt", up_to_rule)]

    def test_before_the_first_gen_it_changes_nothing_but_a_border(self):
        backend = ScriptedBackend("abc")
        state = run(backend, zipage.keep("RULE") + "12345" + zipage.gen("a"))
        assert protected(backend) == [("prompt", 9)]
        assert state.text() == "RULE12345abc"

    def test_it_outweighs_a_call_that_protects_less(self):
        backend = ScriptedBackend("abc")
        shared = zipage.KV(protect="none")
        part = "12" + zipage.gen("a") + zipage.keep("R") + zipage.gen("b")
        run(backend, part, zipage.gen("c", kv=zipage.KV(protected_len=3)), kv=shared)
        assert protected(backend) == [("none", 2), ("prompt", 6), ("prompt", 6)]

    def test_branches_and_joined_texts_keep_what_was_kept(self):
        @zipage.function
        def program(s):
            s += "1" + zipage.gen("a") + zipage.keep("R")
            branches = s.fork(2)
            branches += zipage.gen("b")
            branches[1] += zipage.keep("S")
            branches.join("concat")
            s += zipage.gen("c")

        backend = ScriptedBackend("xy")
        program.run(backend=backend)
        assert [length for _, length in protected(backend)] == [1, 4, 4, len("1xyRxyxyS")]

    def test_inside_of_a_reply_the_message_opens_as_the_template_asks(self):
        backend = ScriptedBackend("abc")
        reply = zipage.assistant(zipage.keep("Rule.") + zipage.gen("a"))
        state = run(backend, zipage.user("q"), reply)
        assert backend.calls[0].prompt.endswith("<|im_start|>assistant\nRule.")
        assert state.messages()[-1]["content"] == "Rule.abc"

    def test_only_a_constant_text_can_be_kept(self):
        with pytest.raises(ValueError, match="give a string"):
            zipage.keep(zipage.gen("a"))


class CompactingBackend(ScriptedBackend):
    """Says of each call that it compacted once and dropped 3 slots."""

    async def generate(self, token_ids, sampling, **options):
        async for output in super().generate(token_ids, sampling, **options):
            logical_len = output.kv.logical_len
            kv = KVUsage(
                logical_len=logical_len,
                resident_len=logical_len - 3,
                max_resident_len=logical_len,
                protected_len=1,
                compactions=1,
                dropped=3,
                recomputed=2,
            )
            yield dataclasses.replace(output, kv=kv)


class TestReport:
    def test_one_call(self):
        state = run(CompactingBackend("abc"), "q", zipage.gen("a"))
        report = state.kv("a")
        assert (report.logical_len, report.kept_len, report.missing_len) == (5, 2, 3)
        assert (report.num_compactions, report.num_dropped, report.num_recomputed) == (1, 3, 2)
        assert (report.num_calls, report.protected_len, report.max_kept_len) == (1, 1, 5)

    def test_all_calls_of_a_state(self):
        state = run(CompactingBackend("abc"), "q", zipage.gen("a"), zipage.gen("b"), "end")
        report = state.kv()
        assert (report.num_calls, report.num_compactions, report.num_dropped) == (2, 2, 6)
        assert report.logical_len == state.kv("b").logical_len

    def test_samples_add_up_and_the_first_goes_on(self):
        state = run(CompactingBackend(["abc", "a"]), "q", zipage.gen("a", n=2))
        assert (state.kv("a").num_dropped, state.kv("a").logical_len) == (6, 5)

    def test_a_value_without_a_call_has_an_empty_report(self):
        program = zipage.function(lambda s: s.__setitem__("k", 3))
        assert program.run(backend=ScriptedBackend()).kv("k").num_calls == 0

    def test_gathered_values_tell_of_all_branches(self):
        @zipage.function
        def program(s):
            s += "q"
            branches = s.fork(2)
            branches += zipage.gen("a")
            branches.join()
            return [branch.kv().num_dropped for branch in branches]

        state = program.run(backend=CompactingBackend("abc"))
        assert state.ret_value == [3, 3]
        assert state.kv("a").num_dropped == 6
        assert state.kv().num_calls == 0

    def test_choices_scored_on_a_compacted_cache_say_so(self):
        state = run(CompactingBackend("x"), "q", zipage.select("c", ["a", "b"]))
        assert not state.meta("c").is_exact
        assert state.kv("c").missing_len == 3

    def test_async_programs_await_it(self):
        async def body(s):
            s += "q" + zipage.gen("a")
            return await s.kv("a"), await s.kv()

        one, total = zipage.function(body).run(backend=CompactingBackend("abc")).ret_value
        assert one == total
