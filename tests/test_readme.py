"""The commands and the Python example of README.md work as they are printed there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from mcis.datasets.synthetic.scenes import draw_scene

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SHORTER = (
    "classifier.input_size=96 classifier.min_steps=10 segmenter.crop=64 segmenter.min_steps=2 report.panels=2 "
    "compute.stop_if_not_learning=false"
)
"""Settings that shorten the quickstart, which takes minutes."""
CLASSES = ("cat", "dog", "horse")


def block(language: str, first_word: str) -> str:
    """Returns the code block of a language that begins with a word."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    (found,) = [text for text in blocks if text.startswith(first_word)]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the table of the README, extended to 8 synthetic images, and a folder of new ones."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "photos").mkdir()
    (folder / "new").mkdir()
    header, *_ = block("csv", "image").splitlines()

    rows = [header]
    for index in range(8):
        scene = draw_scene(0, "train_aug", index, size=160, classes=len(CLASSES))
        name = f"photos/{index + 1:04}.jpg"
        Image.fromarray(scene.rgb).save(folder / name)
        tags = ";".join(CLASSES[label] for label in scene.tags)
        rows.append(f"{name},{tags},{'val' if index % 4 == 3 else 'train'}")
    (folder / "photos.csv").write_text("\n".join(rows) + "\n")

    new = draw_scene(0, "val", 0, size=200, classes=len(CLASSES))
    Image.fromarray(new.rgb).save(folder / "new" / "0003.jpg")
    return folder


def shell(script: str, folder: Path) -> str:
    """Runs a script by bash in a folder, stopping at the first failure, and returns what it prints."""
    (folder / ".venv").unlink(missing_ok=True)
    (folder / ".venv").symlink_to(Path(sys.prefix))
    done = subprocess.run(["bash", "-euc", script], cwd=folder, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_targets_of_the_installation_exist() -> None:
    for line in block("sh", "make demo").splitlines():
        command = line.split("#")[0].split()
        assert subprocess.run([*command, "--dry-run"], cwd=ROOT, capture_output=True).returncode == 0, line


@pytest.mark.slow
def test_the_quickstart_makes_masks_and_python_reads_them(folder: Path) -> None:
    shell(block("sh", "source").replace("--recipe photos_fast ", f"--recipe photos_fast {SHORTER} "), folder)
    assert (folder / "mcis-workspace/runs/mine/report.html").is_file()
    with Image.open(folder / "new/0003.jpg") as photograph:
        width, height = photograph.size
    with Image.open(folder / "predicted/masks/0003.png") as mask:
        assert mask.size == (width, height)

    (folder / "example.py").write_text(block("python", "import mcis") + "print(labels.shape)\n")
    printed = shell("source .venv/bin/activate; python example.py", folder)
    assert printed.splitlines()[-1] == f"({height}, {width})"
