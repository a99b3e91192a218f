"""The Serve application: a router, and a deployment of engines for each role."""

from __future__ import annotations

from typing import Any

import msgspec
import ray
from ray import serve

from kvferry.cli import environment
from kvferry.cli.ray.engine import END_S, ROUTER, Engine
from kvferry.cli.ray.placement import check_placement
from kvferry.cli.ray.router import Router
from kvferry.cli.ray.scaling import LoadPolicy
from kvferry.cli.ray.settings import TARGETS, RaySettings, settings_from
from kvferry.errors import ConfigurationError
from kvferry.extras import how_to_install
from kvferry.http.registration import Side

# A router has no queue, and its own limits: Serve is to pass everything on.
NUM_REQUESTS = 1_000_000
HEALTH_S = 2.0
# Ray would kill the process that ends the engine's own server, and leave the server behind.
OF_ENGINES = {"RAY_kill_child_processes_on_worker_exit": "0"}
# Older releases build the ASGI application together with its class, and give policies another context.
OLDEST = (2, 60)


def app(args: dict[str, Any]) -> serve.Application:
    """What `serve run kvferry.ray:app` and configurations of `serve deploy` call. `args` are fields of `RaySettings`.

    Raises ConfigurationError for what cannot work on this cluster, before anything is started.
    """
    return application_of(settings_from(args))


def application_of(settings: RaySettings) -> serve.Application:
    """The application of these settings. Raises ConfigurationError."""
    _check_version(ray.__version__)
    token_file = settings.token_file or environment.token_file()
    if not token_file:
        raise ConfigurationError(
            "engines on several nodes need a shared token",
            found="no token_file, and no KVFERRY_TOKEN_FILE here",
            expected="a file with the same contents on every node",
            hint="make one with: (umask 077; openssl rand -hex 32 > kvferry.token)",
        )
    if not settings.nodes_may_join:
        check_placement(settings, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    settings = msgspec.structs.replace(settings, token_file=token_file)
    engines = [_engines(side, settings) for side in settings.roles]
    router = serve.deployment(serve.ingress()(Router)).options(
        name=ROUTER,
        num_replicas=1,
        max_ongoing_requests=NUM_REQUESTS,
        health_check_period_s=HEALTH_S,
        ray_actor_options=_actor_options(settings.router_resources),
    )
    return router.bind(settings.router_args, settings.token_file, *engines)


def _check_version(version: str) -> None:
    found = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if found < OLDEST:
        expected = f"{'.'.join(map(str, OLDEST))} or newer"
        raise ConfigurationError("this Ray is too old", found=version, expected=expected, hint=how_to_install("ray"))


def _engines(side: Side, settings: RaySettings) -> serve.Application:
    role = settings.roles[side]
    policy = {"policy_function": LoadPolicy, "policy_kwargs": {"target": role.target_load or TARGETS[side]}}
    deployment = serve.deployment(Engine).options(
        name=str(side),
        autoscaling_config={
            "min_replicas": role.min_replicas,
            "max_replicas": role.max_replicas,
            "upscale_delay_s": role.upscale_delay_s,
            "downscale_delay_s": role.downscale_delay_s,
            "look_back_period_s": role.look_back_s,
            "policy": policy,
        },
        placement_group_bundles=[role.resources],
        placement_group_strategy="STRICT_PACK",
        ray_actor_options=_actor_options(role.resources) | {"runtime_env": {"env_vars": OF_ENGINES}},
        health_check_period_s=HEALTH_S,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=settings.drain_timeout_s + 2 * END_S,
        graceful_shutdown_wait_loop_s=0.1,
    )
    limits = settings.start_timeout_s, settings.drain_timeout_s
    return deployment.bind(str(side), settings.serve_words(side), settings.token_file, limits)


def _actor_options(resources: dict[str, float]) -> dict[str, Any]:
    """Options that give an actor's process all of these resources: Ray shows it these devices only."""
    others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU", "memory")}
    own = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0), "resources": others}
    return own | ({"memory": resources["memory"]} if "memory" in resources else {})
