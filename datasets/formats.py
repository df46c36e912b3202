"""Data sets of other tools (FORMATS) -> a table for the source `tags`, and label masks.

They come from others: a value may be missing or absurd, and what they name may lie anywhere.
"""

import collections
import csv
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.classes import IGNORE, check_classes, read_classes
from mcis.datasets.errors import UserError, unquoted
from mcis.datasets.images.decode import decode_picture, encode_labels
from mcis.datasets.index import shown
from mcis.datasets.outlines import coco_pixels, cvat_pixels, polygon_pixels, require_module
from mcis.datasets.sources.lists import did_you_mean, files_below, left_out_notes, path_inside
from mcis.datasets.sources.tagged import SPLITS
from mcis.datasets.storage.files import read_bytes
from mcis.datasets.storage.folders import written_aside

_COLUMNS = ("image", "tags", "split", "mask")
Left = collections.Counter[str]
"""What was left out, and how often."""


class Thing(NamedTuple):
    """An object: its class, None of a crowd; what draws it, (height, width) -> bool (H, W), None without an outline."""

    tag: str | None
    draw: Callable[[int, int], NDArray[np.bool_]] | None = None


Photos = dict[str, list[Thing]]
"""The path of each photograph below the folder of the images, and its objects."""
Found = tuple[Path, Photos]
Track = Callable[[Sequence[str]], Iterable[str]]


def import_data_set(
    format: str,
    source: Path,
    out: Path,
    *,
    images: Path | None = None,
    split: str = "train",
    classes: Sequence[str] = (),
    labels: Path | None = None,
    track: Track = iter,
) -> list[str]:
    """Writes a split of a data set beside the others that `out` has; says what it wrote, and what it left out.

        photos.csv                  image, tags, split, mask, as `list_tagged` reads it
        classes.txt                 the classes that occur, in the order of the alphabet, as `list_tagged` counts them
        images/<split>              a link to the folder of the images, or a folder of copies
        masks/<split>/<image>.png   labels, if every object has an outline: of two the smaller on top, crowds ignored

    The functions of FORMATS say what `source` and `images` are; `classes` are wanted beside those of `out`, none for
    all; `labels` is labels.csv of an export, whose classes are wanted then, whether they occur or not, and whose labels
    masks get; `track` passes the photographs on and shows how far it has come.

    Raises:
        UserError: the data set is not as the format says, an image lies outside of its folder, none is there, or a
            class does not occur, cannot stand in a table, or differs from those of the table so far.
    """
    source, out, left = source.expanduser().resolve(), out.expanduser().resolve(), Left()
    link, table = out / "images" / split, out / "photos.csv"
    if format not in FORMATS or split not in SPLITS:
        expected = f"one of {', '.join(FORMATS)}, and one of {', '.join(SPLITS)}"
        raise UserError(f"format {format}, split {split}", expected, "choose of these")
    if not source.exists():
        raise UserError(f"no {source}", " ".join(str(FORMATS[format].__doc__).split()), "correct the path")
    folder, photos = _read(format, source, images, link, split, left)
    rows = list(csv.DictReader(table.read_text("utf-8").splitlines() if table.exists() else ()))
    if rows and tuple(rows[0]) != _COLUMNS:
        raise UserError(f"{table} has columns {', '.join(rows[0])}", ", ".join(_COLUMNS), "name another --out")
    if table.exists() != (out / "classes.txt").exists():
        raise UserError(f"{out} holds photos.csv or classes.txt of others", "a folder of its own", "name another --out")
    rows = [row for row in rows if row["split"] != split]
    if folder != link and link.is_dir() and not link.is_symlink():
        raise UserError(f"{link} is a folder of images", "a place for a link", "name another --out")
    ordered = _classes_of(labels) if labels else []
    known = {thing.tag for things in photos.values() for thing in things if thing.tag}
    kept = {tag for row in rows for tag in row["tags"].split(";") if tag}
    others = known.difference({*(ordered or classes), *kept} if ordered or classes else known)
    left["object(s) of classes that are not wanted"] = sum(t.tag in others for each in photos.values() for t in each)
    photos = {name: [thing for thing in things if thing.tag not in others] for name, things in photos.items()}
    names = ordered or sorted({thing.tag for things in photos.values() for thing in things if thing.tag} | kept)
    before = list(read_classes(out / "classes.txt")) if rows else names
    wrong = {*names, *before} if ordered and names != before else set(names).symmetric_difference(before)
    _check_names(source, names, wrong | (set(classes) - known - kept), known)
    if not rows:
        for each in (table, out / "classes.txt"):
            each.unlink(missing_ok=True)  # its masks may have had other labels
    if folder != link:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
    of_split = list(_rows(folder, photos, names, split, out, left, track))
    with written_aside(out / "classes.txt") as aside:
        aside.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    with written_aside(table) as aside, aside.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows + of_split)
    tagged, masks = (sum(bool(row[column]) for row in of_split) for column in ("tags", "mask"))
    told = f"{len(of_split)} photographs of split {split}, {tagged} with tags, {masks} with a mask"
    return [f"{table}: {told}; classes {', '.join(names)}", *left_out_notes(str(source), left)]


def _classes_of(labels: Path) -> list[str]:
    """The classes of labels 1..K; UserError where it is no such table."""
    try:
        rows = {int(row["label"]): row["class"] for row in csv.DictReader(labels.read_text("utf-8").splitlines())}
        return [rows[label] for label in range(1, max(2, len(rows) - 1))]  # the others are background and ignored
    except (KeyError, OSError, ValueError) as error:
        found = f"{labels} is no table of labels: {unquoted(error)}"
        raise UserError(found, "labels.csv of an export", "name that file") from error


def _read(format: str, source: Path, images: Path | None, link: Path, split: str, left: Left) -> Found:
    """What FORMATS find, but for images that are absent; errors as of `import_data_set`."""
    try:
        folder, photos = FORMATS[format](source, images, link, split, left)
        if not photos:
            raise ValueError("; ".join(left_out_notes("no photograph in it", left)) or "no photograph in it")
        outside = [
            name for name in photos if path_inside(name) != name or name != name.strip() or not name.isprintable()
        ]
    except (UserError, MemoryError):
        raise
    except Exception as error:  # whatever absurd values make the parsers of others raise
        told = f"no {error.args[0]!r}" if isinstance(error, KeyError) else unquoted(error)
        expected = " ".join(str(FORMATS[format].__doc__).split())
        raise UserError(f"{source} is not as expected: {told}", expected, "correct it, or name another") from error
    absent = {name for name in photos if not outside and not (folder / name).is_file()}
    if outside or len(absent) == len(photos):
        which = f"outside or illegible: {shown(outside)}" if outside else f"absent: {shown(sorted(absent))}"
        found = f"{len(outside or absent)} of {len(photos)} images of {source} are {which}"
        raise UserError(found, f"legible names of files below {folder}", "correct them, or name the folder by --images")
    left[f"image(s) that are not in {folder}: {shown(sorted(absent))}"] = len(absent)
    return folder, {name: things for name, things in photos.items() if name not in absent}


def _rows(
    folder: Path, photos: Photos, names: Sequence[str], split: str, out: Path, left: Left, track: Track
) -> Iterator[dict[str, str]]:
    """The row of each photograph, and its mask, written; the masks that cannot be drawn are named in `left`; UserError
    where all of them are."""
    masked, wrong = any(thing.draw for things in photos.values() for thing in things), list[str]()
    for name in track(list(photos)):
        things, mask = photos[name], ""
        if masked and all(thing.draw for thing in things):
            try:
                labels = encode_labels(_labels(folder / name, things, names))
            except (KeyError, OSError, OverflowError, TypeError, ValueError) as error:
                wrong.append(f"{name}: {unquoted(error)}")
            else:
                mask = f"masks/{split}/{name}.png"
                with written_aside(out / mask, durable=False) as aside:
                    aside.write_bytes(labels)
        tags = sorted({thing.tag for thing in things if thing.tag})
        yield {"image": f"images/{split}/{name}", "tags": ";".join(tags), "split": split, "mask": mask}
    if wrong and len(wrong) == sum(bool(things) and all(thing.draw for thing in things) for things in photos.values()):
        raise UserError(f"{folder}/{wrong[0]}", "a picture, and outlines that fit it", "correct or remove it")
    left[f"mask(s), as the image is damaged or its outlines do not fit: {shown(wrong)}"] = len(wrong)


def _check_names(source: Path, names: Sequence[str], wrong: set[str], known: set[str]) -> None:
    """Raises a UserError for `wrong` names of classes, and for those that cannot stand in a table."""
    wrong |= {name for name in names if re.search(r"[;,|]|^\s|\s$|^$", name) or not name.isprintable()}
    if wrong or not names:
        occur = shown(sorted(known := known - wrong), 20)
        expected = f"names without ; , | of classes that occur ({occur}), the same as in other splits"
        remedy = f"{did_you_mean(wrong, sorted(known))}rename them, choose by --classes, or begin with the split of all"
        found = f"{len(wrong)} class(es): {shown(sorted(wrong))}" if wrong else "no object of any class"
        raise UserError(f"{source}: {found}", expected, remedy)
    check_classes(source, names)


def _labels(image: Path, things: Sequence[Thing], names: Sequence[str]) -> NDArray[np.uint8]:
    """The label mask (H, W) of an image; errors of many kinds where it is no picture, or an outline is damaged."""
    _, height, width = decode_picture(read_bytes(str(image)), min_side=1, max_side=1)  # the least work for its size
    outlines = [(thing.tag, thing.draw) for thing in things if thing.draw]  # drawn twice, as all at once may not fit
    labels = np.zeros((height, width), np.uint8)
    for tag, draw in sorted(outlines, key=lambda each: (each[0] is not None, -each[1](height, width).sum())):
        labels[draw(height, width)] = IGNORE if tag is None else names.index(tag) + 1
    return labels


def _coco(source: Path, images: Path | None, link: Path, split: str, left: Left) -> Found:
    """a JSON file of COCO's images, annotations and categories; its images lie beside it, or in the folder `images`"""
    content = json.loads(source.read_bytes())
    names = {each["id"]: each["name"].strip() for each in content["categories"]}
    images_by_id = {each["id"]: each for each in content["images"]}
    photos: Photos = {each["file_name"]: [] for each in content["images"]}
    if not len(photos) == len(images_by_id) == len(content["images"]):
        twice = [name for name, n in Left(each["file_name"] for each in content["images"]).items() if n > 1]
        raise ValueError(f"an image id or a file_name is there twice: {shown(twice)}")
    for each in content.get("annotations", []):
        image, category, outline = images_by_id.get(each["image_id"]), each["category_id"], each.get("segmentation")
        if category not in names:
            raise ValueError(f"an annotation of category_id {category}, which no category has")
        if image is None:
            left["annotation(s) of images that it does not list"] += 1
            continue
        draw = functools.partial(coco_pixels, outline, (image["height"], image["width"])) if outline else None
        left["crowd(s), no tag and ignored in masks; some tools write brushes so"] += bool(each.get("iscrowd"))
        photos[image["file_name"]].append(Thing(None if each.get("iscrowd") else names[category], draw))
    return (images or source.parent).resolve(), photos


def _yolo(source: Path, images: Path | None, link: Path, split: str, left: Left) -> Found:
    """a folder with data.yaml or classes.txt, images/... and labels/...; `images` is that of the split, if data.yaml
    does not say it and it is not images/SPLIT"""
    places = [source / name for name in ("data.yaml", "dataset.yaml", "classes.txt")] if source.is_dir() else [source]
    about, yaml = next((place for place in places if place.exists()), places[-1]), require_module("yaml")
    of_yaml, source = about.suffix in (".yaml", ".yml"), about.parent
    told = yaml.safe_load(about.read_text("utf-8")) if of_yaml else {"names": read_classes(about)}
    names = told["names"] if isinstance(told["names"], dict) else dict(enumerate(told["names"]))
    if not isinstance(where := told.get(split, f"images/{split}"), str):
        raise ValueError(f"{split} of {about} is no text, which names one folder, or one list of images")
    lines = (source / where.lstrip("./")).read_text("utf-8").splitlines() if where.endswith(".txt") else []
    where = os.path.commonpath([os.path.dirname(line) for line in lines]) if lines else where
    listed = sorted({line.strip().partition(f"{where}/")[2] for line in lines})
    ways = (where.lstrip("./"), Path(str(told.get("path", "")), where), where.removeprefix("data/"))
    near = [(source / way).resolve() for way in ways]
    inner = (place for place in near if place.is_dir() and place.is_relative_to(source))
    folder = images.resolve() if images else next(inner, source / where.lstrip("./"))
    above, _, below = f"{folder}/".rpartition("/images/")
    labels, photos = Path(f"{above}/labels/{below}"), Photos()
    if not labels.is_dir() or not folder.is_dir():
        raise ValueError(f"no folders {folder} and {labels}")
    for name in listed or _files(folder, left):
        photos[name], file = [], (labels / name).with_suffix(".txt")
        left["label file(s) that are not there: their photographs are all background"] += not file.exists()
        for line in filter(str.strip, file.read_text("utf-8").splitlines() if file.exists() else ()):
            values = np.array(line.split(), float)
            if len(values) < 5 or not np.isfinite(values).all() or values[0] not in names or values[1:5].max() > 2:
                wanted = f"class 0..{len(names) - 1} with a box or polygon in parts of the image's sides"
                raise ValueError(f"{file}: a line that is no {wanted}")
            corners = values[1 : len(values) - (len(values) - 1) % 2].reshape(-1, 2)  # a confidence may stand behind
            outline = len(corners) > 2 and "kpt_shape" not in told
            draw = functools.partial(polygon_pixels, corners) if outline else None
            photos[name].append(Thing(names[int(values[0])].strip(), draw))
    return folder, photos


def _folders(source: Path, images: Path | None, link: Path, split: str, left: Left) -> Found:
    """a folder of <class>/.../<image>; a photograph that lies in several of them has several tags"""
    photos: Photos = {}
    first: dict[str, str] = {}
    files = _files(source, left)
    if not any("/" in name for name in files):
        raise ValueError(f"{len(files)} files lie in no class folder")
    if {name.partition("/")[0] for name in files} <= {*SPLITS, "valid", "validation"}:
        raise ValueError("folders of splits, not of classes: import each, as train and as val, by itself")
    for name in files:
        if "/" in name:
            same = first.setdefault(hashlib.sha256(read_bytes(f"{source}/{name}")).hexdigest(), name)
            left["further copies of photographs"] += same != name
            photos.setdefault(same, []).append(Thing(name.partition("/")[0]))
        else:
            left["file(s) that lie in no class folder"] += 1
    return source, photos


def _files(folder: Path, left: Left) -> list[str]:
    """The files below a folder that are not hidden, nor in a hidden folder; no suffix is trusted."""
    found = list(files_below(folder, left))
    seen = [name for name in found if not name.startswith(".") and "/." not in name]
    left["hidden file(s)"] = len(found) - len(seen)
    return seen


def _huggingface(source: Path, images: Path | None, link: Path, split: str, left: Left) -> Found:
    """a folder that `load_from_disk` or `load_dataset` of the library `datasets` takes, with columns image and label or
    labels; val may be called validation"""
    load, features = require_module("datasets.load"), require_module("datasets.features")
    if link.is_symlink():  # the copies would go into another data set
        link.unlink()
    saved = (source / "state.json").exists() or (source / "dataset_dict.json").exists()
    data = load.load_from_disk(str(source)) if saved else load.load_dataset(str(source))
    if isinstance(data, dict):
        data = data["validation" if split == "val" and "validation" in data else split]
    column = "labels" if "labels" in data.features else "label"
    kind, photos = getattr(data.features[column], "feature", data.features[column]), Photos()
    for number, row in enumerate(data.cast_column("image", features.Image(decode=False))):
        path, content = Path(row["image"]["path"] or ""), row["image"]["bytes"]
        if content is None and not path.resolve().is_relative_to(source):
            raise ValueError(f"image {number} lies outside of it")
        values = row[column] if isinstance(row[column], list) else [row[column]]
        tags = [value if isinstance(value, str) else kind.int2str(value) for value in values if value not in (None, -1)]
        photos[f"{number:08}{path.suffix}"] = [Thing(tag.strip()) for tag in tags]
        with written_aside(link / f"{number:08}{path.suffix}", durable=False) as aside:
            aside.write_bytes(path.read_bytes() if content is None else content)
    return link, photos


def _cvat(source: Path, images: Path | None, link: Path, split: str, left: Left) -> Found:
    """CVAT's XML `CVAT for images`, of tags, boxes, polygons, masks; its images lie beside it, or in `images`"""
    folder, photos = (images or source.parent).resolve(), Photos()
    for image in ElementTree.fromstring(source.read_bytes()).iter("image"):
        sides, name, things = [float(image.attrib[key]) for key in ("width", "height")], image.attrib["name"], []
        if image.get("subset", folder.name) != folder.name:
            left[f"image(s) of subset {image.get('subset')}, for {folder.name}"] += 1
            continue
        if name in photos:
            raise ValueError(f"two images are named {name}")
        for each in image:
            corners = np.array([point.split(",") for point in each.get("points", "0").split(";")], float) / sides
            draw = functools.partial(polygon_pixels, corners) if each.tag == "polygon" else None
            draw = functools.partial(cvat_pixels, each.attrib) if each.tag == "mask" else draw
            things.append(Thing(each.attrib["label"].strip(), draw))
        photos[name] = things
    return folder, photos


def _labelstudio(source: Path, images: Path | None, link: Path, split: str, left: Left) -> Found:
    """Label Studio's JSON, with choices, rectangles, polygons or brushes; `images` is the folder of its images"""
    folder, photos = (images or source.parent).resolve(), Photos()
    for task in json.loads(source.read_bytes()):
        url = urlsplit(task["data"]["image"])
        path = unquote(url.query.partition("d=")[2] or url.path).lstrip("/")
        ends = [path.split("/", n)[-1] for n in range(path.count("/") + 1)]  # uploads begin with 8 digits and -
        ends.append(re.sub("^[0-9a-f]{8}-", "", ends[-1]))
        name = next((end for end in ends if end and (folder / end).is_file()), ends[-1])
        kept = [each for each in task.get("annotations", []) if not each.get("was_cancelled")]
        if not kept:
            left["task(s) that nobody has annotated; predictions are submitted in Label Studio first"] += 1
            continue
        if name in photos:
            raise ValueError(f"two tasks are of {name}")
        left["earlier annotation(s) of a photograph"] += len(kept) - 1
        photos[name] = []
        for each in kept[-1]["result"]:
            if (kind := each["type"]) != "choices" and not kind.endswith("labels"):
                left[f"result(s) of type {kind}"] += 1
                continue
            corners = np.array(each["value"].get("points", ()), float) / 100
            draw = functools.partial(polygon_pixels, corners) if kind == "polygonlabels" else None
            photos[name] += (Thing(tag.strip(), draw) for tag in each["value"].get(kind, ()))
    return folder, photos


FORMATS = dict(coco=_coco, yolo=_yolo, cvat=_cvat, labelstudio=_labelstudio, folders=_folders, huggingface=_huggingface)
"""What reads a data set: its place, the folder of images, where copies go, the split, a counter of what is left out."""
