"""Labels images with a trained segmentation network, plain and after the dense CRF.

    predictor = Predictor.load("mcis-workspace/runs/mine")
    labels = predictor("photo.jpg")

The stage `predict`, the command `mcis predict` and Python code all use it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image

from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.images.decode import DecodedImage, RejectedImage, fit_picture, to_rgb
from mcis.datasets.images.squares import read_picture
from mcis.datasets.storage.threads import map_in_threads
from mcis.models.backbones import to_float_images
from mcis.models.registry import backbone_normalization
from mcis.models.segmenters import predict, restrict_to_tags, upsampled_labels
from mcis.platform.config.resolve import Overrides
from mcis.platform.networks.build import build_segmenter, load_trained
from mcis.platform.networks.crf_pool import CrfPool
from mcis.platform.networks.hub import open_pretrained, write_pretrained
from mcis.platform.networks.trained_segmenter import TrainedSegmenter, open_trained_segmenter

Key = TypeVar("Key")
Output = TypeVar("Output")


class Prediction(NamedTuple):
    """The prediction for one image.

    Attributes:
        image: The image as it was read, and the size of its file.
        plain: Probabilities (K + 1, h, w) at the size at which the image was read.
        refined: Probabilities after the dense CRF, (K + 1, h', w'), at the size at which the CRF runs. None: no CRF.
    """

    image: DecodedImage
    plain: NDArray[np.float32]
    refined: NDArray[np.float32] | None

    def labels(self, *, plain: bool = False) -> NDArray[np.uint8]:
        """Returns the labels of the whole image, (H, W), after the CRF if there is one and `plain` is False."""
        probabilities = self.plain if plain or self.refined is None else self.refined
        labels = upsampled_labels(torch.from_numpy(probabilities), self.image.height, self.image.width)
        return np.asarray(labels.numpy())


class PredictionInput(NamedTuple, Generic[Key]):
    """An image to predict.

    Attributes:
        key: Any value, which is passed on with the prediction.
        image: The image as it was read, and the size of its file.
        tags: Class indices, from 0, of what is in the image. It gets no other labels. None: not known.
    """

    key: Key
    image: DecodedImage
    tags: Sequence[int] | None = None


class Predictor:
    """Labels images, averaging over the configured scales and horizontal flips.

    A large image is predicted, and refined by the CRF, at a smaller size. Its probabilities are then resized to the
    size of the file in strips (`upsampled_labels`), so that memory stays bounded.

    Args:
        gpu: Whether the network runs on a GPU. None: if there is one.
        processes: Number of processes that run the CRF of earlier images while the network predicts the next one.
            0: one step after the other.
    """

    def __init__(self, trained: TrainedSegmenter, *, gpu: bool | None = None, processes: int = 0):
        config = trained.config
        self.trained = trained
        self.classes = trained.classes
        self.max_side = trained.max_side
        self.config = config.predict
        self.min_side = config.data.min_side
        self.max_pixels = config.data.max_pixels
        self.value_range = config.data.value_range
        self.processes = processes

        uses_gpu = torch.cuda.is_available() if gpu is None else gpu
        self.device = torch.device("cuda" if uses_gpu else "cpu")
        self.model = load_trained(build_segmenter(config.segmenter, len(self.classes)), trained.weights, self.device)
        self.normalize = backbone_normalization(config.segmenter.backbone)
        self.crf = CrfPool(self.config.crf, processes) if self.config.crf.iterations else None

    @classmethod
    def load(cls, run: Path | str, overrides: Overrides = (), *, processes: int = 0) -> "Predictor":
        """Loads the trained network of a run, on a GPU if there is one.

        Args:
            run: The folder of the run, WORKSPACE/runs/NAME.
            overrides: Values of `predict.*` or `data.max_side` that replace those of the run, such as
                `{"predict.hflip": False}`; or texts `key=value`.
            processes: See `Predictor`; used by `map`. A script that sets it needs `if __name__ == "__main__"`.

        Raises:
            UserError: There is no such run, it has trained no segmenter, or other keys are set.
        """
        return cls(open_trained_segmenter(run, overrides), processes=processes)

    @classmethod
    def from_pretrained(
        cls, source: Path | str, overrides: Overrides = (), *, revision: str | None = None, processes: int = 0
    ) -> "Predictor":
        """Loads a network that `save_pretrained` wrote. No code in the folder is run.

        Args:
            source: A folder, or the id of a repository on the Hugging Face hub.
            overrides: See `load`.
            revision: Branch, tag or commit of the repository.
            processes: See `load`.

        Raises:
            UserError: There is no such folder, it is damaged, its weights are of another network, or other keys are
                set.
        """
        return cls(open_pretrained(source, overrides, revision=revision), processes=processes)

    def save_pretrained(self, folder: Path | str) -> None:
        """Writes model.safetensors, config.json and a model card. `from_pretrained` then predicts the same."""
        write_pretrained(self.trained, Path(folder))

    def __call__(
        self, image: Path | str | NDArray[np.uint8] | Image, *, tags: Sequence[str] | None = None
    ) -> NDArray[np.uint8]:
        """Labels one image.

        Args:
            image: Path or URI of a file, whose EXIF orientation is applied. Or pixels, without reorientation: an image
                of Pillow, or RGB (H, W, 3) uint8.
            tags: Names of the classes that are in the image, if they are known. It gets no other labels.

        Returns:
            Labels (H, W) uint8: 0 is background, k + 1 is `classes[k]`.

        Raises:
            UserError: The file cannot be read or is no image, or a tag is no class.
            ValueError: The array has another shape or type.
            TypeError: `image` is none of the above.
        """
        tag_indices = None
        if tags is not None:
            tag_indices = self._class_indices([tags] if isinstance(tags, str) else tags)
        item = PredictionInput(None, self._decode(image), tag_indices)
        return next(self.map([item], lambda _, prediction: prediction.labels()))

    def read(self, uri: str) -> DecodedImage:
        """Reads an image at the size at which it is predicted. Raises what `read_picture` raises."""
        return read_picture(
            uri,
            min_side=self.min_side,
            max_pixels=self.max_pixels,
            max_side=self.max_side,
            value_range=self.value_range,
        )

    def map(
        self, inputs: Iterable[PredictionInput[Key]], then: Callable[[Key, Prediction], Output]
    ) -> Iterator[Output]:
        """Yields `then(key, prediction)` for each input, in their order.

        With processes, the network predicts an image while the CRF and `then` handle earlier ones: one for each process
        and one that waits for them. `then` is called from threads. Without processes, one image is finished before the
        next is started.
        """
        predicted = ((item, self._probabilities(item)) for item in inputs)
        if not self.processes:
            return (self._finish(item, plain, then) for item, plain in predicted)

        def finish(pair: tuple[PredictionInput[Key], NDArray[np.float32]]) -> Output:
            item, plain = pair
            return self._finish(item, plain, then)

        return map_in_threads(finish, predicted, threads=self.processes + 1, ahead=1)

    def close(self) -> None:
        """Ends the processes of the CRF."""
        if self.crf is not None:
            self.crf.close()

    def _decode(self, image: Path | str | NDArray[np.uint8] | Image) -> DecodedImage:
        """Reads or converts the image that `__call__` was given."""
        if not isinstance(image, str | Path | Image | np.ndarray):
            raise TypeError(f"an image of type {type(image).__name__}: give a path, a URI, an array or Pillow's image")
        try:
            if isinstance(image, Image):
                image = to_rgb(image, self.value_range)
            if isinstance(image, np.ndarray):
                return fit_picture(np.ascontiguousarray(image), self.max_side)
            return self.read(str(image))
        except RejectedImage as error:
            raise UserError(f"{image}: {error.reason}", "an image", "name another file") from None

    def _class_indices(self, tags: Sequence[str]) -> list[int]:
        """Returns the class indices of tags. Raises UserError if a tag is no class."""
        unknown = [str(tag) for tag in tags if tag not in self.classes]
        if unknown:
            raise UserError(
                f"tags {join_shortened(unknown)}",
                f"among the classes {', '.join(self.classes)}",
                "leave them out, or name classes of the trained run",
            )
        return [self.classes.index(tag) for tag in tags]

    def _probabilities(self, item: PredictionInput[Key]) -> NDArray[np.float32]:
        """Returns the probabilities (K + 1, H, W) of an image (H, W, 3), before the CRF."""
        image = self.normalize(to_float_images(torch.tensor(item.image.rgb, device=self.device)[None]))[0]
        probabilities = predict(
            self.model, image, scales=self.config.scales, hflip=self.config.hflip, crop=self.config.crop
        )
        if item.tags is not None:
            probabilities = restrict_to_tags(probabilities, item.tags)
        return np.asarray(probabilities.cpu().numpy())

    def _finish(
        self, item: PredictionInput[Key], plain: NDArray[np.float32], then: Callable[[Key, Prediction], Output]
    ) -> Output:
        """Applies the CRF, if there is one, and calls `then`."""
        refined = self.crf(item.image.rgb, plain) if self.crf else None
        if refined is not None and item.tags is not None:
            refined = restrict_to_tags(torch.from_numpy(refined), item.tags).numpy()
        return then(item.key, Prediction(item.image, plain, refined))
