"""Every public name explains itself: purpose, parameters, errors, and an example that runs.

Examples see `zipage` and a default backend that answers every call with "42".
"""

import doctest
import inspect
import re

import pytest

import zipage_lang as zipage
from zipage_lang.testing import ScriptedBackend

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
MIN_LEN = 40  # characters of prose; less says nothing

ASKED = {
    "what each parameter means (a line 'Parameters:', or 'Parameters: none.')": re.compile(
        r"^\s*(Parameters|Args|Parameters and errors)\b", re.MULTILINE
    ),
    "which errors it raises, and when (a word of 'Errors:' or 'Raises')": re.compile(
        r"\b(Errors?|Raises?|raises?|errors)\b"
    ),
    "an example of one or two lines that starts with '>>> '": re.compile(r"^\s*>>> ", re.MULTILINE),
}


def public_names():
    return sorted([*zipage.__all__, *(f"testing.{name}" for name in zipage.testing.__all__)])


def find(name):
    value = zipage
    for part in name.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", public_names())
def test_public_name_says_what_it_is_for_and_takes_and_raises(name):
    text = inspect.getdoc(find(name)) or ""
    own = find(name).__doc__
    assert own, f"zipage.{name} has no docstring of its own"
    prose = re.sub(r"(?s)>>>.*", "", text).strip()
    assert len(prose) >= MIN_LEN, f"zipage.{name}: the docstring says too little: {prose!r}"
    missing = [what for what, pattern in ASKED.items() if not pattern.search(text)]
    assert not missing, f"zipage.{name}: its docstring lacks " + "; and ".join(missing)


@pytest.mark.parametrize("name", public_names())
def test_public_names_example_runs_as_printed(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # examples may write files
    text = inspect.getdoc(find(name)) or ""
    namespace = {"zipage": zipage, name.rpartition(".")[2]: find(name)}
    example = doctest.DocTestParser().get_doctest(text, namespace, f"zipage.{name}", None, 0)
    assert example.examples, f"zipage.{name} has no example"
    heard = []
    zipage.set_default_backend(ScriptedBackend("42"))
    try:
        doctest.DocTestRunner(verbose=False, optionflags=FLAGS).run(example, out=heard.append)
    finally:
        zipage.set_default_backend(None)
    assert not heard, f"zipage.{name}: " + "".join(heard)
