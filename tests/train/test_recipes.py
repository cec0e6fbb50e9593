"""Every recipe parses, states a law that can be made for its model, and has a small twin on the default model."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpe3d.config import ConfigError
from rpe3d.geometry import make_law
from rpe3d.train.corpus import open_corpus
from rpe3d.train.settings import Settings, read_recipe, recipes

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(FOLDER.glob("*.json"))
MODELS = {
    "meta-llama/Llama-2-7b-hf": {"pretrained": 4096, "head_dim": 128},
    "meta-llama/Llama-2-7b-chat-hf": {"pretrained": 4096, "head_dim": 128},
    "runs/table3-3d-rpe-llama2-7b-32k/merged": {"pretrained": 4096, "head_dim": 128},
    "meta-llama/Meta-Llama-3-8B-Instruct": {"pretrained": 8192, "head_dim": 128, "rope_theta": 5e5},
    "default": {"pretrained": 8192, "head_dim": 64, "rope_theta": 1e5},
}
SMALL = [path for path in RECIPES if path.stem.endswith("-small")]
LARGE = [path for path in RECIPES if path not in SMALL]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_states_a_law_for_its_model(path):
    settings = Settings(**read_recipe(path))
    law = make_law(settings.law, context=settings.context, **MODELS[settings.model], **settings.parameters)
    assert law.context == settings.context


def test_recipes_come_with_the_package_and_are_found_by_name(tmp_path, monkeypatch):
    """The wheel has them; a file of that name in the folder goes first."""
    monkeypatch.chdir(tmp_path)
    assert set(recipes()) == {path.stem for path in RECIPES}
    for path in RECIPES:
        assert read_recipe(Path(path.stem)) == read_recipe(path)
    with pytest.raises(
        ConfigError, match="recipe 'table3-longlora-32' is not known: did you mean 'table3-longlora-32k'"
    ):
        read_recipe(Path("table3-longlora-32"))
    (tmp_path / "table3-longlora-32k").write_text('{"steps": 1}')
    assert read_recipe(Path("table3-longlora-32k")) == {"steps": 1}


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_a_recipe_of_the_paper_has_the_papers_settings_and_a_twin(path):
    settings, twin = (Settings(**read_recipe(p)) for p in (path, path.with_stem(f"{path.stem}-small")))
    assert (settings.batch, settings.learning_rate, settings.beta1, settings.beta2) == (8, 2e-5, 0.9, 0.95)
    assert settings.steps == (1000 if settings.kind == "lm" else 3000)
    assert (twin.model, twin.kind, twin.attention, twin.method) == (
        "default", settings.kind, settings.attention, settings.method,
    )  # fmt: skip
    assert bool(twin.pose) == bool(settings.pose)


@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_a_twin_needs_no_hub(path):
    assert len(open_corpus(Settings(**read_recipe(path)).data)) > 50


def test_every_recipe_is_in_the_table_of_the_readme():
    text = (FOLDER / "README.md").read_text()
    assert len(LARGE) == len(SMALL) == 7
    assert all(path.name in text for path in LARGE)
