"""Segmentation network + images -> labels, plain and after the dense CRF; for the stage, the command and Python alike.

predictor = Predictor.load("mcis-workspace/runs/mine")
labels = predictor("photo.jpg")
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image

from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import Picture, RejectedImage, fit_picture
from mcis.datasets.images.squares import read_picture
from mcis.datasets.index import shown
from mcis.datasets.storage.folders import local_path
from mcis.datasets.storage.threads import in_threads
from mcis.models.backbones import to_unit
from mcis.models.networks import normalization_of
from mcis.models.segmenters import among_tags, labels_at, predict
from mcis.platform.config.resolve import resolve
from mcis.platform.config.sections import Config
from mcis.platform.networks.build import build_segmenter, load_trained
from mcis.platform.networks.crf_pool import CrfPool
from mcis.platform.outputs.read_index import of_split, open_index
from mcis.platform.runs.workspace import Workspace

K = TypeVar("K")
T = TypeVar("T")
MOST_SIDE = 1024
"""Most pixels of a side of overlays, and of photographs as they are predicted where the run has no `data.max_side`."""


class Prediction(NamedTuple):
    """What was predicted of an image.

    Attributes:
        picture: the image as it was read, and its whole size.
        plain: probabilities (K + 1, h, w) at the size at which it was read.
        refined: those after the dense CRF, (K + 1, h', w') at the size at which it runs, or None where there is none.
    """

    picture: Picture
    plain: NDArray[np.float32]
    refined: NDArray[np.float32] | None

    def labels(self, *, plain: bool = False) -> NDArray[np.uint8]:
        """Labels of the whole image, (H, W), after the CRF where there is one and `plain` does not leave it out."""
        probabilities = self.plain if plain or self.refined is None else self.refined
        labels = labels_at(torch.from_numpy(probabilities), self.picture.height, self.picture.width)
        return np.asarray(labels.numpy())


class Photo(NamedTuple, Generic[K]):
    """An image that is to be predicted.

    Attributes:
        key: anything that who gets its prediction is to know of it.
        picture: the image as it was read.
        tags: class indices, from 0, of what is in it, where that is known: it is given no other label.
    """

    key: K
    picture: Picture
    tags: Sequence[int] | None = None


class TrainedRun(NamedTuple):
    """A trained segmentation network of a run.

    Attributes:
        config: of the run, with what was changed for its predictions.
        weights: the folder of the network.
        classes: the K class names; label k + 1 is `classes[k]`, label 0 background.
        max_side: longest side at which photographs are predicted, pixels: of the training images as they were read the
            median, as a network knows things by their size; or `data.max_side` where that is set for the predictions.
            None = each at its own size.
        run: the run's folder, which the model card tells of; None = a network without one.
    """

    config: Config
    weights: Path
    classes: tuple[str, ...]
    max_side: int | None
    run: Path | None = None


class Predictor:
    """Labels images, over the configured scales and mirror images.

    An image that is read smaller is predicted, and refined by the CRF, at that size; the probabilities are brought back
    to its whole size a strip at a time (`labels_at`), so that memory stays bounded.

    Args:
        gpu: whether the network runs on a GPU; None = where there is one.
        processes: that run the CRF of earlier images while the network has the next one; 0 = in turn.
    """

    def __init__(self, trained: TrainedRun, *, gpu: bool | None = None, processes: int = 0):
        config, self.classes, self.max_side = trained.config, trained.classes, trained.max_side
        self.trained = trained
        self.config, self.min_side, self.max_pixels = config.predict, config.data.min_side, config.data.max_pixels
        self.processes = processes
        self.device = torch.device("cuda" if (torch.cuda.is_available() if gpu is None else gpu) else "cpu")
        self.model = load_trained(build_segmenter(config.segmenter, len(self.classes)), trained.weights, self.device)
        self.normalize = normalization_of(config.segmenter.backbone)
        self.refiner = CrfPool(self.config.crf, processes) if self.config.crf.iterations else None

    @classmethod
    def load(cls, run: Path | str, assignments: Sequence[str] = (), *, processes: int = 0) -> "Predictor":
        """The trained network of a run, on a GPU where there is one.

        Args:
            run: its folder, WORKSPACE/runs/NAME.
            assignments: `key=value` texts that change the run's `predict.*` or `data.max_side`.
            processes: see `Predictor`; for `map`. A script that asks for some needs `if __name__ == "__main__"`.

        Raises:
            UserError: there is no such run, it has trained no segmenter, or other keys are set.
        """
        return cls(trained_run(run, assignments), processes=processes)

    @classmethod
    def from_pretrained(
        cls, source: Path | str, assignments: Sequence[str] = (), *, revision: str | None = None, processes: int = 0
    ) -> "Predictor":
        """A network that `save_pretrained` wrote, from a folder or, by its id and `revision`, the Hugging Face hub.

        Nothing that lies there is run. `assignments` and `processes` are as in `load`.

        Raises:
            UserError: there is none, it is damaged, its weights are of another network, or other keys are set.
        """
        from mcis.platform.networks.hub import pretrained  # which imports this module

        return cls(pretrained(source, assignments, revision=revision), processes=processes)

    def save_pretrained(self, folder: Path | str) -> None:
        """Writes model.safetensors, config.json and a model card, from which `from_pretrained` predicts the same."""
        from mcis.platform.networks.hub import write_pretrained

        write_pretrained(self.trained, Path(folder))

    def __call__(
        self, image: Path | str | NDArray[np.uint8] | Image, *, tags: Sequence[str] | None = None
    ) -> NDArray[np.uint8]:
        """Labels of one image, (H, W) uint8: 0 is background, k + 1 is `classes[k]`.

        Args:
            image: path or URI of a file, whose EXIF orientation is applied; or, as its pixels lie, one of Pillow, or
                RGB (H, W, 3) uint8.
            tags: the names of the classes that are in it, where they are known: it is given no other label.

        Raises:
            UserError: the file cannot be read, or is no image; or a tag is no class.
            ValueError, TypeError: an array of another shape or type; what is no image.
        """
        known = None if tags is None else self._indices([tags] if isinstance(tags, str) else tags)
        if isinstance(image, Image):
            image = np.array(image.convert("RGB"))
        if isinstance(image, np.ndarray):
            picture = fit_picture(np.ascontiguousarray(image), self.max_side)
        elif not isinstance(image, str | Path):
            raise TypeError(f"an image of type {type(image).__name__}: give a path, a URI, an array or Pillow's image")
        else:
            try:
                picture = self.read(str(image))
            except RejectedImage as error:
                raise UserError(f"{image}: {error.reason}", "an image", "name another file") from None
        return next(self.map([Photo(None, picture, known)], lambda _, prediction: prediction.labels()))

    def read(self, uri: str) -> Picture:
        """An image as it is predicted; errors as of `read_picture`."""
        return read_picture(uri, min_side=self.min_side, max_pixels=self.max_pixels, max_side=self.max_side)

    def map(self, photos: Iterable[Photo[K]], then: Callable[[K, Prediction], T]) -> Iterator[T]:
        """What `then` makes of the key and the prediction of each photo, in their order.

        The network has a photo while the CRF and `then` have earlier ones: as many as there are `processes`, and one
        that is made ready for them; `then` is called from threads. Without processes, one photo is finished before the
        next.
        """
        predicted = ((photo, self._probabilities(photo)) for photo in photos)
        if not self.processes:
            return (self._finished(*each, then) for each in predicted)
        return in_threads(lambda each: self._finished(*each, then), predicted, threads=self.processes + 1, ahead=1)

    def close(self) -> None:
        """Ends the processes of the CRF."""
        if self.refiner is not None:
            self.refiner.close()

    def _probabilities(self, photo: Photo[K]) -> NDArray[np.float32]:
        """Probabilities (K + 1, H, W) of an image (H, W, 3), before the CRF."""
        c = self.config
        image = self.normalize(to_unit(torch.tensor(photo.picture.rgb, device=self.device)[None]))[0]
        probabilities = predict(self.model, image, scales=c.scales, mirror=c.hflip, crop=c.crop)
        if photo.tags is not None:
            probabilities = among_tags(probabilities, photo.tags)
        return np.asarray(probabilities.cpu().numpy())

    def _indices(self, tags: Sequence[str]) -> list[int]:
        if others := [str(tag) for tag in tags if tag not in self.classes]:
            classes = f"among the classes {', '.join(self.classes)}"
            raise UserError(f"tags {shown(others)}", classes, "leave them out, or name classes of the trained run")
        return [self.classes.index(tag) for tag in tags]

    def _finished(self, photo: Photo[K], plain: NDArray[np.float32], then: Callable[[K, Prediction], T]) -> T:
        refined = self.refiner(photo.picture.rgb, plain) if self.refiner else None
        if refined is not None and photo.tags is not None:
            refined = among_tags(torch.from_numpy(refined), photo.tags).numpy()
        return then(photo.key, Prediction(photo.picture, plain, refined))


def trained_run(run: Path | str, assignments: Sequence[str] = ()) -> TrainedRun:
    """What a run's folder says of its trained network; arguments and errors are those of `Predictor.load`."""
    folder = local_path(str(run)).expanduser().resolve()
    check_assignments(assignments)
    workspace = Workspace(folder.parent.parent, create=False)
    weights = workspace.outputs(folder.name).get("train_segmenter")
    if weights is None:
        raise UserError(
            f"{folder} is no run, or has no trained segmentation network",
            "the folder of a run that has passed the stage train_segmenter, WORKSPACE/runs/NAME",
            "name another run, or repeat its command with --until train_segmenter",
        )
    config = resolve(assignments=assignments, file=workspace.run(folder.name, create=False).config).config
    index = open_index(workspace, folder.name)
    side, most = config.data.max_side, config.data.max_side or MOST_SIDE
    if not any(text.startswith("data.max_side=") for text in assignments):
        rows = of_split(index.index, "train")
        sides = np.maximum(rows["height"].to_numpy(), rows["width"].to_numpy())
        side = min(most, int(np.median(sides))) if len(sides) else most
    return TrainedRun(config, weights, index.classes, side, folder)


def check_assignments(assignments: Sequence[str]) -> None:
    """Checks that `key=value` texts change nothing but predictions; UserError where they do."""
    allowed = ("predict.", "data.max_side=", "data.max_pixels=", "data.tags.allow_absolute=")
    others = [text for text in assignments if not text.startswith(allowed)]
    if others:
        raise UserError(
            f"{', '.join(others)} for the predictions of a trained network",
            "keys predict.*, data.max_side, data.max_pixels or data.tags.allow_absolute",
            "leave the others out, or repeat the run with them",
        )
