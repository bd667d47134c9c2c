import dataclasses

import pytest

import zipage_lang as zipage
from zipage_lang.ir import Concat, Gen, RoleBegin, RoleEnd, Text, parts_of


def test_strings_and_nodes_concatenate_into_one_flat_list():
    expr = "a" + zipage.gen("x") + "b" + (zipage.gen("y") + "c")
    assert expr == Concat((Text("a"), Gen("x"), Text("b"), Gen("y"), Text("c")))


def test_nodes_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        zipage.gen("x").name = "y"


def test_repr_reads_like_the_source():
    assert repr(zipage.gen("x", max_tokens=5, stop=["."])) == "gen('x', max_tokens=5, stop=['.'])"
    assert "select('c', choices=['a', 'b']" in repr(zipage.select("c", ["a", "b"]))
    assert repr("hi " + zipage.gen("x")) == "Text(text='hi ') + gen('x')"


@pytest.mark.parametrize("value", [None, 3, b"bytes", ["list"]])
def test_what_is_no_text_or_node_is_refused_by_value(value):
    with pytest.raises(ValueError, match=r"can't be appended"):
        parts_of(value)
    with pytest.raises(ValueError, match=r"can't be appended"):
        zipage.gen("x") + value


def test_gen_in_an_f_string_is_refused_instead_of_written_as_its_repr():
    with pytest.raises(TypeError, match="join it to the text"):
        f"Answer: {zipage.gen('x')}"


def test_unknown_sampling_field_names_the_nearest_one():
    with pytest.raises(ValueError, match="temperature"):
        zipage.gen("x", temprature=0.5)


@pytest.mark.parametrize(
    "fields", [{"n": 0}, {"temperature": float("nan")}, {"max_tokens": -1}, {"stop": 3}]
)
def test_bad_sampling_value_is_raised_where_gen_is_written(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        zipage.gen("x", **fields)


def test_gen_field_that_is_none_takes_the_default():
    assert zipage.gen("x", temperature=None) == zipage.gen("x")
    defaults = zipage.SamplingParams(temperature=0.3, max_tokens=7)
    assert zipage.gen("x", temperature=None).sampling(defaults) == defaults


def test_gen_overrides_only_what_it_names():
    sampling = zipage.gen("x", max_tokens=9).sampling(zipage.SamplingParams(temperature=0.3))
    assert (sampling.max_tokens, sampling.temperature) == (9, 0.3)


def test_min_tokens_alone_may_rely_on_the_run_for_max_tokens():
    node = zipage.gen("x", min_tokens=500)
    assert node.sampling(zipage.SamplingParams(max_tokens=600)).min_tokens == 500
    with pytest.raises(ValueError, match="min_tokens=500"):
        node.sampling(zipage.SamplingParams())


@pytest.mark.parametrize("choices", [[], "text", ["a", "a"], ["a", ""], [1]])
def test_select_refuses_choices_it_can_not_tell_apart(choices):
    with pytest.raises(ValueError, match="choices"):
        zipage.select("c", choices)


def test_select_refuses_an_unknown_method():
    with pytest.raises(ValueError, match="token_length_normalized"):
        zipage.select("c", ["a"], method="best")


def test_role_wraps_its_body():
    assert zipage.user("hi") == Concat((RoleBegin("user"), Text("hi"), RoleEnd("user")))
    spelled = zipage.user_begin() + "hi" + zipage.user_end()
    assert spelled == zipage.user("hi")
