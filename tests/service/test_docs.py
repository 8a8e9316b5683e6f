"""The page of the API's description needs nothing but this process."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import httpx
import pytest

from tests.service.serving import Server, serving


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tiny, tmp_path_factory.mktemp("log") / "service.log") as running:
        yield running


class Links(HTMLParser):
    """What a page loads, and whether it holds a script or a style of its own."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inline: list[str] = []
        self._open: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = tag
        for name, value in attrs:
            if name in ("src", "href") and value:
                self.found.append(value)
            if name == "style" or name.startswith("on"):
                self.inline.append(name)

    def handle_endtag(self, tag: str) -> None:
        self._open = None

    def handle_data(self, data: str) -> None:
        if self._open in ("script", "style") and data.strip():
            self.inline.append(data)


def loaded(server: Server) -> dict[str, httpx.Response]:
    """Path → answer, of the page and of all it names."""
    page = server.client.get("/docs")
    answers = {"/docs": page}
    for link in Links(page.text).found:
        if not link.startswith("data:"):
            path = urljoin("/docs", link)
            answers[path] = server.client.get(path)
    return answers


def test_the_page_and_all_it_loads_come_from_this_process(server: Server) -> None:
    answers = loaded(server)

    assert set(answers) == {"/docs", "/docs/swagger-ui.css", "/docs/swagger-ui-bundle.js", "/docs/init.js"}
    assert {answer.status_code for answer in answers.values()} == {200}
    assert Links(answers["/docs"].text).inline == []
    urls = re.findall(r"url\(\s*[\"']?([^\"')\s]{1,30})", answers["/docs/swagger-ui.css"].text)
    assert urls
    assert all(url.startswith("data:") for url in urls)
    assert "@import" not in answers["/docs/swagger-ui.css"].text
    assert not re.search(r"https?:|//", answers["/docs"].text + answers["/docs/init.js"].text)
    assert "SwaggerUIBundle" in answers["/docs/swagger-ui-bundle.js"].text
    assert "validatorUrl: null" in answers["/docs/init.js"].text


def test_the_page_works_below_the_prefix_of_a_proxy(server: Server) -> None:
    links = [link for link in Links(server.client.get("/docs").text).found if not link.startswith("data:")]

    assert [urlsplit(urljoin("https://here/shop/docs", link)).path for link in links] == [
        "/shop/docs/swagger-ui.css",
        "/shop/docs/swagger-ui-bundle.js",
        "/shop/docs/init.js",
    ]
    assert 'url: "openapi.json"' in server.client.get("/docs/init.js").text


def test_a_browser_is_told_to_load_nothing_from_elsewhere(server: Server) -> None:
    for answer in loaded(server).values():
        policy = dict(part.split(maxsplit=1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy.pop("default-src") == "'none'"
        assert set(" ".join(policy.values()).split()) <= {"'self'", "'none'", "data:"}
        assert policy["img-src"] == "'self' data:"
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_page_describes_this_api_and_not_itself(server: Server) -> None:
    paths = server.client.get("/openapi.json").json()["paths"]

    assert "/v1/recommendations" in paths
    assert not any(path.startswith("/docs") for path in paths)


def test_a_wrong_method_on_the_page_is_a_405_problem(server: Server) -> None:
    answer = server.client.post("/docs")

    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
    assert answer.headers["content-type"] == "application/problem+json"


def test_the_page_can_be_switched_off_and_with_keys_the_description_then_needs_one(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, tmp_path / "log", DOCS="false") as server:
        assert server.client.get("/docs").status_code == 404
        assert server.client.get("/docs/swagger-ui.css").status_code == 404
        assert server.client.get("/openapi.json").status_code == 200
    with serving(tiny, tmp_path / "log", DOCS="false", API_KEY_SHA256="0" * 64) as server:
        assert server.client.get("/openapi.json").status_code == 401
    with serving(tiny, tmp_path / "log", API_KEY_SHA256="0" * 64) as server:
        assert {answer.status_code for answer in loaded(server).values()} == {200}
        assert server.client.get("/openapi.json").status_code == 200
