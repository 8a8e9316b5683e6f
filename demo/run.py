"""`make demo`: train on real ratings, serve, and play a new user through the service: no event, one, five."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from stack import REGISTRY, running_service

from model.bundle import Items, open_bundle
from model.registry import resolve
from training.datasets import fetch

OUT = REGISTRY.parent
CONFIG = Path("configs/ml-100k.yaml")
USER = "a new user"
WATCHED = [
    "Star Wars",
    "Empire Strikes Back, The",
    "Raiders of the Lost Ark",
    "Return of the Jedi",
    "Terminator, The",
]
"""What the new user watches, in this order."""

console = Console()


def main() -> None:
    console.rule("1. data: MovieLens 100K, real ratings")
    data = fetch("ml-100k", progress=lambda step: console.print(step.message, highlight=False))

    console.rule("2. training BFT-SASRec on this CPU, then judging it on test")
    train(data.interactions, data.items)

    console.rule("3. the same model, served over HTTP")
    items = open_bundle(resolve(REGISTRY)).items
    port, ops_port = free_port(), free_port()
    with (
        running_service(port, ops_port, OUT / "service.log") as address,
        httpx.Client(base_url=address) as client,
    ):
        show("Nobody has seen this user", recommend(client), items)
        watch(client, items, WATCHED[:1])
        show(f"After one event: {WATCHED[0]}", recommend(client), items)
        watch(client, items, WATCHED[1:])
        show(f"After five events: … {', '.join(WATCHED[1:])}", recommend(client), items)
    console.print(f"The bundle is {REGISTRY}/current. `make serve` keeps the service running.", highlight=False)


def train(interactions: Path, titles: Path) -> None:
    command = [
        Path(sys.executable).with_name("bft-train"), "fit",
        "--config", CONFIG, "--data", interactions, "--titles", titles, "--out", OUT,
    ]  # fmt: skip
    if subprocess.run([*map(str, command)]).returncode:
        raise SystemExit("the training failed; its message is above")


def recommend(client: httpx.Client) -> dict[str, Any]:
    return checked(client.post("/v1/recommendations", json={"user_id": USER, "num_results": 10}))


def watch(client: httpx.Client, items: Items, titles: list[str]) -> None:
    ids = {title: item_id for item_id, title in zip(items.ids, items.titles, strict=True)}
    events = [{"user_id": USER, "item_id": ids[title], "event_id": f"demo-{title}"} for title in titles]
    for result in checked(client.post("/v1/events", json={"events": events}))["results"]:
        if result["status"] != "accepted":
            raise SystemExit(f"the service did not accept an event: {result}")


def show(heading: str, answer: dict[str, Any], items: Items) -> None:
    titles = dict(zip(items.ids, items.titles, strict=True))
    table = Table(title=heading, title_justify="left", title_style="bold")
    for column in ("rank", "title", "confidence", "reliability", "score ± std"):
        table.add_column(column, justify="left" if column == "title" else "right")
    for item in answer["items"]:
        table.add_row(
            str(item["rank"]),
            titles[item["item_id"]],
            f"{item['confidence']:.1%}",
            f"{item['reliability']:.2f}",
            f"{item['score']:.2f} ± {item['std']:.2f}",
        )
    console.print(table)
    console.print(
        f"That one of these ten is the next film: {answer['list_confidence']:.0%}.   "
        f"model {answer['model']['version']}, cold start: {answer['cold_start']}\n",
        highlight=False,
    )


def checked(response: httpx.Response) -> dict[str, Any]:
    if response.is_error:
        raise SystemExit(f"the service answered {response.status_code}: {response.text}")
    return response.json()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
