"""The report: one file, nothing fetched, everything escaped, well formed."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.figure import Figure

from lenprobe.plots import plot_singular_values
from lenprobe.report import Commands, Section, Table, Views, picture_of, render, write
from lenprobe.views import attention_view

VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """Collects what a page would load and checks that its elements nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data


def check_self_contained(text: str) -> Page:
    """The page parses, and names no address but parts of itself."""
    page = Page(text)
    assert all(
        address.startswith(("data:image/svg+xml;base64,", "#")) for address in page.addresses
    )
    assert "default-src 'none'" in text
    assert not re.search(r"@import|url\(|https?://", text)
    return page


@pytest.fixture
def sections() -> list[Section]:
    figure = Figure(figsize=(3, 2))
    plot_singular_values({"a": np.array([2.0, 1.0])}, ax=figure.subplots())
    view = attention_view(np.eye(2)[None], ["</script>", "<b>"])
    return [
        Section(
            title="<Tables>",
            text=["<script>alert(1)</script>"],
            blocks=[Table(columns=["", "a&b"], rows=[["<i>", "1"]], caption="one")],
        ),
        Section(
            title="Pictures",
            blocks=[
                picture_of(figure, alt='"alt"', caption="<caption>"),
                Views(views=[("first <b>", view), ("second", view)]),
                Commands(lines=["lenprobe demo --offset 3 > <file>"]),
            ],
        ),
    ]


def test_page_is_well_formed_and_loads_nothing(sections) -> None:
    page = check_self_contained(render("Title <b>", "Lead & more", sections, footer="foot"))
    assert page.tags.count("table") == page.tags.count("img") == 1
    assert "<script>alert(1)</script>" in page.text and "first <b>" in page.text
    assert "b" not in page.tags and "i" not in page.tags


def test_script_travels_once_and_only_where_there_are_views(sections) -> None:
    with_views = render("t", "l", sections)
    without = render("t", "l", sections[:1])
    assert with_views.count("DecompressionStream") == 1
    assert with_views.count("CircuitsVis.render(") == 2
    assert "<script>" not in without and len(without) < 10_000


def test_same_input_same_page(sections) -> None:
    assert render("t", "l", sections) == render("t", "l", sections)


def test_write_makes_the_folder(sections, tmp_path) -> None:
    path = write(tmp_path / "new" / "report.html", "t", "l", sections)
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_ragged_table_is_refused() -> None:
    with pytest.raises(ValueError, match="3 cells for 2 columns"):
        Table(columns=["a", "b"], rows=[["1", "2", "3"]])
