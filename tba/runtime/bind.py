"""Preparations for Ray that come before `import ray`, which reads the environment."""

import os
import secrets
import sys

VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's documented switch: 1 listens on the machine's address, to join a cluster; 0 on loopback."""


TOKEN = secrets.token_hex(32)
"""Key to a private Ray. Without one, Ray writes its own to the home folder, which may be
read-only or may show it to others."""


def bind_ray(address: str | None) -> None:
    """Prepare the environment for a private Ray on loopback, or for the cluster at `address`."""
    wanted = "0" if address is None else "1"
    if "ray" in sys.modules and os.environ.get(VARIABLE) != wanted:
        raise ValueError(
            "ray was imported before the run began and would listen on the wrong address;"
            f" set {VARIABLE}={wanted} in the environment before `import ray`"
        )
    os.environ[VARIABLE] = wanted
    if address is None and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", TOKEN)
    elif os.environ.get("RAY_AUTH_TOKEN") == TOKEN:
        del os.environ["RAY_AUTH_TOKEN"]
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # a driver without its GCS ends after a minute, before a large model can be saved
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "3600")
    # a raylet may take longer than Ray's 30 s to start; `runtime.start_deadline` is the limit
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "3600")
    # without its raylet it ends at once if its parent is process 1, which Ray takes for a sign
    # that the raylet is dead; it looks at this process instead
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())
