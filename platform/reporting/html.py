"""What all pages are made with: the templates' environment, how numbers are written, pictures inside of the page."""

import base64
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import jinja2
from PIL import Image

from mcis.platform.runs.scores import grouped, percent


def render(template: str, view: Mapping[str, Any]) -> str:
    """A page as text that UTF-8 can hold.

    A file name that is no UTF-8 reaches Python with lone surrogates; they are shown as \\udcff.

    Raises:
        jinja2.UndefinedError: the template uses a name that the view lacks.
    """
    page = _templates().get_template(template).render(view)
    return page.encode("utf-8", "backslashreplace").decode()


def _templates() -> jinja2.Environment:
    """Escapes every value, raises for names that the view lacks, replaces control characters, which HTML forbids."""
    controls = {c: "\N{REPLACEMENT CHARACTER}" for c in [*range(9), 11, 12, *range(14, 32), *range(127, 160)]}
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: "–" if value is None else value.translate(controls) if type(value) is str else value,
    )
    templates.filters |= {
        "count": grouped,
        "decimal": "{:.1f}".format,
        "duration": duration,
        "exact": float,
        "share": percent,
    }
    templates.globals["zip"] = zip
    return templates


def duration(seconds: float | None) -> str:
    """4.2 s, 3 min 07 s, 2 h 05 min."""
    if seconds is None:
        return "–"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def encode(picture: Image.Image, format: Literal["JPEG", "PNG"]) -> bytes:
    """A picture as the content of a file."""
    buffer = BytesIO()
    picture.save(buffer, format, **({"quality": 88} if format == "JPEG" else {}))
    return buffer.getvalue()


def data_uri(content: bytes, format: Literal["JPEG", "PNG"]) -> str:
    """A picture's file as a URI that holds it."""
    return f"data:image/{format.lower()};base64,{base64.b64encode(content).decode()}"


def picture_uri(picture: Image.Image, format: Literal["JPEG", "PNG"]) -> str:
    """A picture as a URI that holds it."""
    return data_uri(encode(picture, format), format)
