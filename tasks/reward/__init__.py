"""Rewards: pure functions of a trajectory, by name."""

from tasks.reward.score import register_reward, score

__all__ = ["register_reward", "score"]
