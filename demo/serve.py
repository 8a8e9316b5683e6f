"""`make serve`: the demo's model on http://127.0.0.1:8080 with an embedded Valkey, until Ctrl-C."""

import contextlib
import time

from stack import REGISTRY, running_service

PORT, OPS_PORT = 8080, 9090

if __name__ == "__main__":
    with running_service(PORT, OPS_PORT, REGISTRY.parent / "service.log") as address:
        print(f"Serving {REGISTRY} on {address} (OpenAPI: {address}/openapi.json). Ctrl-C stops it.", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)
