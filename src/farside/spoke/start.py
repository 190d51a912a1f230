"""Brings a spoke to life, for a mount and for the library API alike: joined, cache open, attached."""

from __future__ import annotations

import logging

from farside.config import SpokeConfig
from farside.errors import AuthError, CacheError, UsageError
from farside.protocol.join import join
from farside.protocol.tls import has_identity
from farside.protocol.tokens import parse_token
from farside.spoke.cache import ChunkCache
from farside.spoke.spoke import SLOW_DISK_S, Spoke

log = logging.getLogger("farside.spoke")


async def start_spoke(config: SpokeConfig) -> Spoke:
    """A spoke that is attached; ``close`` it when done.

    Raises:
        FarsideError: it cannot join, open its cache or attach; nothing is left behind.
    """
    if not config.insecure:
        await _ensure_joined(config)
    try:
        cache = ChunkCache.open(
            config.cache_dir, size_limit=config.cache_size, reserve=config.reserve, slow_s=SLOW_DISK_S
        )
    except OSError as error:
        raise CacheError(
            f"cannot use the cache directory: {error.strerror}", path=str(config.cache_dir)
        ) from error
    try:
        spoke = Spoke(config, cache)
    except BaseException:
        cache.close()
        raise
    try:
        await spoke.start()
    except BaseException:
        await spoke.close()
        raise
    return spoke


async def _ensure_joined(config: SpokeConfig) -> None:
    """Exchange the join token for an identity, the first time."""
    identity = config.identity_dir
    if has_identity(identity):
        return
    if config.token_file is None:
        raise UsageError(
            "this machine has not joined that hub yet",
            hub=str(config.hub.endpoint),
            hint="get a token with `farside hub invite` at the hub and give it with --token-file",
        )
    try:
        text = config.token_file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the join token: {error}", path=str(config.token_file)) from error
    token = parse_token(text)
    if token.portal != config.hub.portal:
        raise AuthError(
            f"the join token is for portal {token.portal}, not {config.hub.portal}",
            hub=str(config.hub.endpoint),
        )
    try:
        await join(config.hub.host, config.hub.port, token, identity, config.name, timeout=config.timeout_s)
    except OSError as error:
        raise UsageError(f"cannot keep the identity: {error.strerror}", path=str(identity)) from error
    log.info("joined hub %s as %s", config.hub.endpoint, config.name)
