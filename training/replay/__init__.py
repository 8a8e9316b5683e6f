"""Off-policy evaluation: what another policy's lists would have done, from lists that were served and what followed."""
