import zipage_lang as zipage
from zipage_lang.seeds import derive_seed
from zipage_lang.testing import ScriptedBackend


@zipage.function
def two_rounds(s, note=""):
    s += "Q: " + note + zipage.gen("a", max_tokens=2)
    branches = s.fork(3)
    branches += zipage.gen("b", max_tokens=2)
    branches.join()
    s += zipage.gen("c", max_tokens=2)


def seeds_of(backend):
    return sorted(call.sampling.seed for call in backend.calls)


def test_a_rerun_with_the_same_root_draws_the_same_seeds():
    first, second = ScriptedBackend("ab"), ScriptedBackend("ab")
    two_rounds.run(backend=first, seed=7)
    two_rounds.run(backend=second, seed=7)
    assert seeds_of(first) == seeds_of(second)


def test_every_call_of_a_run_has_a_seed_of_its_own():
    backend = ScriptedBackend("ab")
    two_rounds.run(backend=backend, seed=7)
    assert len(set(seeds_of(backend))) == len(backend.calls) == 5


def test_seeds_do_not_depend_on_the_text_or_on_what_runs_beside():
    alone, batch = ScriptedBackend("ab"), ScriptedBackend("ab")
    states = two_rounds.run_batch([{"note": "x"}, {"note": "y"}], backend=batch, seed=7)
    two_rounds.run("other text", backend=alone, seed=states[1].root_seed)
    assert set(seeds_of(alone)) < set(seeds_of(batch))


def test_no_root_means_another_one_each_time_and_it_can_be_read():
    backend = ScriptedBackend("ab")
    roots = {two_rounds.run(backend=backend).root_seed for _ in range(3)}
    assert len(roots) == 3


def test_seed_of_a_gen_is_left_as_it_is():
    @zipage.function
    def program(s):
        s += "x" + zipage.gen("a", seed=5)

    backend = ScriptedBackend("ab")
    program.run(backend=backend, seed=1)
    assert backend.calls[0].sampling.seed == 5


def test_derived_seeds_are_stable_over_processes_and_versions():
    assert derive_seed(0, ("call", 0)) == 4263121512814384934
    assert derive_seed(0, ("call", 1)) != derive_seed(0, ("call", 0))
