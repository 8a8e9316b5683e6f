"""Cold users: what a bundle answers before a user's first event and after few, beside popularity and blends of both.

Read `judge` for what is asked of whom, `blend` for the blends.
"""
