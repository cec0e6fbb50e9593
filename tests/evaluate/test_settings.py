"""What a comparison may be asked for."""

from __future__ import annotations

import pytest

from rpe3d.config import ConfigError
from rpe3d.evaluate import Settings
from rpe3d.geometry import LawSpec


def test_laws_may_be_names_or_entries_with_parameters():
    tuned = LawSpec(label="tuned", name="3d-rpe", parameters={"reach": 128})
    assert Settings(laws=["rope", "tuned=3d-rpe:reach=128"], lengths=[256]).entries[1] == tuned
    settings = Settings(laws=["rope", tuned], lengths=[512, 256, 512])
    assert settings.entries == (LawSpec(label="rope", name="rope", parameters={}), tuned)
    assert settings.lengths == (512, 256)
    assert settings.to_dict()["laws"] == ["rope", "tuned"]
    assert settings.to_dict()["given"]["tuned"] == {"law": "3d-rpe", "reach": 128}


def test_four_windows_or_all_of_a_published_protocol():
    def of(protocol):
        return Settings(laws=["rope"], lengths=[256], protocol=protocol).windows

    assert (of("windows"), of("overlap_mean"), of("sliding_new_tokens")) == (4, None, None)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"lengths": [255]}, r"length is 255, outside \[256"),
        ({"lengths": []}, "no lengths are given"),
        ({"laws": []}, "no laws are given"),
        ({"laws": ["ropes"]}, "law 'ropes' is not known: did you mean 'rope'"),
        ({"laws": ["rope", "rope"]}, "law 'rope' is given twice"),
        ({"measures": ["ppl", "speed"]}, "measure 'speed' is not known"),
        ({"measures": []}, "no measures are given"),
        ({"protocol": "sliding"}, "protocol 'sliding' is not known: choose one of windows, "),
        ({"windows": 0}, "windows is 0"),
        ({"copies": 0}, "copies is 0"),
        ({"passkeys": 1.5}, "passkeys is 1.5"),
        ({"batch": 0}, "batch is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"lengths": [512, 256], "context": 511}, "length 512 is beyond the context 511"),
    ],
)
def test_what_cannot_be_is_refused(given, problem):
    with pytest.raises(ConfigError, match=problem):
        Settings(**{"laws": ["rope"], "lengths": [256]} | given)


def test_a_parameter_that_a_law_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="law 'yarn' has no parameter 'chunk'"):
        LawSpec(label="x", name="yarn", parameters={"chunk": 1})
