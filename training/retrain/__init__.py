"""The retraining job: new events into the log, a better model out of it, judged before it is published.

In the order of a night: `sources` (where events come from) → `store` (every event once, by user) → `window` (what is
new, and whether to trust it) → `slices`, `warm`, `learn` (a candidate) → `gate` (judged) → `job` (it all) → `report`,
`tracking` (for people, programs and MLflow).
"""
