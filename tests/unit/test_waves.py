"""Which task and seed a group has: reproducible, shared inside the group, different between groups."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tasks.config import RunConfig, TaskConfig
from tasks.rollout.waves import evaluation_specs, group_specs

SMALL = st.integers(0, 10_000)


def config(seed: int = 0, **weights: float) -> RunConfig:
    tasks = [
        TaskConfig(name=name, weight=weight) for name, weight in (weights or {"frozenlake": 1.0}).items()
    ]
    return RunConfig(seed=seed, tasks=tasks)


@given(seed=SMALL, wave=SMALL, group=SMALL)
def test_a_group_can_be_made_again_from_its_number_alone(seed: int, wave: int, group: int) -> None:
    assert group_specs(config(seed), wave, group) == group_specs(config(seed), wave, group)


@given(seed=SMALL, wave=SMALL, group=SMALL)
def test_members_share_task_and_seed_and_differ_in_their_index(seed: int, wave: int, group: int) -> None:
    settings = config(seed, frozenlake=1.0, arithmetic=2.0)
    specs = group_specs(settings, wave, group)
    assert len(specs) == settings.rollout.group_size
    assert [spec.index for spec in specs] == list(range(len(specs)))
    assert {(spec.task, spec.seed, spec.wave, spec.group) for spec in specs} == {
        (specs[0].task, specs[0].seed, wave, group)
    }
    assert 0 <= specs[0].seed < 2**31  # what every environment's seeding takes


def test_groups_waves_and_runs_get_different_seeds() -> None:
    seeds = [group_specs(config(s), w, g)[0].seed for s in range(3) for w in range(20) for g in range(32)]
    assert len(set(seeds)) == len(seeds)


def test_tasks_are_drawn_by_their_weights() -> None:
    settings = config(frozenlake=1.0, arithmetic=3.0)
    drawn = Counter(group_specs(settings, wave, group)[0].task for wave in range(50) for group in range(40))
    assert abs(drawn["arithmetic"] / 2000 - 0.75) < 0.04  # four standard errors


def test_adding_a_group_does_not_change_the_others() -> None:
    few = RunConfig(rollout={"groups": 4, "group_size": 2})
    many = RunConfig(rollout={"groups": 64, "group_size": 4})
    for wave, group in [(0, 0), (0, 3), (7, 1)]:
        assert group_specs(few, wave, group)[0] == group_specs(many, wave, group)[0]


def test_held_out_episodes_are_the_same_for_every_seed_and_count() -> None:
    task = TaskConfig(name="frozenlake")
    few, many = evaluation_specs(task, 8), evaluation_specs(task, 256)
    assert many[:8] == few
    assert len({spec.seed for spec in many}) == 256
    assert all(spec.wave < 0 for spec in many)
