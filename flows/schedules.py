"""What `rollart bench async` compares, as data: schedules, and the latency of environments."""

from __future__ import annotations

from typing import Any

RESULTS, DISPATCH_RESULTS = "bench/async.json", "bench/dispatch.json"  # in the store of their run

SCHEDULES: dict[str, dict[str, Any]] = {
    # Generation and training take turns; every environment returns before the next generation; scoring after the
    # last episode; nothing runs during a weight update.
    "monolithic": {"max_staleness": 0, "barrier": "turn"},
    # Trajectories are independent of each other, on-policy: everything else waits.
    "synchronous": {"max_staleness": 0},
    # The rollout of batch k + 1 overlaps the training of batch k, with a barrier between waves.
    "one-off": {"max_staleness": 1, "barrier": "wave"},
    # Trajectory-level asynchrony under a bound.
    "rollart": {"max_staleness": 4},
}

# Log-normal latency of each environment call (mean in seconds, sigma of the logarithm), and the share of calls
# that raise or hang until their deadline. `middle` has the paper's traits: resets slower than steps, a long tail
# (the 99th percentile is 5 times the median), and a failing call in every few waves.
PRESETS: dict[str, dict[str, dict[str, float]]] = {
    "mild": {
        "latency": {"step_mean_s": 0.4, "step_sigma": 0.4, "reset_mean_s": 0.6, "reset_sigma": 0.4},
        "faults": {},
    },
    "middle": {
        "latency": {"step_mean_s": 0.5, "step_sigma": 0.7, "reset_mean_s": 1.0, "reset_sigma": 0.7},
        "faults": {"exception_share": 0.002, "hang_share": 0.001},
    },
    "heavy": {
        "latency": {"step_mean_s": 0.6, "step_sigma": 1.0, "reset_mean_s": 1.5, "reset_sigma": 1.0},
        "faults": {"exception_share": 0.005, "hang_share": 0.003},
    },
}
