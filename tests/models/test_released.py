"""Released checkpoints: the same maps as the released formulas give, and every misfit named."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mcis.datasets.errors import UserError
from mcis.models.backbones import vgg16
from mcis.models.classifier import CoAttentionClassifier
from mcis.models.released import convert_released_state, read_released_weights

K = 3


@pytest.fixture(scope="module")
def checkpoint() -> dict[str, Tensor]:
    """Random values under the released names (RELEASED_RECIPE, "Classifier"), in the shapes of torchvision's VGG-16."""
    generator = torch.Generator().manual_seed(0)
    convs = {0: (3, 64), 2: (64, 64), 5: (64, 128), 7: (128, 128), 10: (128, 256), 12: (256, 256), 14: (256, 256)}
    convs |= {17: (256, 512), **dict.fromkeys((19, 21, 24, 26, 28), (512, 512))}
    shapes = {f"vgg.features.{i}": (out, into, 3, 3) for i, (into, out) in convs.items()}
    shapes |= {f"vgg.extra_convs.{i}": (512, 512, 3, 3) for i in (0, 2, 4)}
    shapes["vgg.extra_last_conv"] = (K, 512, 1, 1)
    state = {}
    for name, shape in shapes.items():
        fan = shape[1] * shape[2] * shape[3]
        state[f"module.{name}.weight"] = torch.randn(shape, generator=generator) * (2 / fan) ** 0.5
        state[f"module.{name}.bias"] = torch.randn(shape[0], generator=generator) * 0.1
    state["module.extra_linear_e.weight"] = torch.randn(512, 512, generator=generator) * 0.02
    state["module.extra_gate.weight"] = torch.randn(K, 512, 1, 1, generator=generator) * 0.05
    state["module.extra_gate_merge.weight"] = torch.randn(1, 512, 1, 1, generator=generator) * 0.05
    return state


def test_an_imported_classifier_computes_the_released_formulas(checkpoint: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save({"state_dict": checkpoint, "epoch": 10}, tmp_path / "released.pth")
    model = CoAttentionClassifier(vgg16(), classes=K, head="own")
    model.load_state_dict(read_released_weights(tmp_path / "released.pth"), strict=True)
    images = torch.randn(2, 3, 32, 40, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        scores = model(images[:1], images[1:])[0]
        f_m, f_n = (model.backbone(image[None])[0] for image in images)

        def given(name: str) -> Tensor:
            return checkpoint[f"module.{name}"].double()

        flat_m, flat_n = f_m.flatten(1).double(), f_n.flatten(1).double()
        affinity = nn.functional.linear(flat_m.T, given("extra_linear_e.weight")) @ flat_n  # (W_e f_m)^T f_n
        common_m = flat_n @ torch.softmax(affinity, dim=1).T
        head = given("extra_gate.weight")[:, :, 0, 0]
        gate = torch.sigmoid(given("extra_gate_merge.weight")[:, :, 0, 0] @ common_m)
        expected = {
            "basic_m": (given("vgg.extra_last_conv.weight")[:, :, 0, 0] @ flat_m).mean(1)
            + given("vgg.extra_last_conv.bias"),
            "common_m": (head @ common_m).mean(1),
            "exclusive_m": (head @ (flat_m * (1 - gate))).mean(1),
        }
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
