"""The endpoints: a typed request in, one call into the domain, a typed answer out."""
