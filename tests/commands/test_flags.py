"""Flags made from settings: every field once, and its value back in the settings."""

import dataclasses
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from zipage_lang.commands.flag_groups import ENGINE_GROUPS, SERVER_GROUPS
from zipage_lang.flags import FlagGroup, takes_flags, type_text
from zipage_lang.runtime.config import EngineConfig, option_homes
from zipage_lang.runtime.documented import documented
from zipage_lang.server.config import ServerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    rows: int = documented(4, "how many; None: never shown")
    share: float | None = documented(None, "of it; None: all")
    mode: Literal["slow", "fast"] = documented("slow", "how")
    caching: bool = documented(True, "keep things")
    verbose: bool = documented(False, "say more")
    overlap: bool | None = documented(None, "either way")
    keys: tuple[str, ...] = documented((), "several")


@pytest.fixture
def given():
    """What a command with these flags was given."""

    def run(*arguments, env=None, **group):
        seen = []
        group = {"heading": "Things", "settings": Settings, **group}
        app = typer.Typer()

        @app.command()
        @takes_flags(settings=[FlagGroup(**group)])
        def command(
            word: Annotated[str, typer.Argument()] = "", *, settings: dict[str, Any]
        ) -> None:
            seen.append((word, settings))

        result = CliRunner().invoke(app, list(arguments), env=env)
        assert result.exit_code == 0, result.output
        return result.stdout if "--help" in arguments else seen[0]

    return run


def test_flags_that_are_not_given_leave_the_fields_alone(given):
    assert given("hello") == ("hello", {})


def test_each_kind_of_field_takes_its_kind_of_value(given):
    _, settings = given(
        *("--rows", "7", "--share", "0.5", "--mode", "fast", "--no-caching", "--verbose"),
        *("--no-overlap", "--key", "a", "--key", "b"),
    )
    assert settings == {
        "rows": 7,
        "share": 0.5,
        "mode": "fast",
        "caching": False,
        "verbose": True,
        "overlap": False,
        "keys": ["a", "b"],
    }
    Settings(**settings)


def test_the_help_tells_what_it_is_for_and_the_default(given):
    text = " ".join(given("--help").split())
    assert "how many" in text
    assert "[default: 4]" in text
    assert "of it; unset: all" in text
    assert "slow|fast" in text
    assert "--no-verbose" not in text


def test_a_command_s_own_default_is_given_where_the_field_has_another(given):
    assert given(defaults={"rows": 9}) == ("", {"rows": 9})
    assert given("--rows", "4", defaults={"rows": 9}) == ("", {})


def test_a_flag_may_be_read_from_the_environment(given):
    group = {"environment": {"rows": "ROWS"}}
    assert given(env={"ROWS": "8"}, **group) == ("", {"rows": 8})
    assert given("--rows", "2", env={"ROWS": "8"}, **group) == ("", {"rows": 2})


def test_only_and_skip_choose_fields(given):
    assert "--share" not in given("--help", only=("rows",))
    assert "--rows" not in given("--help", skip=("rows",))


def test_the_first_of_two_groups_owns_a_name_that_both_have():
    seen = {}

    @takes_flags(
        first=[FlagGroup(heading="A", settings=Settings, only=("rows",))],
        second=[FlagGroup(heading="B", settings=Settings, only=("rows", "share"))],
    )
    def command(*, first: dict[str, Any], second: dict[str, Any]) -> None:
        seen.update(first=first, second=second)

    command(rows=1, share=0.1)
    assert seen == {"first": {"rows": 1}, "second": {"share": 0.1}}


def test_every_engine_option_but_the_model_is_a_flag_with_its_help():
    flags = {flag.name: flag for group in ENGINE_GROUPS for flag in group.flags()}
    assert set(flags) == set(option_homes()) - {"model"}
    assert all(flag.help for flag in flags.values())
    EngineConfig.from_options(**{name: flag.default for name, flag in flags.items()})


def test_every_server_option_is_a_flag_with_its_help():
    flags = {flag.name: flag for group in SERVER_GROUPS for flag in group.flags()}
    assert set(flags) == {field.name for field in dataclasses.fields(ServerConfig)}
    assert all(flag.help for flag in flags.values())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (int | None, "whole number"),
        (Literal["a", "b", "c"], "a, b or c"),
        (tuple[str, ...], "texts"),
        (str | dict[str, Any] | bool | None, "text or mapping or on or off"),
    ],
)
def test_a_type_is_told_in_words(kind, text):
    assert type_text(kind) == text
