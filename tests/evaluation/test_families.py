"""Problem families: every step of every solution is computed again here, by other means."""

import importlib.util
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zipage_lang.evaluation.families import FAMILIES, find_family
from zipage_lang.evaluation.families.family import (
    ANSWER_MARK,
    MAX_SOLUTION_LEN,
    MAX_TEXT_LEN,
    MIN_SOLUTION_LEN,
    Problem,
    final_answer,
    problem_rng,
)

TOKENIZER_FILE = Path(__file__).resolve().parents[2] / "training" / "tokenizer.py"
ALL_LEVELS = [
    (family.name, level) for family in FAMILIES.values() for level in range(family.levels)
]
SEEDS = st.integers(0, 10**9)


def draw(name: str, level: int, seed: int = 0) -> Problem:
    return FAMILIES[name].draw(random.Random(seed), level)


def recheck_countdown(problem: Problem) -> None:
    """Each path is a right derivation, no line repeats, and only the last one meets the target."""
    target, given_numbers = re.fullmatch(r"countdown (\d+): ([\d ]+)\n", problem.prompt).groups()
    *lines, answer_line = problem.solution.splitlines()
    assert len(set(lines)) == len(lines)
    for line in lines:
        head, path = line.split(":")
        parts = path.split("|")
        last = parts.pop()
        assert (head, parts[0]) == (target, given_numbers)
        for at in range(1, len(parts), 2):
            left = Counter(parts[at - 1].split(" "))
            one, other, result = re.split(r"[-+*/=]", parts[at])
            left.subtract([one, other])
            left[result] += 1
            assert right_step(parts[at])
            assert min(left.values()) >= 0
            assert +left == Counter(parts[at + 1].split(" "))
        results = [] if last in ("up", "") else last.split(" ")
        assert all(map(right_step, results))
        met = [step.split("=")[1] for step in results]
        assert met.count(target) == (line is lines[-1])
        if line is lines[-1]:
            assert answer_line == ANSWER_MARK + " ".join([*parts[1::2], results[-1]])


def right_step(step: str) -> bool:
    expression, result = step.split("=")
    one, operation, other = re.fullmatch(r"(\d+)([-+*/])(\d+)", expression).groups()
    one, other, result = int(one), int(other), int(result)
    undone = {"+": result - other, "-": result + other, "/": result * other}
    return 1 <= result <= 99 and (
        one * other == result if operation == "*" else undone[operation] == one
    )


def recheck_trace(problem: Problem) -> None:
    """An interpreter of the prompt writes the same values."""
    _, *code = problem.prompt.splitlines()
    *steps, answer_line = problem.solution.splitlines()
    values: dict[str, int] = {}
    for line, step in zip(code, steps, strict=True):
        if "print" in line:
            assert step == line
            assert answer_line == f"{ANSWER_MARK}{values[line[-1]]:02d}"
            continue
        target, expression = line[2], line[4:]
        shown = re.sub("[a-z]", lambda found: f"{values[found[0]]:02d}", expression)
        terms = [int(term) for term in re.findall(r"[-+]?\d+", shown)]
        values[target] = sum(terms) % 100
        assert step.startswith(line + " ")
        assert step.endswith(f" {target}{values[target]:02d}")
        if len(terms) == 3:
            between = f"{(terms[0] + terms[1]) % 100:02d}{shown[5:]}"
            assert step.split(" ")[1:3] == [shown, between]
    assert [line[:2] for line in code] == [str(10 + at) for at in range(len(code))]


def recheck_multiply(problem: Problem) -> None:
    """Each total is the product with the digits so far; each step's parts are the named digits."""
    one, other = map(int, re.fullmatch(r"multiply (\d+)\*(\d+)\n", problem.prompt).groups())
    known: dict[str, str] = {}
    num_rows = 0
    for line in problem.solution.splitlines():
        if line.startswith(ANSWER_MARK):
            assert line == f"{ANSWER_MARK}{one * other}"
        elif line.startswith("total"):
            num_rows += 1
            shown = "".join(re.findall(r"\d", line))[::-1]
            assert int(shown) == one * (other % 10**num_rows)
            assert all(
                known[name.lower() if num_rows == 1 else name] == digit
                for name, digit in named(line)
            )
            known.update(named(line))
        elif line.startswith(("x", "row")):
            known.update(pair for pair in named(line) if pair[0] in "pqrstu")
            assert "".join(known[name] for name in "pqrstu"[: len(str(one))]) == str(one)[::-1]
            assert (
                re.search(r"y ?(\d*)$", line)[1]
                == str(other)[::-1][num_rows + line.startswith("row") :]
            )
        elif "*" in line:
            name, factor, digit, product, carry, carried, *_ = re.fullmatch(
                r"([p-u])(\d)\*(\d)=(\d\d)\+(\d)=(\d\d) ([a-l])(\d) (\d)", line
            ).groups()
            assert (factor, digit) == (known[name], str(other)[::-1][num_rows])
            assert int(factor) * int(digit) == int(product)
            assert int(product) + int(carry) == int(carried)
            known[line[-4]] = line[-3]
            assert carried == line[-1] + line[-3]
        elif line.startswith("end"):
            known.update(named(line))
        else:
            upper, before, lower, digit, carry, added = re.match(
                r"([A-L])(\d)\+([a-l])(\d)\+(\d)=(\d\d) ", line
            ).groups()
            assert (before, digit) == (known.get(upper, "0"), known[lower])
            assert int(before) + int(digit) + int(carry) == int(added)
            assert line.endswith(f" {upper}{added[1]} {added[0]}")
            known[upper] = added[1]
    assert num_rows == len(str(other))


def named(line: str) -> list[tuple[str, str]]:
    return re.findall(r"\b([A-Za-z])(\d)\b", line)


def recheck_recall(problem: Problem) -> None:
    """Facts are running sums, walks count down to nothing, and keys are last digits."""
    head, walk, ask = problem.prompt.splitlines()
    numbers = [int(number) for number in re.findall(r":(\d\d)", head)]
    start, up, down = map(int, re.fullmatch(r"walk (\d\d)\+(\d\d)-(\d\d)", walk).groups())
    facts = [(start + sum(numbers[: key + 1])) % 100 for key in range(len(numbers))]
    lines = iter(problem.solution.splitlines())
    before = start
    for key, (number, fact) in enumerate(zip(numbers, facts, strict=True)):
        assert next(lines) == f"{key}:{number:02d} {before:02d}+{number:02d} #{key}:{fact:02d}"
        before = fact
    state, asked = start, []
    for name, walk_len in re.findall(r"([a-f])(\d\d)", ask):
        for left in range(int(walk_len), 0, -1):
            between, after = (state + up) % 100, (state + up - down) % 100
            assert (
                next(lines)
                == f"{name}{left:02d} {state:02d}+{up:02d}={between:02d}-{down:02d}={after:02d}"
            )
            state = after
        asked.append(state % 10)
        state = facts[asked[-1]]
        assert next(lines) == f"key {asked[-1]} #{asked[-1]}:{state:02d}"
    assert list(lines) == [f"{ANSWER_MARK}{state:02d}"]
    assert len(set(asked)) == len(asked)


RECHECKS = {
    "countdown": recheck_countdown,
    "trace": recheck_trace,
    "multiply": recheck_multiply,
    "recall": recheck_recall,
}


@pytest.mark.parametrize(("name", "level"), ALL_LEVELS)
@settings(max_examples=12, deadline=None)
@given(seed=SEEDS)
def test_every_step_of_a_solution_is_right(name, level, seed):
    RECHECKS[name](draw(name, level, seed))


@pytest.mark.parametrize(("name", "level"), ALL_LEVELS)
@settings(max_examples=12, deadline=None)
@given(seed=SEEDS)
def test_texts_keep_the_form_and_the_bounds(name, level, seed):
    problem = draw(name, level, seed)
    assert problem.family == name
    assert problem.prompt.startswith(name)
    assert problem.prompt.endswith("\n")
    assert problem.solution.endswith(f"\n{ANSWER_MARK}{problem.answer}")
    assert MIN_SOLUTION_LEN <= len(problem.solution) <= MAX_SOLUTION_LEN
    assert len(problem.prompt) + len(problem.solution) <= MAX_TEXT_LEN
    assert problem == draw(name, level, seed)


@pytest.mark.parametrize(("name", "level"), ALL_LEVELS)
@settings(max_examples=8, deadline=None)
@given(seed=SEEDS, data=st.data())
def test_the_checker_takes_the_solution_and_no_answer_with_another_digit(name, level, seed, data):
    family, problem = FAMILIES[name], draw(name, level, seed)
    assert family.check(problem.answer, problem.solution)
    assert family.check(problem.answer, problem.solution + "<eos>")
    assert family.check(problem.answer, problem.solution + "\n")
    places = [at for at, character in enumerate(problem.answer) if character.isdigit()]
    at = data.draw(st.sampled_from(places))
    digit = data.draw(
        st.sampled_from([each for each in "0123456789" if each != problem.answer[at]])
    )
    wrong = problem.answer[:at] + digit + problem.answer[at + 1 :]
    body = problem.solution.rsplit("\n", 1)[0]
    assert not family.check(problem.answer, f"{body}\n{ANSWER_MARK}{wrong}")
    assert not family.check(problem.answer, body)
    assert not family.check(problem.answer, "")


@pytest.mark.parametrize("name", FAMILIES)
def test_lengths_grow_with_the_level_within_a_shape(name):
    means = [
        sum(len(draw(name, level, seed).solution) for seed in range(20)) / 20
        for level in range(FAMILIES[name].levels)
    ]
    shapes = [means[:3], means[3:]] if name == "countdown" else [means]
    assert all(shape == sorted(shape) for shape in shapes)


@pytest.mark.parametrize(
    ("steps", "right"),
    [
        ("6+14=20 3+8=11 20+11=31", True),
        ("14+6=20 20+3=23 23+8=31", True),
        ("3+8=11 6+11=17 17+14=31", True),
        ("6+14=20 20+11=31", False),  # 11 is not given
        ("6+14=20 3+8=11", False),  # does not join them
        ("6+14=20 3+8=11 20+11=32", False),
        ("6+14=20 6+14=20 20+11=31", False),
        ("6*14=84 84-3=81 81-8=73", False),  # right steps, wrong target
        ("6+14=20 3+8=11 20+11=31 31*1=31", False),  # a number too many
        ("14-6=8 8+3=11 31/1=31", False),
        ("6/0=0 3+8=11 20+11=31", False),
        ("6+14=20, 3+8=11, 20+11=31", False),
        ("9" * 5000 + "+1=2", False),
        ("", False),
    ],
)
def test_countdown_takes_any_right_steps_and_only_those(steps, right):
    answer = "6+14=20 3+8=11 20+11=31"
    assert FAMILIES["countdown"].check(answer, f"some search\n{ANSWER_MARK}{steps}") is right


def test_countdown_wants_a_number_as_often_as_it_is_given():
    check = FAMILIES["countdown"].check
    assert check("8+8=16 16-3=13", "answer: 8-3=5 8+5=13")
    assert not check("8+8=16 16-3=13", "answer: 8+5=13")
    assert not check("5+8=13", "answer: 8+8=16 16-3=13")
    assert check("8-3=5 5+5=10", "answer: 8+5=13 13-3=10")  # the 5 made and the 5 given
    assert not check("8-3=5 5+5=10", "answer: 5+5=10")


def test_the_last_answer_line_counts():
    assert final_answer("a\nanswer: 1\nb\nanswer: 22 <eos>") == "22"
    assert final_answer("the answer: 1") is None
    assert final_answer("answer:") is None


def test_a_problem_depends_on_split_seed_and_index_alone():
    family = FAMILIES["trace"]

    def prompt(*place):
        return family.draw(problem_rng(*place), 0).prompt

    assert prompt("train", 1, 2) == prompt("train", 1, 2)
    others = [
        ("held-out", 1, 2),
        ("train", 2, 2),
        ("train", 1, 3),
        ("train", 12, 2),
        ("train", 1, 22),
    ]
    assert len({prompt("train", 1, 2), *(prompt(*place) for place in others)}) == 1 + len(others)


@pytest.mark.parametrize("name", FAMILIES)
def test_problems_hardly_ever_repeat(name):
    """Level 0 has the fewest problems; by the birthday bound 2,000 draws of 8 million repeat once
    in four times, of a space ten times as small more than twice on average."""
    prompts = Counter(
        FAMILIES[name].draw(problem_rng("train", 5, index), 0).prompt for index in range(2000)
    )
    assert len(prompts) >= 1998


def test_old_values_are_read_that_were_not_mentioned_for_hundreds_of_characters():
    far = []
    for seed in range(5):
        solution = draw("trace", 5, seed).solution
        for match in re.finditer(r"\d\d[a-z]=([^ ]+) ", solution):
            before = solution[: match.start()]
            gaps = [len(before) - before.rindex(name) for name in re.findall("[a-z]", match[1])]
            far += [gap for gap in gaps if gap > 500]
    assert len(far) > 5 * 8
    assert max(far) > 1000


def test_unknown_families_and_levels_are_named_in_the_error():
    with pytest.raises(ValueError, match="'sums' is not known; give one of countdown, trace"):
        find_family("sums")
    assert find_family("recall") is FAMILIES["recall"]
    for name, family in FAMILIES.items():
        for level in (-1, family.levels):
            with pytest.raises(ValueError, match=f"level={level} is none of family '{name}'"):
                family.draw(random.Random(0), level)


@pytest.fixture(scope="module")
def tokenizer_module():
    spec = importlib.util.spec_from_file_location("tiny_reasoner_tokenizer", TOKENIZER_FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer(tokenizer_module, tmp_path_factory):
    """The tokenizer as our frontend loads it."""
    from zipage_lang.frontend.tokenizer import load_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer_module.write_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_frontend_round_trips_and_streams_every_family(name, tokenizer, tokenizer_module):
    for level in range(FAMILIES[name].levels):
        problem = draw(name, level)
        text = problem.prompt + problem.solution
        ids = tokenizer.encode(text)
        assert ids == [tokenizer_module.BOS_ID, *tokenizer_module.encode_text(text)]
        assert tokenizer.decode(ids) == text
        stream = tokenizer.new_detokenizer()
        assert [stream.feed([token_id]) for token_id in ids[1:]] == list(text)
        assert stream.flush() == ""


def test_the_tokenizer_takes_all_of_ascii_and_marks_the_rest(tokenizer, tokenizer_module):
    text = tokenizer_module.CHARACTERS
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert sorted(ids) == list(range(4, 4 + len(text)))
    assert ids == list(tokenizer_module.encode_text(text))
    assert tokenizer.decode(ids) == text
    assert set(tokenizer.encode("é日", add_special_tokens=False)) == {tokenizer_module.UNK_ID}
    assert tokenizer.vocab_size <= tokenizer_module.VOCAB_SIZE


def test_special_tokens_are_where_the_model_expects_them(tokenizer, tokenizer_module):
    assert tokenizer.bos_token_id == tokenizer_module.BOS_ID == tokenizer.token_id("<bos>")
    assert tokenizer.eos_token_ids == [tokenizer_module.EOS_ID] == [tokenizer.token_id("<eos>")]
    assert tokenizer.token_id("<pad>") == tokenizer_module.PAD_ID
    assert tokenizer.decode([1, 5, 2]) == " "


def test_a_user_message_becomes_a_prompt(tokenizer):
    prompt = draw("recall", 0).prompt
    expected = tokenizer.encode(prompt)
    for content in (prompt, prompt.rstrip("\n")):
        chat = tokenizer.render_chat([{"role": "user", "content": content}])
        assert tokenizer.encode(chat, add_special_tokens=False) == expected
    two = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert tokenizer.render_chat(two) == "<bos>a\nb<eos>"
    with pytest.raises(ValueError, match="no system"):
        tokenizer.render_chat([{"role": "system", "content": "a"}])
