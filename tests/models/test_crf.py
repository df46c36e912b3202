"""The dense CRF against mean-field inference over all pairs of pixels in float64, and on an image of two halves."""

import numpy as np
import pytest
from numpy.typing import NDArray

from mcis.models.crf import CrfParameters, dense_crf

Array = NDArray[np.float64]


def soft(energy: Array) -> Array:
    weights = np.exp(-(energy - energy.min(axis=0)))
    return weights / weights.sum(axis=0)


def mean_field(rgb: NDArray[np.uint8], probabilities: NDArray[np.float32], parameters: CrfParameters) -> Array:
    """Inference by Kraehenbuehl and Koltun with exact sums over all pairs of pixels instead of a lattice."""
    labels, height, width = probabilities.shape
    unary = -np.log(np.maximum(probabilities.astype(np.float64), parameters.floor)).reshape(labels, -1)
    position = np.indices((height, width)).reshape(2, -1).T.astype(np.float64)
    color = rgb.reshape(-1, 3).astype(np.float64)

    def kernel(space: float, tone: float) -> Array:
        distance = ((position[:, None] - position) ** 2).sum(axis=-1) / (2 * space**2)
        contrast = ((color[:, None] - color) ** 2).sum(axis=-1) / (2 * tone**2)
        values = np.exp(-distance - contrast)
        root = np.sqrt(values.sum(axis=1))
        return values / root[:, None] / root

    smooth = parameters.position_weight * kernel(parameters.position_std, np.inf)
    appearance = parameters.bilateral_weight * kernel(parameters.bilateral_std, parameters.color_std)
    q = soft(unary)
    for _ in range(parameters.iterations):
        q = soft(unary - q @ smooth - q @ appearance)
    return q.reshape(labels, height, width)


def picture(height: int, width: int) -> NDArray[np.uint8]:
    """Two noisy halves, dark left and bright right."""
    noise = np.random.default_rng(1).integers(-3, 4, (height, width, 3))
    return (np.where(np.arange(width) < width // 2, 60, 180)[None, :, None] + noise).astype(np.uint8)


def noisy_probabilities(labels: int, height: int, width: int) -> NDArray[np.float32]:
    """Noise with a bias to the first label on the left and to the last one on the right."""
    drawn = np.random.default_rng(2).dirichlet(np.ones(labels), (height, width)).transpose(2, 0, 1)
    drawn[0, :, : width // 2] += 0.5
    drawn[-1, :, width // 2 :] += 0.5
    return (drawn / drawn.sum(axis=0)).astype(np.float32)


@pytest.mark.parametrize(
    "parameters",
    [
        CrfParameters(),
        CrfParameters(bilateral_weight=0, position_weight=6.0),
        CrfParameters(bilateral_weight=0, position_weight=6.0, position_std=1.0),
        CrfParameters(position_weight=0),
        CrfParameters(position_weight=0, bilateral_std=2.0),
        CrfParameters(position_weight=0, color_std=200.0),
        CrfParameters(iterations=3, position_weight=2.0, bilateral_std=10.0, color_std=8.0, bilateral_weight=2.0),
        CrfParameters(floor=0.2),
    ],
    ids=str,
)
def test_it_is_mean_field_inference(parameters: CrfParameters) -> None:
    """The error of the lattice approximation is small compared with the change that the CRF makes."""
    rgb = picture(11, 16)
    probabilities = noisy_probabilities(3, 11, 16)
    actual = dense_crf(rgb, probabilities, parameters)
    expected = mean_field(rgb, probabilities, parameters)
    assert actual.dtype == np.float32
    change = np.abs(expected - probabilities).mean()
    assert change > 0.01
    assert np.abs(actual - expected).mean() < 0.12 * change
    np.testing.assert_allclose(actual.sum(axis=0), 1, atol=1e-5)


@pytest.mark.parametrize("turned", [False, True])
def test_a_noisy_mask_is_cleaned_along_the_edge_of_the_colors(turned: bool) -> None:
    """A mask that is wrong at a quarter of the pixels becomes the two halves of the image, in either orientation."""
    rgb = picture(24, 32)
    truth = np.broadcast_to(np.arange(32) < 16, (24, 32)).astype(int)
    if turned:
        rgb = rgb.transpose(1, 0, 2)
        truth = truth.T
    flipped = truth ^ (np.random.default_rng(3).random(truth.shape) < 0.25)
    probabilities = np.where(np.arange(2)[:, None, None] == flipped, 0.7, 0.3).astype(np.float32)
    assert (probabilities.argmax(axis=0) != truth).mean() > 0.15
    refined = dense_crf(rgb, probabilities, CrfParameters(iterations=5)).argmax(axis=0)
    np.testing.assert_array_equal(refined, truth)


def test_without_iterations_nothing_changes() -> None:
    probabilities = noisy_probabilities(3, 9, 12)
    refined = dense_crf(picture(9, 12), probabilities, CrfParameters(iterations=0, floor=0.1, max_side=4))
    np.testing.assert_array_equal(refined, probabilities)


def test_a_single_label_has_probability_1() -> None:
    probabilities = np.full((1, 3, 4), 0.4, np.float32)
    assert (dense_crf(picture(3, 4), probabilities, CrfParameters()) == 1).all()


def test_read_only_and_strided_inputs_give_the_same_result() -> None:
    """Arrays from Ray or a memory map are read-only, so the test also shows that inputs are not changed."""
    rgb = picture(9, 12)
    probabilities = noisy_probabilities(3, 9, 12)
    expected = dense_crf(rgb, probabilities, CrfParameters())
    strided = dense_crf(np.asfortranarray(rgb), np.asfortranarray(probabilities), CrfParameters())
    np.testing.assert_array_equal(strided, expected)

    rgb.flags.writeable = False
    probabilities.flags.writeable = False
    np.testing.assert_array_equal(dense_crf(rgb, probabilities, CrfParameters()), expected)
    np.testing.assert_array_equal(rgb, picture(9, 12))
    np.testing.assert_array_equal(probabilities, noisy_probabilities(3, 9, 12))


def test_a_crf_with_a_maximum_side_runs_on_the_downscaled_image() -> None:
    """The image consists of large uniform areas, for which downscaling changes almost no label."""
    rng = np.random.default_rng(0)
    rgb = np.kron(rng.integers(0, 256, (4, 6, 3)), np.ones((16, 16, 1))).astype(np.uint8)
    planes = np.kron(rng.dirichlet(np.ones(3), (4, 6)).transpose(2, 0, 1), np.ones((1, 16, 16))).astype(np.float32)
    actual = dense_crf(rgb, planes, CrfParameters(max_side=48))
    assert actual.shape == planes.shape
    np.testing.assert_array_equal(
        dense_crf(rgb, np.stack([planes[::-1], planes]), CrfParameters(max_side=48))[1], actual
    )
    np.testing.assert_allclose(actual.sum(axis=0), 1, atol=1e-5)
    small = dense_crf(rgb[::2, ::2], np.ascontiguousarray(planes[:, ::2, ::2]), CrfParameters())
    assert (actual.argmax(axis=0)[::2, ::2] == small.argmax(axis=0)).mean() > 0.97
    whole = dense_crf(rgb, planes, CrfParameters())
    assert not np.array_equal(actual, whole)
    np.testing.assert_array_equal(dense_crf(rgb, planes, CrfParameters(max_side=96)), whole)
