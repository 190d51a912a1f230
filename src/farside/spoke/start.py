"""Brings a spoke to life, for a mount and for the library API alike: joined, cache open, attached."""

from __future__ import annotations

import logging
from pathlib import Path

from farside.config import SpokeConfig
from farside.errors import AuthError, CacheError, FarsideError, UsageError
from farside.protocol.join import join
from farside.protocol.tls import has_identity
from farside.protocol.tokens import parse_token
from farside.spoke.cache import ChunkCache
from farside.spoke.spoke import SLOW_DISK_S, Spoke

log = logging.getLogger("farside.spoke")


async def start_spoke(config: SpokeConfig) -> Spoke:
    """A spoke that is attached; ``close`` it when done.

    A spoke that the hub refuses (revoked, expired, the hub set up anew) joins again where there is a token.

    Raises:
        FarsideError: it cannot join, open its cache or attach; nothing is left behind.
    """
    if config.insecure or await _ensure_joined(config) or config.token_file is None:
        return await _start(config)
    try:
        return await _start(config)
    except AuthError as refused:
        try:
            await _join(config, config.token_file)
        except FarsideError as error:
            raise AuthError(
                f"{refused.message}, and the token does not help: {error.message}",
                hub=str(config.hub.endpoint),
                hint=error.hint or refused.hint,
            ) from refused
    return await _start(config)


async def _start(config: SpokeConfig) -> Spoke:
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


async def _ensure_joined(config: SpokeConfig) -> bool:
    """Exchange the join token for an identity, the first time; returns whether this was it."""
    if has_identity(config.identity_dir):
        return False
    if config.token_file is None:
        raise UsageError(
            f"this machine has not joined that hub for portal {config.hub.portal} yet",
            hub=str(config.hub.endpoint),
            hint=f"get a token with `farside hub invite --portal {config.hub.portal}` at the hub "
            "and give it with --token-file",
        )
    await _join(config, config.token_file)
    return True


async def _join(config: SpokeConfig, token_file: Path) -> None:
    identity = config.identity_dir
    try:
        text = token_file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"cannot read the join token: {why}", path=str(token_file)) from error
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
