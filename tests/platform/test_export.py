"""Where an exported picture goes: below the folder, for any image id (the pictures: test_pipeline)."""

import pytest

from mcis.platform.reporting.export import file_name


@pytest.mark.parametrize(
    ("image_id", "name"),
    [
        ("2007_000032", "2007_000032"),
        ("web/cat/a.jpg", "web/cat/a.jpg"),
        ("/data/photos/a.jpg", "data/photos/a.jpg"),
        ("s3://bucket/key.jpg", "s3/bucket/key.jpg"),
        ("a/../b", "b"),
        ("../b", None),
        ("/../b", None),
        ("s3://../../b", None),
    ],
)
def test_a_picture_lies_below_the_folder_or_nowhere(image_id: str, name: str | None) -> None:
    assert file_name(image_id) == name
