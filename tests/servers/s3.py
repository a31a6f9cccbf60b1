"""A real S3 server for tests: Ceph's RADOS Gateway with one monitor and one storage daemon that keeps all in memory.

It runs as three processes on free loopback ports with all its files in one temporary folder, is up in about three
seconds, and ends with its test session. It does what AWS does where the cache depends on it: conditional puts (of 32
at once exactly one wins), ranged GETs, multipart uploads. Debian's packages radosgw, ceph-mon and ceph-osd hold it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
import uuid
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool", "ceph", "setpriv")
ACCESS_KEY = "dflash-tests"
SECRET_KEY = "a-secret-that-no-message-may-show"
START_S = 60.0

CONFIG = """\
[global]
fsid = {fsid}
mon_host = [v2:127.0.0.1:{mon_port}/0]
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
ms_mon_client_mode = crc
ms_mon_service_mode = crc
ms_mon_cluster_mode = crc
ms_cluster_mode = crc
ms_service_mode = crc
ms_client_mode = crc
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
run_dir = {folder}
pid_file =
admin_socket =
crash_dir = {folder}
log_file = {folder}/$type.$id.log
log_to_stderr = false
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 4
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_data = {folder}/mon
mon_data_avail_crit = 1
mon_data_avail_warn = 2
paxos_propose_interval = 0.02
paxos_min_wait = 0.01
osd_objectstore = memstore
osd_data = {folder}/osd
memstore_device_bytes = 8589934592
rgw_frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw_data = {folder}/rgw
"""


def missing_programs() -> list[str]:
    """Programs of the server that this machine has not."""
    return [p for p in PROGRAMS if shutil.which(p) is None]


@dataclass(kw_only=True)
class S3Server:
    """A running server.

    Attributes:
        folder: its files and logs.
        port: of the S3 protocol, on 127.0.0.1.
    """

    folder: Path
    port: int
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """What a client of this server has in its environment."""
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def make_bucket(self, name: str) -> None:
        import obstore
        from obstore.store import S3Store

        client = S3Store(
            name,
            config={"access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY, "endpoint": self.endpoint},
            region="us-east-1",
            client_options={"allow_http": True},
        )
        signed = obstore.sign(client, "PUT", "", timedelta(seconds=60))
        urllib.request.urlopen(urllib.request.Request(signed, method="PUT"), timeout=30).close()

    def start_gateway(self) -> None:
        """Start the process that speaks S3 (again); what was stored is there."""
        self._start("gateway", "radosgw", "-n", "client.admin", "-f")
        deadline = time.monotonic() + START_S
        while not self._answers():
            process = self._processes["gateway"]
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"radosgw did not come up (exit {process.poll()}); see {self.folder}")
            time.sleep(0.05)

    def kill_gateway(self) -> None:
        """`kill -9` of the process that speaks S3."""
        self._end("gateway", signal.SIGKILL)

    def pause_gateway(self) -> None:
        """Stop it as a hung machine would: connections stay open and nothing answers."""
        os.killpg(self._processes["gateway"].pid, signal.SIGSTOP)

    def resume_gateway(self) -> None:
        os.killpg(self._processes["gateway"].pid, signal.SIGCONT)

    def stop(self) -> None:
        for name in list(self._processes):
            self._end(name, signal.SIGKILL)

    def pending_uploads(self, bucket: str, prefix: str) -> list[str]:
        """Parts of uploads below a prefix that have begun and neither ended nor been given up."""
        listed = self._run("radosgw-admin", "bucket", "list", "--bucket", bucket, "--allow-unordered")
        return [entry["name"] for entry in json.loads(listed) if entry["name"].startswith(f"_multipart_{prefix}/")]

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.endpoint, timeout=2).close()
        except OSError:
            return False
        return True

    def _start(self, name: str, program: str, *arguments: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                # Ends with the test session even if that is killed.
                ["setpriv", "--pdeathsig", "KILL", program, "-c", str(self.folder / "ceph.conf"), *arguments],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _end(self, name: str, how: signal.Signals) -> None:
        process = self._processes.pop(name, None)
        if process is None:
            return
        if process.poll() is None:
            os.killpg(process.pid, how)
        process.wait(timeout=30)

    def _run(self, program: str, *arguments: str) -> str:
        result = subprocess.run(
            [program, "-c", str(self.folder / "ceph.conf"), *arguments],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        if result.returncode:
            raise RuntimeError(f"{program} {' '.join(arguments)} failed: {result.stderr[-2000:]}")
        return result.stdout


def start_s3(folder: Path) -> S3Server:
    """Start a server with an empty store.

    Raises:
        RuntimeError: it does not come up; the message says which part.
    """
    mon_port, port = _free_ports(2)
    fsid, osd = str(uuid.uuid4()), str(uuid.uuid4())
    for name in ("mon", "osd", "rgw"):
        (folder / name).mkdir(parents=True)
    (folder / "ceph.conf").write_text(CONFIG.format(folder=folder, fsid=fsid, mon_port=mon_port, port=port))
    server = S3Server(folder=folder, port=port)
    try:
        monmap = str(folder / "monmap")
        server._run("monmaptool", "--create", "--addv", "a", f"[v2:127.0.0.1:{mon_port}]", "--fsid", fsid, monmap)
        server._run("ceph-mon", "-i", "a", "--mkfs", "--monmap", monmap)
        server._start("monitor", "ceph-mon", "-i", "a", "-f")
        server._run("ceph", "osd", "new", osd)
        server._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        server._start("storage", "ceph-osd", "-i", "0", "-f")
        server.start_gateway()
        server._run(
            "radosgw-admin", "user", "create", "--uid", "tests", "--display-name", "tests",
            "--access-key", ACCESS_KEY, "--secret-key", SECRET_KEY,
        )  # fmt: skip
    except BaseException:
        server.stop()
        raise
    return server


def _free_ports(n: int) -> list[int]:
    """Ports that were free a moment ago; all taken at once, so that they differ."""
    sockets = [socket.socket() for _ in range(n)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()
