"""The operations on switches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.message import Message
from tenure.v1 import lease_pb2, switch_pb2

from sidecar.core import commands
from sidecar.core.commands import Reason, Refused
from sidecar.core.switches import Switch
from sidecar.services import translate_jobs as translate
from sidecar.services.base import Resource
from sidecar.services.calls import Answer, Caller
from sidecar.services.errors import ApiError, refused
from sidecar.services.notices import Notices
from sidecar.services.pages import Page
from sidecar.services.reads import Reads
from sidecar.services.views import Views

if TYPE_CHECKING:
    from sidecar.runtime import Runtime

# Switches looked at for one page.
SCAN_MAX, SCAN_STEP = 5_000, 500


class Switches(Resource):
    def __init__(self, runtime: Runtime, notices: Notices, reads: Reads, views: Views) -> None:
        super().__init__(runtime, notices, reads)
        self._views = views

    def set_switch(self, request: switch_pb2.SetSwitchRequest, caller: Caller, answer: Answer) -> None:
        command = translate.set_switch(request, caller)

        def done(result: commands.SwitchIsSet) -> Message:
            return switch_pb2.SetSwitchResponse(
                switch=self._shown(command.tenant, result.switch),
                replaced_switch_id=result.replaced,
                revision=result.revision,
            )

        key = caller.key(command.tenant, request.request_id)
        self._propose(command, caller, key, answer, commands.SwitchIsSet, done)

    def clear_switch(self, request: switch_pb2.ClearSwitchRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant) if request.tenant else ""
        command = translate.clear_switch(request, tenant)

        def done(result: commands.Done) -> Message:
            shown = self._shown(tenant, command.switch)
            return switch_pb2.ClearSwitchResponse(switch=shown, revision=result.revision)

        key = caller.key(tenant, request.request_id)
        self._propose(command, caller, key, answer, commands.Done, done)

    def get_switch(self, request: switch_pb2.GetSwitchRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant) if request.tenant else ""
        switch = translate.switch_id(request.switch_id)

        def produce(info: lease_pb2.ReadInfo) -> Message:
            row = self._machine.switch(tenant, switch)
            if row is None:
                raise _gone(switch)
            return switch_pb2.GetSwitchResponse(switch=self._views.switch(row), read=info)

        self._read(request.consistency, caller, answer, produce)

    def list_switches(self, request: switch_pb2.ListSwitchesRequest, caller: Caller, answer: Answer) -> None:
        tenant = caller.tenant_of(request.tenant) if request.tenant else ""
        scope = ("switches", tenant, "all" if request.include_ended else "in force")
        page = Page(scope, request.page_size, request.page_token, r"k\d{1,18}")

        def produce(info: lease_pb2.ReadInfo) -> Message:
            shown = self._page(tenant, caller, page, include_ended=request.include_ended)
            return switch_pb2.ListSwitchesResponse(
                switches=shown, next_page_token=page.next_token, read=info, kill_epoch=self._machine.kill_epoch
            )

        self._read(request.consistency, caller, answer, produce)

    def _page(self, tenant: str, caller: Caller, page: Page, *, include_ended: bool) -> list[switch_pb2.Switch]:
        """Looks at no more than SCAN_MAX switches; a page may then be short, and still have a next one."""
        seen = ("", *caller.tenants)
        items: list[switch_pb2.Switch] = []
        for _ in range(0, SCAN_MAX, SCAN_STEP):
            rows = self._machine.switches(tenant or None, include_ended, page.after, SCAN_STEP)
            for row in rows:
                if row.tenant not in seen:
                    page.skip(row.switch)
                    continue
                item = self._views.switch(row)
                if not page.take(row.switch, item):
                    return items
                items.append(item)
            if len(rows) < SCAN_STEP:
                page.finish()
                return items
        return items

    def _shown(self, tenant: str, switch: str) -> switch_pb2.Switch:
        """As it is now; a repeat, long after, may find it forgotten."""
        row: Switch | None = self._machine.switch(tenant, switch)
        if row is None:
            return switch_pb2.Switch(switch_id=switch, tenant=tenant)
        return self._views.switch(row)


def _gone(switch: str) -> ApiError:
    message = f"no switch {switch} is known: it never was, or ended long ago"
    return refused(Refused(reason=Reason.SWITCH_NOT_FOUND, message=message, facts=(("switch_id", switch),)))
