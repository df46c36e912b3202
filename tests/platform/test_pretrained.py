"""Pretrained weights that do not fit: the error names the keys of the network that they were meant for."""

from pathlib import Path
from typing import Literal

import pytest
import torch
import typer

from mcis.datasets.errors import UserError
from mcis.datasets.images import read_rgb
from mcis.models.backbones import small
from mcis.platform.commands.options import plain_errors
from mcis.platform.config.training import ClassifierConfig
from mcis.platform.networks.build import build_backbone
from mcis.platform.networks.pretrained import load_backbone


@pytest.mark.parametrize(("network", "key"), [("classifier", "weights.backbone"), ("segmenter", "weights.segmenter")])
def test_the_errors_of_weights_name_the_keys_of_their_network(
    tmp_path: Path, network: Literal["classifier", "segmenter"], key: str
) -> None:
    path = tmp_path / "weights.pth"
    torch.save({"conv1.weight": torch.zeros(1)}, path)
    with pytest.raises(UserError, match="does not fit the backbone") as other_weights:
        load_backbone(network, build_backbone(ClassifierConfig(backbone="resnet50")), path)
    assert other_weights.value.remedy.endswith(f"of this {network}.backbone by {key}")
    with pytest.raises(UserError, match="all of whose layers are new") as nothing_to_load:
        load_backbone(network, small(), path)
    assert f"{network}.backbone" in nothing_to_load.value.remedy
    assert key in nothing_to_load.value.remedy
    assert "`" not in nothing_to_load.value.remedy


def test_a_command_says_how_to_repeat_the_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), plain_errors():
        read_rgb(str(tmp_path / "gone.jpg"))
    assert "repeat the command with --from index" in capsys.readouterr().err
