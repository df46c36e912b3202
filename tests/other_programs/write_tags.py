"""Tags of the images of a VOC devkit, as the other programs here read them.

    python write_tags.py VOC LIST TAGS

VOC is the folder VOC2012, and LIST is a list in its ImageSets/Segmentation, such as train. Writes a line
`<id> <class index> ...` per image to TAGS, from the objects in Annotations/<id>.xml. Objects that are marked difficult
do not count. Images without any other object are left out.
"""

import sys
from pathlib import Path
from xml.etree import ElementTree

from mcis.datasets.classes import VOC_CLASSES


def main(voc: Path, list_name: str, tags: Path) -> None:
    lines = []
    for image_id in (voc / "ImageSets" / "Segmentation" / f"{list_name}.txt").read_text().split():
        objects = ElementTree.parse(voc / "Annotations" / f"{image_id}.xml").findall("object")
        counted = [item for item in objects if (item.findtext("difficult") or "0").strip() != "1"]
        indices = sorted({VOC_CLASSES.index((item.findtext("name") or "").strip()) for item in counted})
        if indices:
            lines.append(" ".join([image_id, *map(str, indices)]))
    tags.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
