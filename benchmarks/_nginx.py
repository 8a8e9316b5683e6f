"""nginx in front of replicas, as docs/service.md has it ("Behind a proxy"): a process of this user, in a folder."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from _processes import Replica, free_port

HOST = "127.0.0.1"
START_S = 30.0

CONFIGURATION = """
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
{user}
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;

    upstream replicas {{
{servers}
        keepalive 32;
    }}
    proxy_http_version 1.1;
    proxy_set_header Connection "";
    proxy_connect_timeout 1s;

    server {{
        listen {host}:{port};
        location / {{
            proxy_pass http://replicas;
            proxy_next_upstream error timeout non_idempotent;
        }}
        location = /v1/events {{
            proxy_pass http://replicas;
            proxy_next_upstream error timeout;
        }}
    }}
}}
"""


class Nginx:
    """A running nginx.

    Args:
        folder: for all its files.
        replicas: what it passes requests on to.
    """

    def __init__(self, folder: Path, replicas: Sequence[Replica]) -> None:
        self.port = free_port(HOST)
        self._folder = folder
        self._replicas = replicas
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients ask."""
        return f"http://{HOST}:{self.port}"

    def start(self) -> None:
        """Return when it answers."""
        self._configure(())
        self.process = subprocess.Popen([_program(), *self._options()], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex((HOST, self.port)) == 0:
                    return
            time.sleep(0.02)
        raise RuntimeError(f"nginx did not start: {(self._folder / 'error.log').read_text()}")

    def leave_out(self, down: Collection[Replica]) -> None:
        """Mark these replicas as `down`, the others not, and have nginx read that."""
        self._configure(down)
        if self.process is not None:
            self.process.send_signal(signal.SIGHUP)

    def close(self) -> None:
        """End it if it runs."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(START_S)

    def _options(self) -> list[str]:
        return ["-p", str(self._folder), "-c", str(self._folder / "nginx.conf"), "-e", str(self._folder / "error.log")]

    def _configure(self, down: Collection[Replica]) -> None:
        servers = [
            f"        server {replica.host}:{replica.port} max_fails=0{' down' if replica in down else ''};"
            for replica in self._replicas
        ]
        # Started by root, its workers would be another user, who may not enter this folder.
        user = "user root root;" if os.geteuid() == 0 else ""
        text = CONFIGURATION.format(
            folder=self._folder, user=user, servers="\n".join(servers), host=HOST, port=self.port
        )
        (self._folder / "nginx.conf").write_text(text)


@contextmanager
def nginx(folder: Path, replicas: Sequence[Replica]) -> Iterator[Nginx]:
    """nginx before these replicas, for a `with` block."""
    folder.mkdir()
    proxy = Nginx(folder, replicas)
    try:
        proxy.start()
        yield proxy
    finally:
        proxy.close()


def _program() -> str:
    found = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if found is None:
        raise FileNotFoundError("there is no nginx here: install it (Debian: apt-get install nginx-light)")
    return found
