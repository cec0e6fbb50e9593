"""Batches: what a forward sees, and that the steps are the same for any number of processes."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from rpe3d.config import ConfigError
from rpe3d.train.batches import Steps
from rpe3d.train.samples import IGNORED, Sample
from rpe3d.train.settings import Settings
from rpe3d.train.ulysses import SequenceParallel


def samples():
    for n in range(1000):
        ids = [n % 250 + 1] * (5 + n % 3)
        yield Sample(ids=ids, labels=[IGNORED, *ids[1:]], name=f"text {n}", after={"next": n + 1})


def steps(done=0, process=0, processes=1, parallel=None, **given):
    settings = Settings(**{"kind": "lm", "model": "m", "data": ["d"], "context": 64, "length": 8, "batch": 4, **given})
    where = {"process": process, "processes": processes, "parallel": parallel}
    return Steps(samples=samples(), settings=settings, done=done, **where)


def names(made, count):
    return [name for batch in islice(made, count) for name in batch["names"]]


def test_labels_stand_where_they_are_predicted_and_padding_is_behind():
    first, second = islice(steps(micro_batch=2), 2)
    assert first["input_ids"].tolist() == [[1, 1, 1, 1, 1, 0], [2, 2, 2, 2, 2, 2]]
    assert first["labels"].tolist() == [[IGNORED, 1, 1, 1, 1, IGNORED], [IGNORED, 2, 2, 2, 2, 2]]
    assert first["shift_labels"].tolist() == [[1, 1, 1, 1, IGNORED, IGNORED], [2, 2, 2, 2, 2, IGNORED]]
    assert "attention_mask" not in first
    assert second["names"] == ["text 2", "text 3"]


@pytest.mark.parametrize(("processes", "micro_batch"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_a_step_has_the_same_samples_on_any_number_of_processes(processes, micro_batch):
    per_step = 4 // (processes * micro_batch)
    found = []
    for process in range(processes):
        made = steps(process=process, processes=processes, micro_batch=micro_batch)
        assert made.accumulation == per_step
        found += names(made, 2 * per_step)
    assert sorted(found) == sorted(f"text {n}" for n in range(8))


def test_the_place_after_each_step_is_known_and_old_ones_are_forgotten():
    made = steps(done=10)
    list(islice(made, 5 * 4))
    assert made.places[15]["next"] == 20
    assert max(made.places) == 15
    assert len(made.places) <= 3


def test_slices_of_a_shared_sequence_join_to_the_whole():
    whole = next(iter(steps(micro_batch=2)))
    parts = [
        next(iter(steps(processes=2, process=rank, parallel=SequenceParallel(2, rank, None), micro_batch=2)))
        for rank in range(2)
    ]
    for key in ("input_ids", "labels", "shift_labels"):
        assert torch.equal(torch.cat([part[key] for part in parts], 1), whole[key])
    assert torch.cat([part["position_ids"] for part in parts], 1).tolist() == [list(range(6))] * 2
    assert parts[0]["names"] == parts[1]["names"]


def test_positions_that_skip_depend_on_the_sample_alone_and_come_with_a_mask():
    given = {"pose": 2}
    first, second, *_ = batches = list(islice(steps(**given), 8))
    assert first["position_ids"].tolist() != second["position_ids"].tolist()
    assert first["attention_mask"].all()
    later = steps(done=1, **given)
    later.samples = islice(samples(), 4, None)
    for a, b in zip(islice(later, 4), batches[4:], strict=True):
        assert torch.equal(a["position_ids"], b["position_ids"])


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match="a batch of 4 cannot be divided among 3 processes in forwards of 1"):
        steps(processes=3)


def test_an_error_in_the_data_arrives():
    made = steps()

    def broken():
        yield from islice(samples(), 6)
        raise ConfigError("line 9 is broken", "mend it")

    made.samples = broken()
    with pytest.raises(ConfigError, match="line 9 is broken"):
        list(islice(made, 8))
