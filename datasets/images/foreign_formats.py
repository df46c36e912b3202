"""Names the formats of files that are no readable picture, by their first bytes, and how to convert them."""

from collections.abc import Callable
from typing import NamedTuple


class ForeignFormat(NamedTuple):
    """A format that mcis does not read.

    Attributes:
        name: Name with its article, such as "a PDF".
        convert: Command that converts FILE to a readable picture; None for content that is no picture.
        matches: Whether the first `START_BYTES` bytes of a file belong to the format.
    """

    name: str
    convert: str | None
    matches: Callable[[bytes], bool]


START_BYTES = 1024
"""Number of first bytes that `recognize` needs."""

_MAGICK = "magick FILE FILE.png"
CONVERT_RAW = "darktable-cli FILE FILE.png"
"""Command that converts a raw photograph."""


def _begins(*prefixes: bytes) -> Callable[[bytes], bool]:
    """Matches files that begin with one of these bytes."""
    return lambda start: start.startswith(prefixes)


def _brand(*brands: bytes) -> Callable[[bytes], bool]:
    """Matches files of the ISO base media format whose major brand is one of these."""
    return lambda start: start[4:8] == b"ftyp" and start[8:12] in brands


def _is_svg(start: bytes) -> bool:
    return start.lstrip().startswith(b"<") and b"<svg" in start


FORMATS: tuple[ForeignFormat, ...] = (
    ForeignFormat(
        "an HEIC photograph",
        "pip install -c constraints.txt -e '.[heif]', or: heif-convert FILE FILE.jpg",
        _brand(b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1"),
    ),
    ForeignFormat("a raw photograph (Canon CR3)", CONVERT_RAW, _brand(b"crx ")),
    ForeignFormat(
        "a raw photograph (Canon CR2)", CONVERT_RAW, lambda start: start[8:10] == b"CR" and start[:2] == b"II"
    ),
    ForeignFormat("a raw photograph (Fujifilm)", CONVERT_RAW, _begins(b"FUJIFILMCCD-RAW")),
    ForeignFormat("a raw photograph (Olympus)", CONVERT_RAW, _begins(b"IIRO", b"IIRS", b"MMOR")),
    ForeignFormat("a raw photograph (Panasonic)", CONVERT_RAW, _begins(b"IIU\0")),
    ForeignFormat("a JPEG XL picture", "djxl FILE FILE.png", _begins(b"\xff\x0a", b"\0\0\0\x0cJXL ")),
    ForeignFormat("a Photoshop file", "magick 'FILE[0]' FILE.png", _begins(b"8BPS")),
    ForeignFormat("a GIMP file", _MAGICK, _begins(b"gimp xcf")),
    ForeignFormat("an OpenEXR picture", _MAGICK, _begins(b"\x76\x2f\x31\x01")),
    ForeignFormat("a Radiance HDR picture", _MAGICK, _begins(b"#?RADIANCE", b"#?RGBE")),
    ForeignFormat("a Windows icon", _MAGICK, _begins(b"\0\0\1\0")),
    ForeignFormat("a DICOM picture", "dcmj2pnm +on FILE FILE.png", lambda start: start[128:132] == b"DICM"),
    ForeignFormat("a FITS picture", "fitspng FILE", _begins(b"SIMPLE  =")),
    ForeignFormat("an SVG drawing", "rsvg-convert FILE -o FILE.png", _is_svg),
    ForeignFormat("a PDF", "pdftoppm -png FILE FILE", _begins(b"%PDF")),
    ForeignFormat("PostScript", "gs -dSAFER -sDEVICE=png16m -o FILE.png FILE", _begins(b"%!PS")),
    ForeignFormat("a video", "ffmpeg -i FILE FILE-%05d.png", _brand(b"isom", b"mp41", b"mp42", b"qt  ", b"M4V ")),
    ForeignFormat(
        "a TIFF that is damaged or of an unknown kind, such as 8 bands or color of floating-point numbers",
        "gdal_translate -ot Byte -scale -b 1 FILE FILE.png, with -b 1 -b 2 -b 3 for color",
        _begins(b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    ),
    ForeignFormat(
        "an AVIF picture that is damaged or of an unknown kind", "avifdec FILE FILE.png", _brand(b"avif", b"avis")
    ),
    ForeignFormat(
        "a Git LFS pointer, which `git lfs pull` replaces by its file", None, _begins(b"version https://git-lfs")
    ),
    ForeignFormat("HTML or XML", None, lambda start: start.lstrip().startswith(b"<")),
    ForeignFormat("a ZIP archive", None, _begins(b"PK\3\4")),
    ForeignFormat("a gzip archive", None, _begins(b"\x1f\x8b")),
    ForeignFormat("a NumPy array", None, _begins(b"\x93NUMPY")),
    ForeignFormat("an HDF5 file", None, _begins(b"\x89HDF")),
)
"""Formats in the order in which they are tried."""


def recognize(data: bytes) -> ForeignFormat | None:
    """Returns the format of a file by its first bytes, or None. Leading spaces and line ends of text are skipped."""
    start = data[:START_BYTES]
    for foreign in FORMATS:
        if foreign.matches(start) or foreign.matches(start.lstrip()):
            return foreign
    return None
