"""Which expert to move next: tasks, Algorithm 1 of the paper, and the score-based baselines."""
