"""What is no adapter of ours is refused in one sentence."""

from __future__ import annotations

import json

import pytest

from rpe3d.config import ConfigError
from rpe3d.geometry import make_law
from rpe3d.models.adapters import adapter_law
from rpe3d.train.merging import adapter_base


def test_the_law_and_the_base_are_read_from_the_adapter(tmp_path):
    law = make_law("yarn", pretrained=256, context=512, head_dim=16)
    (tmp_path / "rpe3d.json").write_text(json.dumps({"schema": 1, "law": law.to_dict()}))
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "default"}')
    assert adapter_law(tmp_path) == law
    assert adapter_base(tmp_path) == "default"


@pytest.mark.parametrize("function", [adapter_law, adapter_base])
def test_what_is_missing_or_damaged_is_said(tmp_path, function):
    with pytest.raises(ConfigError, match=r"was not trained under a law|holds no adapter"):
        function(tmp_path)
    for name in ("rpe3d.json", "adapter_config.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match="is damaged"):
        function(tmp_path)
