"""What the author writes by himself: chat messages, text that is kept, media that can't be.

Knows nothing of states, tokens or templates.
"""

from typing import Any

from zipage_lang.ir import Concat, Expr, Keep, Role, RoleBegin, RoleEnd, parts_of


def keep(text: str) -> Keep:
    """Text that must never be compacted, wherever it stands.

    Later calls of this state and its branches protect all tokens up to the end of `text`: this
    text, and everything before it, thoughts too. What an earlier call had dropped is computed
    again, whole. So each `keep` costs the memory of all that stands before it, for good; text
    before the first gen is protected without it.

    Parameters:
        text: the author's constant text.

    Errors: ValueError for anything but a string; what is generated can't be kept as it comes.

    >>> f = zipage.function(lambda s: s.append("Q" + zipage.gen("a") + zipage.keep("Rule: sum.")))
    >>> f.run().text().endswith("Rule: sum.")
    True
    """
    if not isinstance(text, str):
        raise ValueError(f"keep({text!r}): give a string; append gens before or after it")
    return Keep(text)


def image(path: Any = None, *arguments: Any, **options: Any) -> Expr:
    """Not possible here: the models take text only. It is there to say so at once.

    Parameters: as in SGLang; none is looked at.

    Errors: ValueError, always.

    >>> zipage.image("cat.png")
    Traceback (most recent call last):
    ValueError: image('cat.png'): the models of this engine take text only; describe it in words
    """
    raise ValueError(
        f"image({path!r}): the models of this engine take text only; describe it in words"
    )


def video(path: Any = None, *arguments: Any, **options: Any) -> Expr:
    """Not possible here: the models take text only. It is there to say so at once.

    Parameters: as in SGLang; none is looked at.

    Errors: ValueError, always.

    >>> zipage.video("cat.mp4")
    Traceback (most recent call last):
    ValueError: video('cat.mp4'): the models of this engine take text only; describe it in words
    """
    raise ValueError(
        f"video({path!r}): the models of this engine take text only; describe it in words"
    )


def _role(role: Role, body: Any) -> Concat:
    return Concat((RoleBegin(role), *parts_of(body), RoleEnd(role)))


def system(body: Any) -> Concat:
    """A system message, written as the model's chat template has it.

    Parameters:
        body: a string or expression, the message's content.

    Errors: ValueError for a body that can't be appended, and where it is appended inside another
    message.

    >>> f = zipage.function(lambda s: s.append(zipage.system("hi")))
    >>> f.run().messages()[-1]["role"]
    'system'
    """
    return _role("system", body)


def user(body: Any) -> Concat:
    """A user message, written as the model's chat template has it.

    Parameters:
        body: a string or expression, the message's content.

    Errors: ValueError for a body that can't be appended, and where it is appended inside another
    message.

    >>> f = zipage.function(lambda s: s.append(zipage.user("hi")))
    >>> f.run().messages()[-1]["role"]
    'user'
    """
    return _role("user", body)


def assistant(body: Any) -> Concat:
    """An assistant message; with a gen inside it opens just as the template asks for a reply.

    Parameters:
        body: a string or expression, the message's content.

    Errors: ValueError for a body that can't be appended, and where it is appended inside another
    message.

    >>> f = zipage.function(lambda s: s.append(zipage.assistant(zipage.gen("a"))))
    >>> f.run().messages()[-1]["role"]
    'assistant'
    """
    return _role("assistant", body)


def system_begin() -> RoleBegin:
    """Open a system message, to be closed by `system_end()`.

    Parameters: none. Errors: ValueError where it is appended inside another message.

    >>> zipage.system_begin() + "hi" + zipage.system_end() == zipage.system("hi")
    True
    """
    return RoleBegin("system")


def system_end() -> RoleEnd:
    """Close the message that `system_begin()` opened.

    Parameters: none. Errors: ValueError where it is appended and no system message is open.

    >>> zipage.system_end()
    RoleEnd(role='system')
    """
    return RoleEnd("system")


def user_begin() -> RoleBegin:
    """Open a user message, to be closed by `user_end()`.

    Parameters: none. Errors: ValueError where it is appended inside another message.

    >>> zipage.user_begin() + "hi" + zipage.user_end() == zipage.user("hi")
    True
    """
    return RoleBegin("user")


def user_end() -> RoleEnd:
    """Close the message that `user_begin()` opened.

    Parameters: none. Errors: ValueError where it is appended and no user message is open.

    >>> zipage.user_end()
    RoleEnd(role='user')
    """
    return RoleEnd("user")


def assistant_begin() -> RoleBegin:
    """Open an assistant message, to be closed by `assistant_end()`.

    Parameters: none. Errors: ValueError where it is appended inside another message.

    >>> zipage.assistant_begin() + "hi" + zipage.assistant_end() == zipage.assistant("hi")
    True
    """
    return RoleBegin("assistant")


def assistant_end() -> RoleEnd:
    """Close the message that `assistant_begin()` opened.

    Parameters: none. Errors: ValueError where it is appended and no assistant message is open.

    >>> zipage.assistant_end()
    RoleEnd(role='assistant')
    """
    return RoleEnd("assistant")
