"""The API's description as a page: Swagger UI from this process, without a byte from anywhere else.

The files of Swagger UI come with the package fastapi-offline. The page holds no script and no style of its own, so that
its Content-Security-Policy can forbid both; links are relative, so that it works behind a proxy with a path prefix.
"""

import importlib.resources
from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse

PAGE_PATH = "/docs"
INIT_PATH = "/docs/init.js"
ASSET_PATHS = {"/docs/swagger-ui-bundle.js": "text/javascript", "/docs/swagger-ui.css": "text/css"}
OPENAPI_PATH = "/openapi.json"

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>BFT recommender</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/init.js"></script>
</body>
</html>
"""

# Without `validatorUrl: null` Swagger UI would show the document to a server of its makers.
_INIT = """\
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  validatorUrl: null,
});
"""


def docs_router() -> APIRouter:
    """The page and what it loads; none of it is part of the API's description."""
    router = APIRouter(include_in_schema=False)

    @router.get(PAGE_PATH)
    async def page() -> Response:
        return Response(_PAGE, media_type="text/html", headers=HEADERS)

    @router.get(INIT_PATH)
    async def init() -> Response:
        return Response(_INIT, media_type="text/javascript", headers=HEADERS)

    for path, media_type in ASSET_PATHS.items():
        _add_asset(router, path, media_type)
    return router


def _add_asset(router: APIRouter, path: str, media_type: str) -> None:
    file = Path(str(importlib.resources.files("fastapi_offline"))) / "static" / path.rpartition("/")[2]

    @router.get(path)
    async def asset() -> FileResponse:
        return FileResponse(file, media_type=media_type, headers={**HEADERS, "Cache-Control": "max-age=3600"})
