"""Pretrained and initial weights that do not fit: the error names the keys of the network that they were meant for."""

from pathlib import Path
from typing import Literal

import pytest
import torch
import typer

from mcis.datasets.errors import UserError
from mcis.datasets.images.squares import read_rgb
from mcis.models import timm_backbones
from mcis.models.backbones import small
from mcis.models.pretrained import BUNDLED_BACKBONES, bundled_weights
from mcis.platform.commands.errors import plain_errors
from mcis.platform.config.training import ClassifierConfig
from mcis.platform.networks.build import build_backbone
from mcis.platform.networks.pretrained import backbone_weights, load_backbone
from mcis.platform.runs.workspace import Workspace


@pytest.mark.parametrize(
    ("network", "key"), [("classifier", "weights.classifier_backbone"), ("segmenter", "weights.segmenter_backbone")]
)
def test_errors_of_weights_name_the_keys(tmp_path: Path, network: Literal["classifier", "segmenter"], key: str) -> None:
    path = tmp_path / "weights.pth"
    torch.save({"conv1.weight": torch.zeros(1)}, path)
    with pytest.raises(UserError, match="does not fit the backbone") as other_weights:
        load_backbone(network, build_backbone(ClassifierConfig(backbone="resnet50")), path)
    assert other_weights.value.remedy.endswith(f"of this backbone ({key}, {network}.backbone)")
    with pytest.raises(UserError, match="whose layers are all new") as nothing_to_load:
        load_backbone(network, small(), path)
    assert f"{network}.backbone" in nothing_to_load.value.remedy
    assert key in nothing_to_load.value.remedy
    assert "`" not in nothing_to_load.value.remedy


def test_bundled_weights_are_a_file_of_their_backbone(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    path = backbone_weights("bundled", BUNDLED_BACKBONES[2], workspace)
    assert path == bundled_weights(BUNDLED_BACKBONES[2])
    backbone = build_backbone(ClassifierConfig(backbone=BUNDLED_BACKBONES[2]))
    before = backbone.body.get_parameter("conv_stem.weight").clone()
    load_backbone("classifier", backbone, path)
    assert not torch.equal(backbone.body.get_parameter("conv_stem.weight"), before)
    with pytest.raises(UserError, match="no weights of vgg16 are bundled") as raised:
        backbone_weights("bundled", "vgg16", workspace)
    assert BUNDLED_BACKBONES[0] in raised.value.expected


def test_timms_weights_are_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By timm itself, from its cache or hub; then the workspace stores them as any other file of weights."""
    workspace = Workspace(tmp_path)
    name = "timm/resnet18"
    fetched = timm_backbones.timm.create_model("resnet18")
    monkeypatch.setattr(timm_backbones, "download_state_dict", lambda name: fetched.state_dict())
    path = backbone_weights("download", name, workspace)
    assert path is not None
    monkeypatch.setattr(timm_backbones, "download_state_dict", None)
    assert backbone_weights("download", name, workspace) == path
    backbone = build_backbone(ClassifierConfig(backbone=name))
    load_backbone("classifier", backbone, path)
    assert torch.equal(backbone.body.get_parameter("conv1.weight"), fetched.get_parameter("conv1.weight"))


def test_without_a_connection_timms_weights_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str) -> None:
        raise OSError("no connection")

    monkeypatch.setattr(timm_backbones, "download_state_dict", offline)
    with pytest.raises(UserError, match=r"timm/resnet18 cannot be downloaded \(no connection\)") as raised:
        backbone_weights("download", "timm/resnet18", Workspace(tmp_path))
    assert "weights.classifier_backbone=PATH" in raised.value.remedy
    assert not list(Workspace(tmp_path).weights.iterdir())


def test_a_command_says_how_to_repeat_the_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "damaged.jpg").write_bytes(b"no image")
    with pytest.raises(typer.Exit), plain_errors():
        read_rgb(str(tmp_path / "damaged.jpg"))
    assert "mcis run --config WORKSPACE/runs/NAME/config.toml --name NAME --from index" in capsys.readouterr().err
