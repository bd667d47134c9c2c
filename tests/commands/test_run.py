"""`zipage run`: which program of a file, its arguments from words, and how its mistakes read."""

import json

import pytest

from zipage_lang.commands.program_file import find_program, read_arguments

HEAD = "import zipage_lang as zipage\n"
ECHO = HEAD + (
    "@zipage.function\n"
    "def echo(s, text: str, times: int = 1, loud: bool = False, extra: list = ()):\n"
    "    s += f'{text} ' * times + zipage.gen('said', max_tokens=6)\n"
    "    s['loud'] = loud\n"
)


@pytest.fixture
def file(tmp_path):
    """Writes a program file."""

    def write(text, name="program.py"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_variables_are_printed_where_nothing_is_returned(zipage, asked, file):
    result = zipage("run", file(ECHO), "go", "times=2", "--max-running", 3)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("said: go go")
    assert "loud: False" in result.stdout
    assert asked == [{"model": "smollm2-135m", "max_running": 3}]


def test_the_result_is_printed_or_the_text_or_json(zipage, asked, file):
    path = file(
        HEAD + "@zipage.function\ndef f(s):\n    s += 'so '\n    s['a'] = 1\n    return 42\n"
    )
    assert zipage("run", path).stdout == "42\n"
    assert zipage("run", path, "--text").stdout == "so \n"
    assert json.loads(zipage("run", path, "--json").stdout) == {
        "result": 42,
        "variables": {"a": 1},
    }


def test_what_a_script_does_by_itself_is_not_done(zipage, asked, file):
    path = file(ECHO + "if __name__ == '__main__':\n    raise SystemExit('by itself')\n")
    assert zipage("run", path, "go").exit_code == 0


def test_files_beside_it_can_be_imported(zipage, asked, file):
    file("WORD = 'beside'\n", "helper_beside.py")
    path = file(
        "from helper_beside import WORD\n" + HEAD + "@zipage.function\ndef f(s): return WORD\n"
    )
    assert zipage("run", path).stdout == "beside\n"


def test_main_or_the_named_one_is_run(file):
    two = "@zipage.function\ndef {}(s): pass\n@zipage.function\ndef other(s): pass\n"
    assert repr(find_program(file(HEAD + two.format("main")))) == "<program main>"
    path = file(HEAD + two.format("first"))
    assert repr(find_program(path + ":other")) == "<program other>"
    with pytest.raises(ValueError, match=r"several programs; name one: .*:first, .*:other"):
        find_program(path)
    with pytest.raises(ValueError, match="did you mean 'other'"):
        find_program(path + ":othr")


def test_arguments_are_read_by_their_types(file):
    echo = find_program(file(ECHO))
    assert read_arguments(echo, ["a=b", "2", "loud=yes", "extra=[1, 2]"]) == {
        "text": "a=b",
        "times": 2,
        "loud": True,
        "extra": [1, 2],
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "missing: text"),
        (["a", "many"], "times='many' must be int"),
        (["a", "loud=perhaps"], "loud='perhaps' must be bool"),
        (["a", "extra=[1"], r"extra='\[1' must be JSON"),
        (["a", "tims=3"], "did you mean 'times'"),
        (["a", "1", "no", "[]", "e"], "5 arguments are too many"),
    ],
)
def test_a_mistake_in_the_arguments_shows_what_the_program_takes(file, words, message):
    with pytest.raises(ValueError, match=message):
        read_arguments(find_program(file(ECHO)), words)


@pytest.mark.parametrize(
    ("text", "message"),
    [("x = 1\n", "has no program"), ("[]\n", "decorate a function with @zipage.function")],
)
def test_a_file_without_a_program_says_what_to_do(zipage, file, text, message):
    result = zipage("run", file(text))
    assert result.exit_code == 2
    assert message in result.stderr


def test_an_error_of_the_program_is_shown_from_its_own_line_on(zipage, asked, file):
    path = file(HEAD + "@zipage.function\ndef f(s, x: int):\n    return 1 // x\n")
    result = zipage("run", path, 0)
    assert result.exit_code == 1
    assert "ZeroDivisionError" in result.stderr
    assert f'File "{path}", line 4, in f' in result.stderr
    assert "commands/run.py" not in result.stderr


def test_a_file_that_is_no_python_shows_where(zipage, file):
    result = zipage("run", file("def f(:\n"))
    assert result.exit_code == 1
    assert "line 1" in result.stderr
    assert "importlib" not in result.stderr
