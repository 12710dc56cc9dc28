"""Resumable: the part of a pipeline that leaves its requests with a buddy, and goes on with those of others."""

from __future__ import annotations

import secrets

from trinity.core.journal import JournalStart
from trinity.errors.arguments import Number, check_value
from trinity.instance import Instance
from trinity.pipeline.adoptions import WITHIN_S, Adoptions, Resumption
from trinity.pipeline.frontend_host import FrontendHost
from trinity.remote import instance_processes, supervisor


class Resumable:
    """Part of ``Pipeline``: see ``ProcessConfig(buddy=...)``."""

    instances: list[Instance]
    _frontend: FrontendHost
    _process_config: supervisor.ProcessConfig
    _secret: bytes | None
    _processes: instance_processes.InstanceSupervisor | None
    _adoptions: Adoptions | None = None

    @property
    def journal_address(self) -> str:
        """Address at which other pipelines bring their journals to this one; "" for none."""
        return self._adoptions.address if self._adoptions is not None else ""

    @property
    def has_buddy(self) -> bool:
        """True while another pipeline is told of this one's requests, and would go on with them."""
        return self._frontend.journal.reached

    def resume(self, /, request_id: str, after: int = -1, within_s: float = WITHIN_S) -> Resumption:
        """Read on a request that was sent to another program, which has died, and whose buddy this pipeline is.

        - ``after`` (index, -1): of the last token that its reader has; the next one is the first that comes.
        - ``within_s`` (seconds, 10): how long to wait until that program's death is noticed here.

        ::

            async with pipe.resume("chat-17", after=41) as tokens:
                async for token in tokens:
                    print(token.index, token.text)

        Its ``output`` has all tokens. Entering raises ``ResumeError``, whose ``reason`` tells why not. A request can be
        resumed once; leaving the block ends it. Raises ``ConfigError`` for an index or seconds that are none.
        """
        check_value("request_id", request_id, str)
        after, within_s = check_value("after", after, int), check_value("within_s", within_s, Number)
        return Resumption(self._adoptions or Adoptions(self._frontend), request_id, after, within_s)

    async def _begin_journals(self) -> None:
        """Take journals of others, and keep one with the buddy, as far as there are to be any."""
        config, buddy = self._process_config, self._process_config.buddy
        if buddy is None or self._secret is None or self._processes is None:
            return
        names = tuple(sorted(each.name for each in self.instances))
        model = next(each.fingerprint for each in self._processes.members.values())  # theirs is one
        start = JournalStart(secrets.token_hex(8), model, names)
        self._adoptions = Adoptions(self._frontend)
        await self._adoptions.start(buddy, start, self._secret, config)
        self._frontend.journal.start(buddy, self._frontend.core.name, start, self._secret, config.tls)

    async def _end_journals(self) -> None:
        """Have the buddy go on with nothing, and take no journals any more."""
        await self._frontend.journal.aclose()
        if self._adoptions is not None:
            await self._adoptions.aclose()
