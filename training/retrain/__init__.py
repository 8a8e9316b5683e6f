"""The retraining job: new events into the log, a better model out of it, judged before it is published.

Reads top to bottom: `sources` (where events come from) → `store` (every event once, by user).
"""
