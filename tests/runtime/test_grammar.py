"""Bad grammars are refused with their fault and its place; good ones keep Python's meaning."""

import json
import re
from typing import Literal

import pytest

from zipage_lang.runtime.grammar import GrammarCompiler, GrammarError, new_matcher
from zipage_lang.runtime.grammar_source import GrammarSource
from zipage_lang.runtime.regex_dialect import portable_regex
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.vocabulary import Vocabulary
from zipage_lang.types import quoted_type, value_type

EOS = 256
BYTES = Vocabulary((*(bytes([byte]) for byte in range(256)), b"</s>"), frozenset({EOS}))


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(BYTES.texts, [EOS])


def matches(compiler, source, text):
    matcher = new_matcher(compiler.compile(source))
    return bool(text == "" or matcher.accept_string(text)) and matcher.is_completed()


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("regex", "a(b", r"bad regex: missing \).* at position 1"),
        ("regex", "*a", "bad regex: nothing to repeat at position 0"),
        ("regex", "[z-a]", "bad regex: bad character range z-a at position 1"),
        ("regex", "(?=a)b", "bad regex: .*position 3: Lookahead is not supported"),
        ("regex", r"(a)\1", "bad regex: .*Backreference is not supported"),
        ("regex", "a$b", r"bad regex: '\$' at position 1"),
        ("regex", "(^a)", r"bad regex: '\^' at position 1"),
        ("ebnf", 'root ::= "a" b', 'bad ebnf: .*line 1, column 14: Rule "b" is not defined'),
        ("ebnf", 'start: "a"', "bad ebnf: .*line 1, column 6: Unexpected character"),
        ("ebnf", 'x ::= "a"', 'bad ebnf: .*root rule with name "root" is not found'),
        ("json_schema", '{"type":"objec"}', 'bad json_schema: Unsupported type "objec"'),
        ("json_schema", '{"$ref":"#/x"}', "bad json_schema: Cannot find field x"),
        ("json_schema", '{"enum":[]}', "bad json_schema: enum array must not be empty"),
        ("json_schema", '{"minimum":5,"maximum":3,"type":"integer"}', "bad json_schema: .*range"),
        ("json_schema", '{"type":"string","pattern":"("}', "bad json_schema: .*not closed"),
        ("structural_tag", '{"type":"structural_tag"}', "bad structural_tag: .*format field"),
        (
            "structural_tag",
            '{"format":{"type":"json_schema","json_schema":{"type":"objec"}}}',
            'bad structural_tag: Unsupported type "objec"',
        ),
    ],
)
def test_a_bad_grammar_is_told_with_its_fault_and_place(compiler, kind, text, told):
    with pytest.raises(GrammarError, match=told) as raised:
        compiler.compile(GrammarSource(kind, text))
    assert "/project" not in str(raised.value)
    assert matches(compiler, GrammarSource("regex", "ab"), "ab")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"regex": "a" * 1_000_000}, "regex has 1000000 bytes; at most 65536"),
        ({"ebnf": "(" * 65}, "ebnf nests more than 64 brackets at character 64"),
        ({"json_schema": '[{"a":' * 3000}, "json_schema is no JSON|nests more than"),
        ({"json_schema": {"properties": {f"p{i}": {} for i in range(501)}}}, "501 entries"),
        ({"json_schema": "{"}, "json_schema is no JSON: .*line 1 column 2"),
        ({"json_schema": 3}, "must be an object"),
        ({"json_schema": {"const": object()}}, "can't be written as JSON"),
        ({"regex": ""}, "regex is empty"),
        ({"regex": 7}, "must be a string"),
        ({"regex": "\ud800"}, "lone surrogate at character 0"),
        ({"regex": "a", "ebnf": "b"}, "regex and ebnf can't be combined"),
        ({"lark": "start: A", "json_schema": {}}, "json_schema and lark can't be combined"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos=True can't be combined with regex"),
        ({"json_any_whitespace": 1}, "must be True or False"),
        ({"structural_tag": True}, "structural_tag=True must be an object"),
        ({"structural_tag": "{"}, "structural_tag is no JSON"),
    ],
)
def test_a_grammar_that_could_not_be_compiled_in_time_is_refused_at_once(fields, told):
    with pytest.raises(ValueError, match=told):
        SamplingParams(**fields)


def test_a_schema_that_nests_deeply_is_refused_whatever_its_form():
    schema = {}
    for _ in range(70):
        schema = {"properties": {"a": schema}}
    for form in (schema, json.dumps(schema)):
        with pytest.raises(ValueError, match="nests more than 64 levels"):
            SamplingParams(json_schema=form)


def test_a_schema_has_one_form_and_keeps_the_order_of_its_properties():
    schema = {"properties": {"b": {}, "a": {}}, "type": "object"}
    compact = '{"properties":{"b":{},"a":{}},"type":"object"}'
    assert SamplingParams(json_schema=schema).json_schema == compact
    assert SamplingParams(json_schema=json.dumps(schema, indent=3)).json_schema == compact


def test_a_structural_tag_mixes_text_and_schemas_without_stray_whitespace(compiler):
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}
    form = {"type": "triggered_tags", "triggers": ["<f>"], "tags": [tag]}
    source = SamplingParams(structural_tag={"type": "structural_tag", "format": form}).grammar
    assert matches(compiler, source, 'so <f>{"x": 12}</f> it is <f>{"x": -3}</f>')
    assert not matches(compiler, source, 'so <f>{"x":  12}</f>')
    assert not matches(compiler, source, "<f>12</f>")


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (".", ["a", "\n", "é", "."]),
        (r"\.[.\n]", [".\n", "a.", ".."]),
        (r"[]a]+", ["]a", "b"]),
        (r"[^]a]+", ["]", "b"]),
        ("^ab$", ["ab", "abc"]),
        (r"[$^.]", ["$", "^", ".", "a"]),
        (r"\$\^", ["$^", "$"]),
        ("a*?b", ["aab", "a"]),
        (r"(?:\d{2}|x)", ["12", "x", "1"]),
        ("(a{2}){1,3}", ["a" * count for count in range(9)]),
        ("(a{2,}){2}", ["a" * count for count in range(9)]),
        ("((?:a{0,2}){2,3}b?){1,2}", ["a" * count for count in range(15)] + ["aabaab", "bab"]),
        ("(a|)b{,2}(|c)", ["", "a", "bb", "abbc", "bbb"]),
        (r"(?P<x>\x41{2})[{]a{,}}?", ["AA{a}", "AA{", "A{"]),
        ("a{0}b", ["b", "ab"]),
        ("a[\n\t]\n", ["a\t\n", "a\n\n", "a \n"]),
    ],
)
def test_a_regex_means_what_it_means_in_python(compiler, pattern, texts):
    for text in texts:
        expected = re.fullmatch(pattern, text) is not None
        assert matches(compiler, GrammarSource("regex", pattern), text) is expected, text


@pytest.mark.parametrize(
    ("wanted", "texts"),
    [
        (int, ["-120", " 7.", "007", "1,2"]),
        (float, ["1.5e-3 ", "2", ".5"]),
        (bool, ["true", " False", "yes"]),
        (Literal["a.b", "c d"], ["a.b", "c d", "axb"]),
    ],
)
def test_the_regex_of_a_typed_gen_means_the_same(compiler, wanted, texts):
    ((kind, pattern),) = value_type(wanted).constraint
    for text in texts:
        expected = re.fullmatch(pattern, text) is not None
        assert matches(compiler, GrammarSource(kind, pattern), text) is expected, text


def test_a_quoted_string_is_one_json_string(compiler):
    ((kind, pattern),) = quoted_type().constraint
    for text, expected in [
        (' "a\\n é"', True),
        ('"a\n"', False),
        ('"a" ', False),
        ('"\\x"', False),
    ]:
        assert matches(compiler, GrammarSource(kind, pattern), text) is expected, text


def test_portable_regex_changes_free_dots_only():
    assert portable_regex(r"a.[.]\..") == r"a[^\n][.]\.[^\n]"


def test_counted_repetitions_that_double_too_often_are_refused():
    with pytest.raises(ValueError, match=r"repetitions up to position \d+ are too many"):
        portable_regex("(" * 40 + "a" + "{2})" * 40)


def test_patterns_of_a_schema_mean_what_they_mean_in_python(compiler):
    schema = {"properties": {"pattern": {"pattern": "^(a{2}){1,3}$", "type": "string"}}}
    source = SamplingParams(
        json_schema={"type": "object", "required": ["pattern"], **schema}
    ).grammar
    for count in range(8):
        text = f'{{"pattern": "{"a" * count}"}}'
        assert matches(compiler, source, text) is (count in (2, 4, 6)), text


def test_patterns_within_plain_values_stay_as_they_are(compiler):
    source = SamplingParams(json_schema={"const": {"pattern": "a{2}"}}).grammar
    assert matches(compiler, source, '{"pattern":"a{2}"}')  # as xgrammar writes constants
