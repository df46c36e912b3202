"""Reads data sets in the XML format of Pascal VOC, a file for each image, as LabelImg and others write it."""

import glob
from pathlib import Path
from xml.etree import ElementTree

from mcis.datasets.formats.data_set import (
    AnnotatedObject,
    DataSet,
    Format,
    ImportRequest,
    Photos,
    annotation_files,
    naming,
)
from mcis.datasets.formats.image_files import images_next_to


def read_voc_xml(request: ImportRequest) -> DataSet:
    """Reads the classes of boxes. Boxes that are marked as difficult give no tag, as in VOC's own lists."""
    source = request.source
    folder = source if source.is_dir() else source.parent
    devkit = folder.parent if folder.name == "Annotations" else folder
    images = request.images or (devkit / "JPEGImages" if (devkit / "JPEGImages").is_dir() else folder)
    annotations = devkit / "Annotations" if source == devkit and (devkit / "Annotations").is_dir() else source

    photos: Photos = {}
    for file, subfolder in annotation_files(annotations, ".xml"):
        with naming(file):
            root = ElementTree.fromstring(file.read_bytes())
            if root.tag != "annotation":
                raise ValueError(f"no annotation of Pascal VOC: its root is <{root.tag}>")

        image = root.findtext("filename", "").strip().replace("\\", "/").rpartition("/")[2]
        found = image
        if not image or not (images / subfolder / image).is_file():
            suffix = Path(image).suffix or _suffix_of_image(images / subfolder, file.stem)
            found = file.stem + suffix  # images are often renamed together with their XML file
        name = (subfolder / found).as_posix()
        if name in photos:
            raise ValueError(f"two files are of {name}")

        photos[name] = []
        for item in root.iter("object"):
            if item.findtext("difficult", "0").strip() == "1":
                request.left_out["object(s) marked as difficult"] += 1
                photos[name].append(AnnotatedObject(None))  # without any object, the image would be a negative
            else:
                photos[name].append(AnnotatedObject(item.findtext("name", "").strip()))

    if annotations.is_dir():
        others = images_next_to(images.resolve(), photos)
        request.left_out["image(s) without an XML file, next to annotated ones"] = len(others)
    return DataSet(images.resolve(), photos)


def _suffix_of_image(folder: Path, stem: str) -> str:
    """Returns the suffix of the only other file with a name, for annotations that do not state it; or nothing."""
    suffixes = [path.suffix for path in folder.glob(f"{glob.escape(stem)}.*") if path.suffix.lower() != ".xml"]
    return suffixes[0] if len(suffixes) == 1 else ""


VOC_XML = Format(
    read_voc_xml,
    "a folder of Pascal VOC's XML files, next to their images, or Annotations/ and JPEGImages/, or with the folder "
    "--images that has the same subfolders",
)
