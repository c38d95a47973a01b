"""A report: one HTML file that needs nothing beside it, and no network.

The page is made of sections, a section of blocks: tables, pictures, attention views. Pictures are
SVG inside the page, circuitsvis's script is there once, and the page's own content policy forbids
it to load anything. All text is escaped.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from lenprobe.views import AttentionView, script_html

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under headings; the first cell of a row names it."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    sortable: bool = False
    """A click on a heading sorts by its column."""
    prose: bool = False
    """The cells hold sentences."""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"row {list(row)} has {len(row)} cells for {len(self.columns)} columns"
                )


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A drawing, as an SVG that the page carries."""

    svg: str
    """Base64 of the SVG."""
    alt: str
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Views:
    """Attention views side by side, each under its title."""

    views: Sequence[tuple[str, AttentionView]]
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Commands:
    """Lines to type."""

    lines: Sequence[str]


Block: TypeAlias = Table | Picture | Views | Commands


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading, what it says in plain words, and what shows it."""

    title: str
    text: Sequence[str] = field(default=())
    """Paragraphs."""
    blocks: Sequence[Block] = field(default=())


def picture_of(figure: "Figure", *, alt: str, caption: str = "") -> Picture:
    """A matplotlib figure as a picture of a report.

    >>> from matplotlib.figure import Figure
    >>> picture_of(Figure(figsize=(1, 1)), alt="nothing").alt
    'nothing'
    """
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "lenprobe"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return Picture(svg=base64.b64encode(buffer.getvalue()).decode(), alt=alt, caption=caption)


def render(title: str, lead: str, sections: Sequence[Section], *, footer: str = "") -> str:
    """The whole page as text.

    >>> page = render("A title", "What was found.", [Section(title="One", text=["<b>"])])
    >>> "&lt;b&gt;" in page
    True
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("lenprobe", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests["kind"] = lambda block, name: type(block).__name__ == name
    has_views = any(isinstance(block, Views) for part in sections for block in part.blocks)
    return environment.get_template("report.html").render(
        title=title,
        lead=lead,
        sections=sections,
        footer=footer,
        script=Markup(script_html()) if has_views else "",
        sorts=any(
            isinstance(block, Table) and block.sortable
            for part in sections
            for block in part.blocks
        ),
        fragment=lambda view: Markup(view.fragment()),
    )


def write(
    path: str | Path, title: str, lead: str, sections: Sequence[Section], *, footer: str = ""
) -> Path:
    """Writes ``render``'s page, its folder too where there is none; returns its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(title, lead, sections, footer=footer), encoding="utf-8")
    return path
