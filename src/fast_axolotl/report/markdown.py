"""Write a document as Markdown, without charts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from fast_axolotl.report.document import (
    Block,
    Bullets,
    Card,
    Cell,
    Chart,
    Document,
    Paragraph,
    Table,
)

_SPECIAL = re.compile(r"[\\`*\[\]<>&|#~]|(?<![^\W_])_|_(?![^\W_])")
"""What Markdown may take for its own. An underscore inside a word is none: a figure's name."""
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}


def document_markdown(document: Document) -> str:
    """The whole document; a title that is empty is left out."""
    title = [f"## {escape_markdown(document.title)}"] if document.title else []
    return "\n\n".join([*title, *_parts(document.blocks)]) + "\n"


def escape_markdown(text: str) -> str:
    """Texts are data: nothing of them is a style, a tag, a column or a line of its own."""
    return _SPECIAL.sub(
        lambda match: _ENTITIES.get(match[0], f"\\{match[0]}"), " ".join(text.split())
    )


def _parts(blocks: Iterable[Block]) -> Iterator[str]:
    """Paragraphs, between which an empty line stands."""
    for block in blocks:
        if isinstance(block, Paragraph) and block.style == "log":
            yield "```text\n" + block.text.replace("```", "'''") + "\n```"
        elif isinstance(block, Paragraph):
            text = escape_markdown(block.text)
            is_warning = block.style in ("alarm", "warning")
            yield f"> **{text}**" if is_warning else text
        elif isinstance(block, Bullets):
            if block.lines:
                yield "\n".join(f"- {escape_markdown(line)}" for line in block.lines)
        elif isinstance(block, Card):
            yield from _card(block)
        elif isinstance(block, Table):
            yield "\n".join(_table(block))
        elif not isinstance(block, Chart) and any(parts := [*_parts(block.blocks)]):
            yield f"### {escape_markdown(block.title)}"
            yield from parts


def _card(card: Card) -> Iterator[str]:
    badges = ", ".join(title for _, title in card.badges)
    name = ": ".join(escape_markdown(part) for part in (card.name, badges) if part)
    yield (
        f"**{name}.** {escape_markdown(card.headline)}" if name else escape_markdown(card.headline)
    )
    if card.text:
        yield escape_markdown(card.text)
    if card.evidence:
        yield "\n".join(f"- {escape_markdown(line)}" for line in card.evidence)
    if card.action:
        yield f"**Next:** {escape_markdown(card.action)}"
    yield from map(escape_markdown, card.notes)


def _table(table: Table) -> Iterator[str]:
    if table.rows or table.header:
        header = table.header or [""] * len(table.rows[0])
        yield _line(header)
        yield _line(["---", *["---:" if table.header else "---"] * (len(header) - 1)])
    for row in table.rows:
        yield _line(row)


def _line(cells: Sequence[str | Cell]) -> str:
    texts = []
    for cell in cells:
        text = escape_markdown(cell if isinstance(cell, str) else cell.text)
        texts.append(f"**{text}**" if text and isinstance(cell, Cell) and cell.tone else text)
    return f"| {' | '.join(texts)} |"
