"""Renders pages from templates, and embeds pictures and scripts in them."""

import base64
import functools
import hashlib
import zlib
from collections.abc import Mapping
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import jinja2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mcis.platform.runs.scores import SCORED_OUTPUTS, format_count

_TEMPLATES = Path(__file__).parent / "templates"
_QUALITY = 88
"""Quality of JPEGs."""


def script(*names: str) -> dict[str, str]:
    """Reads the files of a script from the folder of the templates, and joins them in this order.

    Returns:
        Text: the script. It is ASCII and does not contain `</script>`.
        hash: its hash, for a content security policy that allows only this script.
    """
    text = "\n".join((_TEMPLATES / name).read_text(encoding="ascii") for name in names)
    digest = hashlib.sha256(text.encode()).digest()
    return {"text": text, "hash": f"sha256-{base64.b64encode(digest).decode()}"}


def render(template: str, view: Mapping[str, Any]) -> str:
    """Renders a page as text that can be encoded in UTF-8.

    Python represents bytes of file names that are not UTF-8 by lone surrogates; the page shows them as \\udcff.

    Args:
        template: Name of the template.
        view: Its variables.

    Raises:
        jinja2.UndefinedError: The template uses a variable that is not in the view.
    """
    page = _templates().get_template(template).render(view)
    return page.encode("utf-8", "backslashreplace").decode()


_FORBIDDEN = (*range(9), 11, 12, *range(14, 32), *range(127, 160))
"""Code points of the control characters that HTML forbids."""
_REPLACEMENTS = dict.fromkeys(_FORBIDDEN, "\N{REPLACEMENT CHARACTER}")


def printable(text: str) -> str:
    """Replaces characters of text for a script as `render` does, but does not escape HTML."""
    return text.translate(_REPLACEMENTS).encode("utf-8", "backslashreplace").decode()


def _finalize(value: Any) -> Any:
    """Converts a value of a template: None to a dash, and forbidden characters to replacement characters."""
    if value is None:
        return "–"
    return value.translate(_REPLACEMENTS) if type(value) is str else value


def _duration(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=round(seconds))


def _templates() -> jinja2.Environment:
    """The template environment, which escapes every value and raises for undefined variables."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    templates.filters |= {
        "count": format_count,
        "decimal": "{:.1f}".format,
        "duration": _duration,
        "exact": float,
        "png": functools.partial(data_uri, format="PNG"),
        "jpeg": functools.partial(data_uri, format="JPEG"),
    }
    templates.globals |= {"zip": zip, "scored_outputs": SCORED_OUTPUTS}
    return templates


def encode(picture: Image.Image, format: Literal["JPEG", "PNG"]) -> bytes:
    """Encodes a picture as the content of a file."""
    buffer = BytesIO()
    if format == "JPEG":
        picture.save(buffer, format, quality=_QUALITY)
    else:
        picture.save(buffer, format)
    return buffer.getvalue()


def packed(array: NDArray[Any]) -> str:
    """Encodes the bytes of an array, zlib-compressed, in base64, for a script."""
    compressed = zlib.compress(np.ascontiguousarray(array).tobytes(), 9)
    return base64.b64encode(compressed).decode()


def data_uri(picture: Image.Image | bytes, format: Literal["JPEG", "PNG"]) -> str:
    """Encodes a picture, or the content of its file, as a data URI."""
    content = picture if isinstance(picture, bytes) else encode(picture, format)
    return f"data:image/{format.lower()};base64,{base64.b64encode(content).decode()}"
