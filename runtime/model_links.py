"""Where a model folder's symbolic links may lead: an archive's link must not read another file.

What a folder's files say is told to clients (the chat template, the tokenizer), so a link in a
downloaded archive could publish any file of this machine. Links of people and of the hub's cache
lead to a file of the same name, or to one in the cache's own folder of contents.
Knows nothing of what is in the files.
"""

from pathlib import Path

HUB_CONTENTS = "blobs"  # of the hub's cache, beside the folder of its snapshots


def check_links(folder: Path) -> None:
    """Raise ValueError for a link out of the folder that no person and no cache would make."""
    inside = folder.resolve()
    for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):  # no loader looks deeper
        if not path.is_symlink():
            continue
        target = path.resolve()
        if _is_harmless(path.name, target, inside):
            continue
        raise ValueError(
            f"{path} is a link to {target}, outside of the model's folder and of another name; "
            "replace it by the file itself if that is meant"
        )


def _is_harmless(name: str, target: Path, inside: Path) -> bool:
    contents = inside.parent.parent / HUB_CONTENTS  # MODEL/snapshots/REVISION -> MODEL/blobs
    return (
        target.name == name
        or target.is_relative_to(inside)
        or (inside.parent.name == "snapshots" and target.is_relative_to(contents))
    )
