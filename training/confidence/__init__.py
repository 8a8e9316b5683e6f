"""What a confidence is worth: how true it is, whom it picks out, and what precision adds to what comes for free.

Read `measures` for the figures, `signals` for the confidences that are compared.
"""
