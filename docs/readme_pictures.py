"""Draws the pictures of README.md: two photographs, their localization maps, pseudo masks and predictions.

    python docs/readme_pictures.py photos.csv

The table lists tagged photographs with the classes cat and person, such as the animals of PASCAL VOC. The script adds
docs/pictures/chelsea.jpg (CC0) and docs/pictures/astronaut.jpg (public domain) to the training images, each with its
tag, runs recipe `photos`, and writes docs/pictures/row.png.
"""

import csv
from pathlib import Path
from typing import Annotated

import typer
from PIL import Image, ImageDraw, ImageFont

import mcis
from mcis.platform.reporting.panels import cells

PICTURES = Path(__file__).resolve().parent / "pictures"
PHOTOGRAPHS = {"chelsea.jpg": "cat", "astronaut.jpg": "person"}
"""The tag of each photograph in `PICTURES`."""

COLUMNS = {
    "image": "photograph and tag",
    "localization map": "localization map",
    "pseudo mask": "pseudo mask",
    "prediction": "prediction",
}
"""Caption of each column of `cells`."""

CELL_HEIGHT = 220
CELL_WIDTH = 330
CAPTION_HEIGHT = 40
GAP = 10
"""Sizes in pixels. README.md shows the picture at half its size."""


def main(
    table: Annotated[Path, typer.Argument(help="Table of tagged photographs: image,tags,split,mask.")],
    workspace: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("mcis-workspace"),
) -> None:
    """Runs recipe `photos` on the table and the two photographs, and draws docs/pictures/row.png."""
    extended = extend_table(table)
    trusted = {"data.tags.allow_absolute": True}
    result = mcis.run(extended, name="readme-pictures", workspace=workspace, recipe="photos", overrides=trusted)

    rows = []
    for file, tag in PHOTOGRAPHS.items():
        panel = mcis.panel(result, PICTURES / file)  # a photograph without an id is named by its path
        drawn = cells(panel, result.context.classes, CELL_HEIGHT)
        rows.append((tag, [drawn[column].picture for column in COLUMNS]))

    draw_rows(rows).save(PICTURES / "row.png", optimize=True)


def extend_table(table: Path) -> Path:
    """Writes TABLE-readme.csv, which is the table and the two photographs, next to the table and returns its path."""
    extended = table.with_name(f"{table.stem}-readme.csv")
    with table.open(newline="") as source, extended.open("w", newline="") as target:
        reader = csv.DictReader(source)
        writer = csv.DictWriter(target, reader.fieldnames or [], restval="")
        writer.writeheader()
        writer.writerows(reader)
        for file, tag in PHOTOGRAPHS.items():
            writer.writerow({"image": str(PICTURES / file), "tags": tag, "split": "train"})
    return extended


def draw_rows(rows: list[tuple[str, list[Image.Image]]]) -> Image.Image:
    """Draws a grid with captions above the columns and the tag on each photograph."""
    width = len(COLUMNS) * (CELL_WIDTH + GAP) - GAP
    height = CAPTION_HEIGHT + len(rows) * (CELL_HEIGHT + GAP) - GAP
    grid = Image.new("RGB", (width, height), "white")
    canvas = ImageDraw.Draw(grid)
    font = ImageFont.load_default(22)

    for column, caption in enumerate(COLUMNS.values()):
        canvas.text((column * (CELL_WIDTH + GAP) + CELL_WIDTH // 2, CAPTION_HEIGHT // 2), caption, "black", font, "mm")

    for row, (tag, pictures) in enumerate(rows):
        top = CAPTION_HEIGHT + row * (CELL_HEIGHT + GAP)
        for column, picture in enumerate(pictures):
            left = column * (CELL_WIDTH + GAP) + (CELL_WIDTH - picture.width) // 2
            grid.paste(picture, (left, top))
            if column == 0:
                canvas.rectangle((left, top, left + canvas.textlength(tag, font) + 16, top + 34), fill="black")
                canvas.text((left + 8, top + 17), tag, "white", font, "lm")
    return grid


if __name__ == "__main__":
    typer.run(main)
