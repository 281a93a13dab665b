"""Every config parses, and the paper's six settings come out of docs/evaluation.md as the paper has them."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from ada.support.options import parse_options
from train import Config

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if path.stem != "figures")
DOC = (ROOT / "docs" / "evaluation.md").read_text()
SETTINGS = re.findall(r"^\| ([\w.-]+) \| `(--model [^`]+)` \| 8 \|", DOC, flags=re.MULTILINE)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_parses(path):
    """An option that was renamed would otherwise show on somebody's eight GPUs."""
    assert parse_options(Config, [f"--config={path}"]).config == str(path)


def test_the_toy_config_is_the_defaults_written_out():
    written = yaml.safe_load((ROOT / "configs/toy.yaml").read_text())
    config = parse_options(Config, [f"--config={ROOT / 'configs/toy.yaml'}"])
    assert config == Config(config=config.config)
    data = "prompt_column answer_column dataset_config split system_prompt instruction chat_template_kwargs"
    assert vars(config).keys() - written.keys() == {*data.split(), "name", "config"}


@pytest.mark.parametrize("name, options", SETTINGS, ids=[name for name, _ in SETTINGS])
def test_a_setting_of_the_paper(name, options):
    arguments = [f"--config={ROOT / 'configs/paper.yaml'}", *shlex.split(options), f"--name={name}-balance"]
    config = parse_options(Config, arguments)
    assert config.name == f"{name}-balance" and config.train_data.startswith("RLHFlow/reinforce_ada_")
    assert ("hard" in config.train_data) or name in ("1.5b", "7b")
    shared = {"prompts_per_step": 512, "group_size": 4, "round_size": 8, "max_rounds": 4, "steps": 600, "lr": 1e-6}
    shared |= {"updates_per_step": 4, "clip_low": 0.2, "clip_high": 0.28, "entropy_coef": 1e-4, "temperature": 1.0}
    shared |= {"max_prompt_tokens": 1024, "max_response_tokens": 2048, "warmup_steps": 10, "weight_decay": 0.0}
    assert {option: getattr(config, option) for option in shared} == shared


def test_there_are_six_settings():
    """A row that the pattern misses would pass."""
    models = [re.search(r"--model (\S+)", options)[1] for _, options in SETTINGS]
    assert [models.count(model) for model in dict.fromkeys(models)] == [2, 2, 1, 1]
    assert len(set(SETTINGS)) == 6
