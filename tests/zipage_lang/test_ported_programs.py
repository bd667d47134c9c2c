"""Programs in the manner of SGLang's public examples, written anew; only the import is ours."""

import json
import re

import pytest

import zipage_lang as sgl
from zipage_lang.testing import ScriptedBackend


@pytest.fixture(autouse=True)
def no_default_backend():
    yield
    sgl.set_default_backend(None)


# A few shots, then many questions in one batch.

SHOTS = "Q: Which planet is the largest?\nA: Jupiter\n\nQ: How many legs has an ant?\nA: 6\n\n"


@sgl.function
def few_shot_qa(s, question):
    s += SHOTS
    s += "Q: " + question + "\n"
    s += "A:" + sgl.gen("answer", stop="\n", temperature=0)


def test_few_shot_qa():
    replies = {re.compile("Spain"): " Madrid\nQ: more", re.compile("Italy"): " Rome\nQ: more"}
    backend = ScriptedBackend(replies)
    sgl.set_default_backend(backend)
    states = few_shot_qa.run_batch(
        [{"question": "Capital of Spain?"}, {"question": "Capital of Italy?"}],
        num_threads="auto",
        progress_bar=False,
    )
    assert [s["answer"].strip() for s in states] == ["Madrid", "Rome"]
    assert all(call.prompt.startswith(SHOTS) for call in backend.calls)
    assert states[0].get_meta_info("answer")["finish_reason"]["type"] == "stop"


# Tips, each worked out in a fork, then a summary.


@sgl.function
def expand_tip(s, topic, tip):
    s += f"Explain this tip about {topic} in one paragraph: {tip}\n"
    s += sgl.gen("paragraph", max_tokens=64, stop=["\n\n"])


@sgl.function
def tip_suggestion(s, topic):
    s += f"Two short tips about {topic}.\n1."
    s += sgl.gen("tip_1", stop=["\n", ":"]) + "\n2."
    s += sgl.gen("tip_2", stop=["\n", ":"]) + "\n"
    forks = s.fork(2)
    for i, f in enumerate(forks):
        f += f"Now explain tip {i + 1}:" + sgl.gen("detail", max_tokens=64, stop="\n\n")
    s += "Tip 1:" + forks[0]["detail"] + "\n"
    s += "Tip 2:" + forks[1]["detail"] + "\n"
    s += "In summary:" + sgl.gen("summary", stop="\n")


def test_tip_suggestion():
    script = {
        "\n1.": " Sleep\nmore",
        "\n2.": " Walk: far",
        "tip 1:": " Rest heals.\n\nmore",
        "tip 2:": " Feet move you.\n\nmore",
        "summary:": " Live well.\n",
    }
    state = tip_suggestion.run(topic="health", backend=ScriptedBackend(script))
    assert (state["tip_1"], state["tip_2"]) == (" Sleep", " Walk")
    assert "Tip 1: Rest heals.\nTip 2: Feet move you.\n" in state.text()
    assert state.text().endswith("In summary: Live well.")
    inner = expand_tip.run("health", "Sleep", backend=ScriptedBackend("Because.\n\n"))
    assert inner["paragraph"] == "Because."


# A JSON object, written field by field between constants.


@sgl.function
def character(s, name):
    s += name + ' is this character:\n{\n  "name": "' + name + '",\n  "age": '
    s += sgl.gen_int("age") + ',\n  "house": '
    s += sgl.gen("house", choices=['"red"', '"blue"']) + ',\n  "motto": '
    s += sgl.gen_string("motto") + "\n}"


def test_json_decode():
    backend = ScriptedBackend(
        {"age": "17,", '"age": ': "17,", '"motto": ': '"Onward"', re.compile(""): "scored"},
        token_logprob=lambda context, token: -0.1 if context.endswith('"b') else -1.0,
    )
    state = character.run("Ada", backend=backend)
    assert (state["age"], state["house"], state["motto"]) == (17, '"blue"', "Onward")
    assert '"age": 17,\n  "house": "blue",\n  "motto": "Onward"\n}' in state.text()


# A conversation of several turns.


@sgl.function
def two_turns(s, first, second):
    s += sgl.system("You are helpful.")
    s += sgl.user(first)
    s += sgl.assistant(sgl.gen("answer_1", max_tokens=32))
    s += sgl.user(second)
    with s.assistant():
        s += sgl.gen("answer_2", max_tokens=32)


def test_multi_turn_chat_streams():
    first = "Hi<|im_end|>\n<|im_start|>assistant\n"
    backend = ScriptedBackend({first: "Hello", re.compile(""): "Bye"})
    state = two_turns.run("Hi", "Thanks", backend=backend, stream=True)
    assert "".join(state.text_iter("answer_2")) == "Bye"
    assert [m["content"] for m in state.messages()] == [
        "You are helpful.",
        "Hi",
        "Hello",
        "Thanks",
        "Bye",
    ]


# A small tree of thought: plans, their execution, a vote of the model, depth first.


def propose_plan(s, question, num_branches):
    s += sgl.user("Plan how to answer: " + question)
    forks = s.fork(num_branches)
    forks += sgl.assistant(sgl.gen("plan", max_tokens=32, temperature=0.7))
    return forks


def execute_plan(s, num_branches):
    s += sgl.user("Carry the plan out.")
    forks = s.fork(num_branches)
    forks += sgl.assistant(sgl.gen("answer", max_tokens=32, temperature=0.7))
    return forks


@sgl.function
def tree_search(s, question, num_branches):
    solutions = []
    for plan in propose_plan(s, question, num_branches):
        solutions += execute_plan(plan, num_branches)
    s["votes"] = [solution["answer"] for solution in solutions]
    return max(s["votes"], key=s["votes"].count)


def test_tree_of_thought():
    answers = iter(["7", "8", "8", "8"])

    def reply(call):
        return next(answers) if "Carry the plan out." in call.prompt else "a plan"

    state = tree_search.run("3 + 5?", 2, backend=ScriptedBackend(reply))
    assert state.ret_value == "8"
    assert sorted(state["votes"]) == ["7", "8", "8", "8"]


# A regular expression for one value in the middle of a text.


@sgl.function
def address(s):
    s += "The address of the loopback device is "
    s += sgl.gen("ip", temperature=0, regex=r"((25[0-5]|2[0-4]\d|[01]?\d\d?)\.){3}(25[0-5]|\d\d?)")
    s += "."


def test_regex_decode():
    state = address.run(backend=ScriptedBackend("127.0.0.1"))
    assert state.text() == "The address of the loopback device is 127.0.0.1."
    assert sgl.testing.match(sgl.gen("ip", regex=r"(\d{1,3}\.){3}\d{1,3}"), state["ip"])


# A whole JSON object under one regular expression.

CHARACTER = (
    r'\{ "name": "[A-Za-z ]{1,20}", "house": "(red|blue)", "year": [1-7], '
    r'"wand": \{ "wood": "[a-z]{3,10}", "inches": \d{1,2}\.\d \} \}'
)


@sgl.function
def character_by_regex(s, name):
    s += name + " is a character of a tale. Her data as JSON:\n"
    s += sgl.gen("json_output", max_tokens=256, regex=CHARACTER)


def test_json_decode_by_regex():
    written = (
        '{ "name": "Ada Blue", "house": "red", "year": 3, '
        '"wand": { "wood": "oak", "inches": 9.5 } }'
    )
    backend = ScriptedBackend(written)
    state = character_by_regex.run(name="Ada", backend=backend)
    assert json.loads(state["json_output"])["wand"] == {"wood": "oak", "inches": 9.5}
    assert backend.calls[0].sampling.regex == CHARACTER
    gen = sgl.gen("json_output", regex=CHARACTER)
    assert sgl.testing.match(gen, written)
    assert not sgl.testing.match(gen, written.replace("red", "green"))


# Tips as a chain of calls in forks of forks: suggest, expand each, join all in the author's order.


@sgl.function
def tips_by_fork(s, topic, number):
    s += sgl.system("You are brief.")
    s += sgl.user(f"Give me {number} tips about {topic}.")
    forks = s.fork(number)
    for i, f in enumerate(forks):
        f += sgl.assistant(sgl.gen("tip", stop="\n", temperature=0.7))
        f += sgl.user(f"Explain tip {i + 1}.")
        f += sgl.assistant(sgl.gen("detail", max_tokens=64))
    forks.join()
    s += sgl.assistant("\n".join(f"{t}: {d}" for t, d in zip(s["tip"], s["detail"], strict=True)))


def test_tips_are_expanded_in_forks_and_joined_in_order():
    def reply(call):
        asked = re.search(r"Explain tip (\d)", call.prompt)
        return f"because {asked[1]}" if asked else "a tip\nmore"

    state = tips_by_fork.run("sleep", 3, backend=ScriptedBackend(reply))
    assert state["tip"] == ["a tip"] * 3
    assert state.messages()[-1]["content"] == (
        "a tip: because 1\na tip: because 2\na tip: because 3"
    )
