"""What the tests of pages share: a parser that checks what holds for every page."""

import re
from base64 import b64decode
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

VOID = {"meta", "link", "img", "source", "br", "hr", "input"}
LINK = re.compile(r"#[a-z0-9-]+")


class Page(HTMLParser):
    """A page's elements, its text, and by section the texts of its table cells and the values of its figures.

    Fails where the page is not nested, loads something from outside, runs a script, links to what it has not, or has a
    picture that does not decode or is not described.

    Attributes:
        pictures: of `img` elements, in their order.
    """

    def __init__(self, page: Path | str):
        super().__init__()
        self.source = page.read_text(encoding="utf-8") if isinstance(page, Path) else page
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.rows: dict[str, list[list[str]]] = {"": []}
        self.values: dict[str, list[float]] = {}
        self.text, self._open, self._section = "", [""], ""
        self.feed(self.source)
        self.close()
        assert self._open == [""]
        self._check_self_contained()
        self.pictures = [self._picture(attrs) for attrs in self.of("img")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        assert len(values) == len(attrs), f"<{tag}> has an attribute twice"
        self.elements.append((tag, values))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "section":
            self._section = values["id"]
        rows = self.rows.setdefault(self._section, [])
        if tag == "tr":
            rows.append([])
        if tag in ("td", "th"):
            rows[-1].append("")
        if tag == "data":
            self.values.setdefault(self._section, []).append(float(values["value"]))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += data
            if {"td", "th"} & set(self._open):
                self.rows[self._section][-1][-1] += data

    def of(self, tag: str) -> list[dict[str, str]]:
        return [attrs for name, attrs in self.elements if name == tag]

    def _check_self_contained(self) -> None:
        ids = {attrs["id"] for _, attrs in self.elements if "id" in attrs}
        for tag, attrs in self.elements:
            assert tag not in {"script", "iframe", "object", "embed", "form"}
            assert tag != "th" or attrs["scope"] in {"col", "row", "rowgroup"}
            for name, value in attrs.items():
                assert not name.startswith("on")
                if name in {"src", "srcset"} or (name == "href" and tag != "a"):
                    assert value.startswith("data:"), (tag, name)
                elif name == "href":
                    assert LINK.fullmatch(value)
                    assert value[1:] in ids
                elif name == "style":
                    assert "url(" not in value
        (style,) = re.findall(r"<style>(.*?)</style>", self.source, re.DOTALL)
        assert "url(" not in style
        assert "@import" not in style
        policies = [a["content"] for a in self.of("meta") if a.get("http-equiv") == "Content-Security-Policy"]
        assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]
        for source in self.of("source"):
            assert source["media"] == "(prefers-color-scheme: dark)"
            assert _decoded(source["srcset"]).convert("L").resize((1, 1)).getpixel((0, 0)) < 100  # type: ignore[operator]

    def _picture(self, attrs: dict[str, str]) -> Image.Image:
        assert attrs["alt"]
        picture, shown = _decoded(attrs["src"]), (int(attrs["width"]), int(attrs["height"]))
        assert picture.size in (shown, (2 * shown[0], 2 * shown[1]))  # plots are drawn at twice the density
        return picture


def _decoded(uri: str) -> Image.Image:
    picture = Image.open(BytesIO(b64decode(uri.partition(",")[2])))
    picture.load()
    return picture


@pytest.fixture(scope="session")
def parsed() -> type[Page]:
    """Parses and checks a page, given its file or its text."""
    return Page
