"""How the cost of each stage grows with the number of photographs: seconds, memory and disk for several sizes.

Recipe `photos_fast` runs on 500, 2,000, 8,000 and 20,000 different JPEGs: crops, horizontal flips and color changes of
the training photographs of a VOC devkit, written to disk once. The val photographs stay as they are. Processor seconds
are those of all processes of the run, on which other programs have little influence. The driver's memory is resident,
the workers' is that of the largest one. Without --voc, the photographs are synthetic scenes. With --folder, photographs
and costs are kept, and a size that was measured before is not measured again; other settings need another folder. With
--plot, the costs are plotted.

With --kill, the smallest size also runs in a second workspace, where the command is killed in the middle of each stage
and repeated. Its scores must be those of the undisturbed run, and its processor seconds are compared.

The last line compares the processor seconds per photograph of the whole run at the largest size with those at the
second one; the lines before it do so for each stage.
"""

import argparse
import contextlib
import dataclasses
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import harness
import matplotlib.pyplot as plt
import numpy as np
import psutil
from PIL import Image, ImageEnhance

from mcis.datasets.sources.voc import list_voc
from mcis.datasets.synthetic import devkit
from mcis.platform.runs.files import read_json
from mcis.platform.runs.workspace import RunFolder

SIZES = "500,2000,8000,20000"
TARGET = 1.2
INTERVAL = 0.5
"""Seconds between two looks at the processes."""
FINISHED = re.compile(r"(\w+): (?:[\d.]+ s|.*already computed.*)")
"""Line that the command prints at the end of a stage."""
MIN_AREA = 0.6
"""Smallest area of a crop, as a fraction of the photograph."""


@dataclass
class Cost:
    """What a stage costs.

    Attributes:
        wall: Wall seconds.
        processor: Processor seconds of all processes.
        driver_gib: Largest resident memory of the driver.
        worker_gib: Largest resident memory of another process.
        disk_gib: Size of the workspace at the end of the stage.
    """

    wall: float = 0.0
    processor: float = 0.0
    driver_gib: float = 0.0
    worker_gib: float = 0.0
    disk_gib: float = 0.0


Costs: TypeAlias = Mapping[str, Cost]
"""The cost of each stage."""


@dataclass
class Watch:
    """Looks at the processes of a command, until it ends, and adds what they use to the cost of the current stage.

    Attributes:
        driver: Process of the command.
        cost: Cost of the current stage so far.
        used: Processor seconds of each process, by its number, when it was last seen.
        lock: Held while the processes are looked at.
    """

    driver: psutil.Process
    cost: Cost = field(default_factory=Cost)
    used: dict[int, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def finish_stage(self) -> Cost:
        """Returns the cost of the current stage; the next one begins."""
        with self.lock:
            self._look()
            cost = self.cost
            self.cost = Cost()
        return cost

    def _look(self) -> None:
        """Looks at all processes once."""
        try:
            processes = [self.driver, *self.driver.children(recursive=True)]
        except psutil.NoSuchProcess:
            return

        cost = self.cost
        for process in processes:
            try:
                times = process.cpu_times()
                resident = process.memory_info().rss / 2**30
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue

            seconds = times.user + times.system
            cost.processor += seconds - self.used.get(process.pid, 0.0)
            self.used[process.pid] = seconds
            if process.pid == self.driver.pid:
                cost.driver_gib = max(cost.driver_gib, resident)
            else:
                cost.worker_gib = max(cost.worker_gib, resident)

    def run(self) -> None:
        """Looks again and again until the command ends."""
        while self.driver.is_running() and self.driver.status() != psutil.STATUS_ZOMBIE:
            with self.lock:
                self._look()
            time.sleep(INTERVAL)


def write_photographs(voc: Path, classes: Path, train_list: str, size: int, folder: Path) -> Path:
    """Writes different JPEGs and the table `photos.csv`, unless the folder has it. Returns the table.

    Args:
        voc: VOC devkit.
        classes: File of its class names.
        train_list: Its list of training images.
        size: Number of training photographs.
        folder: Folder that is written.
    """
    table = folder / "photos.csv"
    if table.exists():
        return table
    folder.mkdir(parents=True, exist_ok=True)

    listed = list_voc(voc, classes=classes, train_list=train_list)
    rows = [row for row in listed.table.to_pylist() if row["tags"]]
    lines = ["image,tags,split"]
    for row in rows:
        if row["split"] == "val":
            tags = ";".join(listed.classes[k] for k in row["tags"])
            (folder / f"val-{row['image_id']}.jpg").write_bytes(Path(row["uri"]).read_bytes())
            lines.append(f"val-{row['image_id']}.jpg,{tags},val")

    train = [row for row in rows if row["split"] == "train"]
    for number in range(size):
        row = train[number % len(train)]
        name = f"train-{number:06d}.jpg"
        with Image.open(row["uri"]) as photograph:
            changed(photograph.convert("RGB"), number).save(folder / name, quality=90)
        tags = ";".join(listed.classes[k] for k in row["tags"])
        lines.append(f"{name},{tags},train")
    table.write_text("\n".join([*lines, ""]))
    return table


def changed(photograph: Image.Image, number: int) -> Image.Image:
    """Returns a random crop of a photograph, mirrored and with other colors, as a function of its number."""
    rng = np.random.default_rng(number)
    width, height = photograph.size
    scale = rng.uniform(MIN_AREA, 1.0) ** 0.5
    crop_width = round(scale * width)
    crop_height = round(scale * height)
    left = int(rng.integers(0, width - crop_width + 1))
    top = int(rng.integers(0, height - crop_height + 1))
    crop = photograph.crop((left, top, left + crop_width, top + crop_height))
    if rng.random() < 0.5:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)

    for enhancer in (ImageEnhance.Brightness, ImageEnhance.Color, ImageEnhance.Contrast):
        crop = enhancer(crop).enhance(float(rng.uniform(0.8, 1.2)))
    return crop


@contextlib.contextmanager
def watched_run(
    table: Path, name: str, options: argparse.Namespace, workspace: Path
) -> Iterator[tuple["subprocess.Popen[str]", Watch]]:
    """Starts the recipe on a table, and yields the command and the watch of its processes. Waits for its end."""
    words = [sys.executable, "-m", "mcis.platform.cli", "run", str(table), "--name", name, "--recipe", options.recipe]
    words += ["--workspace", str(workspace), *options.overrides]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as command:
        watch = Watch(psutil.Process(command.pid))
        looking = threading.Thread(target=watch.run)
        looking.start()
        yield command, watch
        looking.join()


def measure(table: Path, name: str, options: argparse.Namespace, workspace: Path) -> Costs:
    """Runs the recipe on a table and returns the cost of each stage."""
    costs = {}
    printed = []
    with watched_run(table, name, options, workspace) as (command, watch):
        began = time.monotonic()
        for line in command.stdout or ():
            printed.append(line)
            finished = FINISHED.match(line)
            if not finished:
                continue
            cost = watch.finish_stage()
            now = time.monotonic()
            cost.wall = now - began
            cost.disk_gib = folder_gib(workspace)
            costs[finished[1]] = cost
            began = now
    if command.returncode:
        sys.exit("".join(printed))
    return costs


def measure_killed(
    table: Path, name: str, options: argparse.Namespace, workspace: Path, undisturbed: Costs
) -> tuple[float, list[str]]:
    """Runs the recipe, kills it in the middle of each stage and repeats it.

    Args:
        table: Table of the photographs.
        name: Name of the run.
        options: Options of this script.
        workspace: Workspace, without the run.
        undisturbed: Cost of each stage in a run that was not killed.

    Returns:
        The processor seconds of all commands, and the stages that ended before they were killed.
    """
    stages = [stage for stage, cost in undisturbed.items() if cost.processor > 0]
    processor = 0.0
    ended_before = []
    for stage, previous in zip(stages, [None, *stages], strict=False):
        finished = set()
        with watched_run(table, name, options, workspace) as (command, watch):
            kill = threading.Timer(undisturbed[stage].wall / 2, command.kill)
            if previous is None:
                kill.start()
            for line in command.stdout or ():
                found = FINISHED.match(line)
                if found:
                    finished.add(found[1])
                if found and found[1] == previous:
                    kill.start()
            kill.cancel()
        processor += watch.finish_stage().processor
        print(f"killed in {stage}: finished {', '.join(finished) or 'nothing'}", flush=True)
        if stage in finished:
            ended_before.append(stage)

    last = measure(table, name, options, workspace)
    return processor + sum(cost.processor for cost in last.values()), ended_before


def folder_gib(folder: Path) -> float:
    """Returns the size of a folder, GiB."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**30


def costs_of_size(options: argparse.Namespace, classes: Path, size: int, folder: Path) -> Costs:
    """Measures a size, unless the folder has its costs."""
    costs_file = folder / f"costs-{size}.json"
    if costs_file.exists():
        return {stage: Cost(**cost) for stage, cost in json.loads(costs_file.read_text()).items()}

    table = write_photographs(options.voc, classes, options.train_list, size, folder / f"photographs-{size}")
    costs = measure(table, f"growth-{size}", options, folder / f"workspace-{size}")
    costs_file.write_text(json.dumps({stage: dataclasses.asdict(cost) for stage, cost in costs.items()}, indent=2))
    return costs


def compare_killed(options: argparse.Namespace, size: int, folder: Path, undisturbed: Costs) -> None:
    """Repeats a size with kills, and compares scores and processor seconds. Ends this process if the scores differ."""
    name = f"growth-{size}"
    workspace = folder / f"killed-{size}"
    table = folder / f"photographs-{size}" / "photos.csv"
    processor, ended_before = measure_killed(table, name, options, workspace, undisturbed)
    scores, killed_scores = (
        read_json(RunFolder(place / "runs" / name).scores)["scores"]
        for place in (folder / f"workspace-{size}", workspace)
    )
    if scores != killed_scores:
        sys.exit(f"the scores differ: {scores} without kills, {killed_scores} with kills")
    print(f"{size} photographs: the scores with kills are those without")
    print(f"ended before they were killed: {', '.join(ended_before) or 'none'}")
    ratio = processor / sum(cost.processor for cost in undisturbed.values())
    print(f"processor seconds with kills, relative to those without: {ratio:.2f}")


def plot(costs: Mapping[int, Costs], path: Path) -> None:
    """Plots processor seconds per photograph by stage, and memory, against the number of photographs."""
    sizes = list(costs)
    figure, (time_axes, memory_axes) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for stage in costs[sizes[-1]]:
        seconds = [costs[size][stage].processor / size for size in sizes]
        if min(seconds) > 0:
            time_axes.plot(sizes, seconds, marker="o", label=stage)
    time_axes.set_ylabel("processor seconds per photograph")
    time_axes.set_yscale("log")

    driver_gib = [max(cost.driver_gib for cost in costs[size].values()) for size in sizes]
    worker_gib = [max(cost.worker_gib for cost in costs[size].values()) for size in sizes]
    memory_axes.plot(sizes, driver_gib, marker="o", label="driver")
    memory_axes.plot(sizes, worker_gib, marker="o", label="largest worker")
    memory_axes.set_ylabel("peak memory, GiB")
    memory_axes.set_ylim(bottom=0)

    for axes in (time_axes, memory_axes):
        axes.set_xlabel("training photographs")
        axes.set_xscale("log")
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measures all sizes, prints tables, and compares the costs per photograph."""
    parser = harness.option_parser(__doc__)
    parser.add_argument("--sizes", default=SIZES, help=f"numbers of training photographs, ascending [{SIZES}]")
    harness.add_devkit(parser)
    parser.add_argument("--folder", type=Path, help="folder that keeps photographs and runs [a temporary one]")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="file of a plot [none]")
    parser.add_argument("--kill", action="store_true", help="repeat the smallest size with kills")
    parser.add_argument("--recipe", default="photos_fast")
    harness.add_overrides(parser)
    options = parser.parse_args()
    print(harness.describe_machine())
    with harness.working_folder(options.folder) as folder:
        compare(options, folder)


def compare(options: argparse.Namespace, folder: Path) -> None:
    """Measures all sizes in a folder and prints the costs."""
    if not options.voc:
        options.voc = folder / "VOC2012"
        options.train_list = "train_aug"
        devkit.draw(options.voc, train=20, val=6, size=96, classes=3)
    classes = options.classes or options.voc / "classes.txt"

    sizes = [int(size) for size in options.sizes.split(",")]
    costs: dict[int, Costs] = {}
    for size in sizes:
        costs[size] = costs_of_size(options, classes, size, folder)
        print(f"\n{size} photographs    wall s  processor s  driver GiB  worker GiB  disk GiB")
        for stage, cost in costs[size].items():
            memory = f"{cost.driver_gib:10.2f}  {cost.worker_gib:10.2f}"
            print(f"{stage:18}{cost.wall:8.1f}  {cost.processor:11.1f}  {memory}  {cost.disk_gib:8.2f}", flush=True)

    if options.kill:
        compare_killed(options, sizes[0], folder, costs[sizes[0]])
    if options.plot:
        plot(costs, options.plot)
    small = sizes[1] if len(sizes) > 2 else sizes[0]
    large = sizes[-1]
    print(f"\nprocessor seconds per photograph, {large} photographs against {small}")
    for stage, cost in costs[small].items():
        if cost.processor > 0:
            growth = costs[large][stage].processor / large / (cost.processor / small)
            print(f"{stage:18}{growth:6.2f}")
    totals = {size: sum(cost.processor for cost in costs[size].values()) / size for size in (small, large)}
    subject = f"processor seconds per photograph of a run on {large} photographs against {small}"
    print(f"ratio {totals[large] / totals[small]:.2f} target at most {TARGET:g}: {subject}")


if __name__ == "__main__":
    main()
