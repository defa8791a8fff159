"""What a machine derives from its tables must equal what a fresh machine derives from the same tables."""

from __future__ import annotations

from sidecar.core.machine import Machine


def restored(machine: Machine) -> Machine:
    again = Machine()
    again.restore(machine.capture().encode())
    return again


def check_derived(machine: Machine) -> None:
    again = restored(machine)
    assert derived(machine) == derived(again)
    assert again.digest() == machine.digest()
    assert again.next_deadline_ms() == machine.next_deadline_ms()
    assert again.counts() == machine.counts()


def derived(machine: Machine) -> dict[str, object]:
    sessions, leases = machine._sessions, machine._leases
    records, requests, switches = machine._records, machine._requests, machine._switches
    return {
        "session order": list(sessions._order),
        "sessions per tenant": dict(sorted(sessions._per_tenant.items())),
        "lines": dict(sorted(leases._lines.items())),
        "held": {session: sorted(held.items()) for session, held in sorted(leases.held.items())},
        "waits": {session: sorted(waits) for session, waits in sorted(leases._waits.items())},
        "lease order": list(leases._order),
        "record order": {state: list(order) for state, order in records._order.items()},
        "running": {session: sorted(running) for session, running in sorted(records._running.items())},
        "agenda": sorted(machine._agenda._armed),
        "expiries": sorted(records.expiries._armed),
        "request queue": list(requests._queue),
        "switches in force": {tenant: sorted(rows.items()) for tenant, rows in sorted(switches._in_force.items())},
        "ended switches": list(switches._ended),
        "switch numbers": list(switches._numbers),
        "kills": sorted(switches._kills.items()),
        "jobs": derived_of_jobs(machine),
        "operations": {session: sorted(found) for session, found in sorted(requests._operations.items())},
    }


def derived_of_jobs(machine: Machine) -> dict[str, object]:
    jobs, occurrences, runs = machine._jobs, machine._occurrences, machine._runs
    lines = {
        key: (
            line.order,
            line.history,
            sorted(line.unfinished),
            (line.running, line.retrying),
            sorted(line.ready.items()),
        )
        for key, line in sorted(occurrences.lines.items())
    }
    return {
        "order": list(jobs._order),
        "due": list(jobs._due),
        "not computed": sorted(jobs._not_computed),
        "bytes": (jobs.bytes, occurrences.bytes),
        "lines": lines,
        "line order": list(occurrences.line_order),
        "ready": list(occurrences.ready_order),
        "open": list(occurrences.open_order),
        "held": {tenant: sorted(held) for tenant, held in sorted(occurrences._held.items())},
        "pending": (occurrences.pending, occurrences._history),
        "expiries": sorted(occurrences.expiries._armed),
        "runs of sessions": dict(sorted(runs._of_session.items())),
        "runs of jobs": dict(sorted(runs._of_job.items())),
        "runs of tenants": dict(sorted(runs._of_tenant.items())),
        "busy": dict(sorted(runs._busy.items())),
        "groups": {
            key: sorted(group.members)
            for key, group in sorted(runs._assignment.groups.table.items())
            if group.members  # others are kept for sessions that poll
        },
        "held back": runs.held_back,
    }
