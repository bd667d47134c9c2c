"""The output items of a response, and the events that tell them while they grow.

An item is a thought, a message or a function call; one is open at a time.
Knows nothing of engines, requests or of the response around the items.
"""

import uuid
from typing import Any

from zipage_lang.server.openai.call_reader import CallPiece
from zipage_lang.server.openai.chat_reply import new_call_id
from zipage_lang.server.openai.sample_reader import Told

Json = dict[str, Any]
PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


class OutputItems:
    """One response's. `items` holds those that are whole."""

    def __init__(self) -> None:
        self.items: list[Json] = []
        self._open: Json | None = None
        self._call_index = -1

    def feed(self, told: Told) -> list[Json]:
        """The events of what is new."""
        events = self._add_text("reasoning", told.thought) if told.thought else []
        for piece in told.pieces:
            if isinstance(piece, CallPiece):
                events += self._add_call(piece)
            else:
                events += self._add_text("message", piece)
        return events

    def finish(self, status: str) -> list[Json]:
        """The events of the end; `status` is that of the item that was open."""
        events = [] if self.items or self._open else self._begin("message")
        return events + self._close(status)

    def _add_text(self, kind: str, text: str) -> list[Json]:
        events = self._begin(kind)
        assert self._open is not None
        self._open["content"][0]["text"] += text
        event = self._at(f"response.{_part_kind(kind)}.delta", content_index=0, delta=text)
        if kind == "message":
            event["logprobs"] = []
        return [*events, event]

    def _add_call(self, piece: CallPiece) -> list[Json]:
        events = []
        if piece.index != self._call_index:
            self._call_index = piece.index
            events = self._close("completed")
            self._open = _new_item("function_call")
            self._open |= {"call_id": new_call_id(), "name": piece.name, "arguments": ""}
            events.append(self._added())
        if piece.arguments:
            assert self._open is not None
            self._open["arguments"] += piece.arguments
            kind = "response.function_call_arguments.delta"
            events.append(self._at(kind, delta=piece.arguments))
        return events

    def _begin(self, kind: str) -> list[Json]:
        if self._open is not None and self._open["type"] == kind:
            return []
        events = self._close("completed")
        self._open = _new_item(kind)
        events.append(self._added())
        part = _text_part(kind)
        self._open["content"].append(part)
        events.append(self._at("response.content_part.added", content_index=0, part=dict(part)))
        return events

    def _close(self, status: str) -> list[Json]:
        item = self._open
        if item is None:
            return []
        item["status"] = status
        if item["type"] == "function_call":
            told = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._at("response.function_call_arguments.done", **told)]
        else:
            events = self._close_text(item)
        events.append(self._at("response.output_item.done", item=_copied(item)))
        self.items.append(item)
        self._open = None
        return events

    def _close_text(self, item: Json) -> list[Json]:
        part = item["content"][0]
        kind = f"response.{_part_kind(item['type'])}.done"
        done = self._at(kind, content_index=0, text=part["text"])
        if item["type"] == "message":
            done["logprobs"] = []
        return [done, self._at("response.content_part.done", content_index=0, part=dict(part))]

    def _added(self) -> Json:
        assert self._open is not None
        event = self._at("response.output_item.added", item=_copied(self._open))
        del event["item_id"]
        return event

    def _at(self, kind: str, **fields: Any) -> Json:
        assert self._open is not None
        place = {"output_index": len(self.items), "item_id": self._open["id"]}
        return {"type": kind, **place, **fields}


def _new_item(kind: str) -> Json:
    item: Json = {
        "id": f"{PREFIXES[kind]}_{uuid.uuid4().hex}",
        "type": kind,
        "status": "in_progress",
    }
    if kind == "reasoning":
        return {**item, "summary": [], "content": []}
    return {**item, "role": "assistant", "content": []} if kind == "message" else item


def _copied(item: Json) -> Json:
    """As it stands: the item itself goes on growing."""
    return (
        {**item, "content": [dict(part) for part in item["content"]]}
        if "content" in item
        else {**item}
    )


def _part_kind(kind: str) -> str:
    return "reasoning_text" if kind == "reasoning" else "output_text"


def _text_part(kind: str) -> Json:
    part: Json = {"type": _part_kind(kind), "text": ""}
    return part if kind == "reasoning" else {**part, "annotations": [], "logprobs": []}
