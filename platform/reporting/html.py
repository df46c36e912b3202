"""What all pages are made with: the templates' environment, how numbers are written, pictures and scripts inside."""

import base64
import hashlib
from collections.abc import Mapping
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import jinja2
from PIL import Image

from mcis.platform.runs.scores import SCORED_OUTPUTS, grouped

_TEMPLATES = Path(__file__).parent / "templates"


def script(name: str) -> dict[str, str]:
    """The script of the file of this name beside the templates.

    Returns:
        text: ASCII, without the end tag of a script.
        hash: what a content security policy names it by, so that the page runs this script and no other.
    """
    text = (_TEMPLATES / name).read_text(encoding="ascii")
    return {"text": text, "hash": f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"}


def render(template: str, view: Mapping[str, Any]) -> str:
    """A page as text that UTF-8 can hold; jinja2.UndefinedError where the template uses a name that the view lacks.

    A file name that is no UTF-8 reaches Python with lone surrogates; they are shown as \\udcff.
    """
    page = _templates().get_template(template).render(view)
    return page.encode("utf-8", "backslashreplace").decode()


_CONTROLS = {c: "\N{REPLACEMENT CHARACTER}" for c in [*range(9), 11, 12, *range(14, 32), *range(127, 160)]}
"""Control characters, which HTML forbids, and what stands in for them."""


def printable(text: str) -> str:
    """A text as a page shows it, for data that a script shows: as `render` writes it, but for the escaping."""
    return text.translate(_CONTROLS).encode("utf-8", "backslashreplace").decode()


def _templates() -> jinja2.Environment:
    """Escapes every value, raises for names that the view lacks, replaces control characters, which HTML forbids."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: "–" if value is None else value.translate(_CONTROLS) if type(value) is str else value,
    )
    templates.filters |= {
        "count": grouped,
        "decimal": "{:.1f}".format,
        "duration": lambda seconds: None if seconds is None else timedelta(seconds=round(seconds)),
        "exact": float,
        "png": lambda picture: data_uri(picture, "PNG"),
        "jpeg": lambda picture: data_uri(picture, "JPEG"),
    }
    templates.globals |= {"zip": zip, "scored_outputs": SCORED_OUTPUTS}
    return templates


def encode(picture: Image.Image, format: Literal["JPEG", "PNG"]) -> bytes:
    """A picture as the content of a file."""
    buffer = BytesIO()
    picture.save(buffer, format, **({"quality": 88} if format == "JPEG" else {}))
    return buffer.getvalue()


def data_uri(picture: Image.Image | bytes, format: Literal["JPEG", "PNG"]) -> str:
    """A picture, or the content of its file, as a URI that holds it."""
    content = picture if isinstance(picture, bytes) else encode(picture, format)
    return f"data:image/{format.lower()};base64,{base64.b64encode(content).decode()}"
