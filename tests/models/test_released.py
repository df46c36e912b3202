"""Tests of released checkpoints: they compute the released formulas, and every tensor that does not fit is named."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mcis.datasets.errors import UserError
from mcis.models.backbones import vgg16
from mcis.models.classifier import CoAttentionClassifier, PairInputs
from mcis.models.released import convert_released_state, read_released_weights

CLASSES = 3
VGG_CHANNELS = {
    0: (3, 64),
    2: (64, 64),
    5: (64, 128),
    7: (128, 128),
    10: (128, 256),
    12: (256, 256),
    14: (256, 256),
    17: (256, 512),
    19: (512, 512),
    21: (512, 512),
    24: (512, 512),
    26: (512, 512),
    28: (512, 512),
}
"""Input and output channels of VGG-16's convolutions by their index in torchvision's `features`."""


@pytest.fixture(scope="module")
def checkpoint() -> dict[str, Tensor]:
    """Returns random tensors with the released names and shapes (paper-vs-code, "Classifier")."""
    shapes = {f"vgg.features.{index}": (outputs, inputs, 3, 3) for index, (inputs, outputs) in VGG_CHANNELS.items()}
    shapes |= {f"vgg.extra_convs.{index}": (512, 512, 3, 3) for index in (0, 2, 4)}
    shapes["vgg.extra_last_conv"] = (CLASSES, 512, 1, 1)

    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, shape in shapes.items():
        fan_in = shape[1] * shape[2] * shape[3]
        state[f"module.{name}.weight"] = torch.randn(shape, generator=generator) * (2 / fan_in) ** 0.5
        state[f"module.{name}.bias"] = torch.randn(shape[0], generator=generator) * 0.1
    state["module.extra_linear_e.weight"] = torch.randn(512, 512, generator=generator) * 0.02
    state["module.extra_gate.weight"] = torch.randn(CLASSES, 512, 1, 1, generator=generator) * 0.05
    state["module.extra_gate_merge.weight"] = torch.randn(1, 512, 1, 1, generator=generator) * 0.05
    return state


def released_scores(checkpoint: dict[str, Tensor], f_m: Tensor, f_n: Tensor) -> dict[str, Tensor]:
    """Computes the scores of image m from features (512, h, w) by the released formulas, in float64."""

    def parameter(name: str) -> Tensor:
        return checkpoint[f"module.{name}"].double()

    flat_m = f_m.flatten(1).double()
    flat_n = f_n.flatten(1).double()
    affinity = nn.functional.linear(flat_m.T, parameter("extra_linear_e.weight")) @ flat_n  # (W_e f_m)^T f_n
    common_m = flat_n @ torch.softmax(affinity, dim=1).T
    gate = torch.sigmoid(parameter("extra_gate_merge.weight")[:, :, 0, 0] @ common_m)
    class_weight = parameter("vgg.extra_last_conv.weight")[:, :, 0, 0]
    common_weight = parameter("extra_gate.weight")[:, :, 0, 0]
    return {
        "basic_m": (class_weight @ flat_m).mean(1) + parameter("vgg.extra_last_conv.bias"),
        "co_attention_m": (common_weight @ common_m).mean(1),
        "contrastive_m": (common_weight @ (flat_m * (1 - gate))).mean(1),
    }


def test_a_converted_classifier_computes_the_released_formulas(checkpoint: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save({"state_dict": checkpoint, "epoch": 10}, tmp_path / "released.pth")
    model = CoAttentionClassifier(vgg16(), classes=CLASSES, head="own")
    model.load_state_dict(read_released_weights(tmp_path / "released.pth"), strict=True)
    images = torch.randn(2, 3, 32, 40, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        scores = model(PairInputs(images[:1], images[1:])).pairs
        f_m, f_n = (model.backbone(image[None])[0] for image in images)
        expected = released_scores(checkpoint, f_m, f_n)
    for name, values in expected.items():
        torch.testing.assert_close(getattr(scores, name)[0].double(), values, rtol=1e-4, atol=1e-5)


def test_every_tensor_that_does_not_fit_is_named(checkpoint: dict[str, Tensor]) -> None:
    state = dict(checkpoint)
    del state["module.extra_gate.weight"]
    state["module.fc.weight"] = torch.zeros(2)
    state["module.extra_linear_e.weight"] = torch.zeros(512, 256)
    with pytest.raises(UserError) as caught:
        convert_released_state(state)
    text = str(caught.value)
    assert "3 tensor(s)" in text
    assert "missing: extra_gate.weight" in text
    assert "unexpected: fc.weight" in text
    assert "different shape: extra_linear_e.weight is (512, 256), expected (512, 512)" in text
