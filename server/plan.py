"""Which processes a server has, what each is told, and how much room their KV takes.

Owns instance names, endpoints and incarnations; starts nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from pdtrace.stages import Role
from server.config import COLOCATED, PD, ProcessConfig, Settings
from server.disk_cache import DiskCache
from server.engine.config import load_config
from server.engine.fake import FakeModel
from server.kv.layout import KvLayout
from server.models import is_fake, locate_model
from server.process import AGENT


def plan_processes(
    settings: Settings,
    *,
    endpoint: Callable[[str], str],
    pools: Path,
    http_fd: int,
    free_port: Callable[[], int],
) -> list[ProcessConfig]:
    """Every serving process of one host (the agent is `agent_config`), in order of starting.

    With `transfer="tcp"` the prefill side and the decode side get a transfer process each, as on
    two hosts, and the bytes cross a TCP connection on loopback.
    """
    gateway = endpoint("gateway-0")
    keyless = _without_key(settings)

    def process(role: str, index: int, **extra: str | int | None) -> ProcessConfig:
        instance = f"{role}-{index}"
        fields = {
            "settings": settings if role == Role.GATEWAY else keyless,
            "role": role,
            "instance": instance,
            "incarnation": secrets.token_hex(8),
            "endpoint": endpoint(instance),
            "gateway_endpoint": gateway,
            **extra,
        }
        return ProcessConfig(**fields)  # pyright: ignore[reportArgumentType]  msgspec checks below

    def with_pool(config: ProcessConfig) -> ProcessConfig:
        return msgspec.structs.replace(config, pool_path=_pool_path(pools, config))

    plan: list[ProcessConfig] = []
    if settings.mode == COLOCATED:
        plan += [with_pool(process("worker", index)) for index in range(settings.workers)]
    else:
        hosts = 2 if settings.transfer == "tcp" else 1
        addresses = [
            f"127.0.0.1:{free_port()}" if settings.transfer == "tcp" else None for _ in range(hosts)
        ]
        plan += [
            process("transfer", host, transfer_address=addresses[host]) for host in range(hosts)
        ]
        for role, count, host in (
            ("prefill", settings.prefill, 0),
            ("decode", settings.decode, hosts - 1),
        ):
            plan += [
                with_pool(
                    process(
                        role,
                        index,
                        transfer_endpoint=endpoint(f"transfer-{host}"),
                        transfer_address=addresses[host],
                    )
                )
                for index in range(count)
            ]
    plan.append(process("gateway", 0, http_fd=http_fd))
    return plan


def agent_config(settings: Settings, *, endpoint: Callable[[str], str]) -> ProcessConfig:
    """The recording's agent; it speaks to no other process."""
    return ProcessConfig(
        settings=_without_key(settings),
        role=AGENT,
        instance=AGENT,
        incarnation=secrets.token_hex(8),
        endpoint=endpoint(AGENT),
        gateway_endpoint=endpoint("gateway-0"),
    )


def _without_key(settings: Settings) -> Settings:
    """For those who never see a client: what they are told lies in a file."""
    return msgspec.structs.replace(settings, api_key=None)


def successor(config: ProcessConfig) -> ProcessConfig:
    """What the process after this one is told: the same name and address, another incarnation, and
    another KV pool, since a transfer process may still have this one's mapped. Faults that were
    armed in it, at start or later, went with it."""
    config = msgspec.structs.replace(
        config,
        settings=msgspec.structs.replace(config.settings, faults=()),
        incarnation=secrets.token_hex(8),
        follows=True,
    )
    if config.pool_path is None:
        return config
    return msgspec.structs.replace(
        config, pool_path=_pool_path(Path(config.pool_path).parent, config)
    )


def pool_bytes(settings: Settings) -> int:
    """Bytes of all KV pools together. Raises ModelError when the model's files are unusable."""
    if is_fake(settings.model):
        layout = FakeModel().layout(settings.page_size)
    else:
        config = load_config(locate_model(settings.model), DiskCache.default())
        layout = KvLayout(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=settings.page_size,
            dtype=settings.dtype,
        )
    if settings.mode == PD:
        pages = settings.prefill * settings.prefill_pages + settings.decode * settings.decode_pages
    else:
        pages = settings.workers * settings.decode_pages
    return pages * layout.page_bytes


def _pool_path(folder: Path, config: ProcessConfig) -> str:
    return str(folder / f"{config.instance}.{config.incarnation}")
