"""The trainer's torchrun command: one node by default, this node's share of the ranks on several."""

from __future__ import annotations

import pytest

from tasks.errors import UserError
from tasks.training.service import launcher

SECOND_OF_TWO = {
    "ROLLART_NNODES": "2",
    "ROLLART_NODE_RANK": "1",
    "ROLLART_RENDEZVOUS": "trainer-0.trainer:29500",
}


@pytest.mark.parametrize(
    "environment", [{}, {"ROLLART_NNODES": ""}, {"ROLLART_NNODES": "1", "ROLLART_NODE_RANK": "0"}]
)
def test_by_default_all_ranks_are_on_this_node(environment: dict[str, str]) -> None:
    assert launcher(4, environment)[1:] == [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=4",
    ]


def test_of_several_nodes_each_starts_its_share_and_all_meet_on_the_first() -> None:
    assert launcher(16, SECOND_OF_TWO)[3:] == [
        "--nnodes=2", "--node-rank=1", "--nproc-per-node=8",
        "--rdzv-backend=static", "--rdzv-endpoint=trainer-0.trainer:29500",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"ROLLART_NNODES": "two"}, "ROLLART_NNODES"),
        ({"ROLLART_NNODES": "3"}, "trainer.ranks"),
        ({"ROLLART_NNODES": "0"}, "ROLLART_NNODES"),
        ({"ROLLART_NODE_RANK": ""}, "ROLLART_NODE_RANK"),
        ({"ROLLART_NODE_RANK": "2"}, "ROLLART_NODE_RANK"),
        ({"ROLLART_RENDEZVOUS": ""}, "ROLLART_RENDEZVOUS"),
        ({"ROLLART_RENDEZVOUS": "trainer-0"}, "ROLLART_RENDEZVOUS"),
    ],
)
def test_a_missing_or_wrong_setting_is_an_error_that_names_it(changes: dict[str, str], setting: str) -> None:
    with pytest.raises(UserError) as error:
        launcher(16, {**SECOND_OF_TWO, **changes})
    assert error.value.setting == setting
