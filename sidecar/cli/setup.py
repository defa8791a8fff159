"""``tenure certs`` and ``tenure config check``: what must be right before a sidecar starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sidecar.cli import output
from sidecar.cli.failures import REFUSED, USAGE, CliError
from sidecar.cli.options import Json
from sidecar.cli.settings_flags import PASS_ON, load_settings, parser

if TYPE_CHECKING:
    from sidecar.config import Settings

config = typer.Typer(help="The settings of a sidecar.", no_args_is_help=True)

CHECK_HELP = "Show the settings that 'tenure serve' would use and where each comes from, or every mistake at once."


def certs(
    nodes: Annotated[
        list[str],
        typer.Argument(metavar="NODE[=HOST,HOST...]...", help="The nodes, each with its hosts.", show_default=False),
    ],
    cluster: Annotated[str, typer.Option("--cluster", metavar="ID", help="The cluster's id.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="The folder of the files.")] = Path("certs"),
    days: Annotated[int, typer.Option("--days", help="How long the nodes' certificates last.")] = 90,
    json: Json = False,
) -> None:
    """Make an authority and a certificate for each node. Repeat it to renew what expires soon; the rest is kept."""
    from sidecar.certs import LOCAL_HOSTS, CertificateError, write_certificates

    wanted = {}
    for word in nodes:
        node, _, hosts = word.partition("=")
        if node in wanted:
            raise CliError(f"node {node} is named twice", reason="USAGE", status=USAGE)
        wanted[node] = tuple(filter(None, hosts.split(","))) or LOCAL_HOSTS
    try:
        issued = write_certificates(out, cluster, wanted, days=days)
    except CertificateError as error:
        raise CliError(str(error), reason="CERTIFICATE", status=REFUSED) from error
    if json:
        output.print_json(
            [
                {"name": i.name, "certificate": str(i.certificate), "key": str(i.key), "renewed": i.renewed,
                 "expires": i.expires.isoformat()}
                for i in issued
            ]
        )  # fmt: skip
        return
    rows = ((i.name, i.certificate, i.key, f"{i.expires:%Y-%m-%d}", "made" if i.renewed else "kept") for i in issued)
    output.print_table(("name", "certificate", "key", "expires", ""), rows)


@config.command("check", help=CHECK_HELP, context_settings=PASS_ON)
def check(context: typer.Context) -> None:
    made = parser("config check", CHECK_HELP)
    made.add_argument("--json", action="store_true", help="print JSON, errors included")
    arguments = list(context.args)
    loaded = load_settings(made, arguments)
    from sidecar.config import effective

    check_certificates(loaded.settings)
    settings = effective(loaded)
    if "--json" in arguments:
        output.print_json({s.setting: {"value": s.value, "source": s.source} for s in settings})
        return
    output.print_table(("setting", "value", "from"), ((s.setting, s.value, s.source) for s in settings))
    print("\nno mistakes found")


def check_certificates(settings: Settings) -> None:
    """As the sidecar does at its start: they fit together, are valid now, and name this node of this cluster."""
    from sidecar.certs import CertificateError, peer_contexts

    certificate, key, authority = settings.peer_tls_cert, settings.peer_tls_key, settings.peer_tls_ca
    if not (certificate and key and authority):
        return
    try:
        peer_contexts(certificate, key, authority, cluster_id=settings.cluster_id, node_id=settings.node_id)
    except CertificateError as error:
        raise CliError(str(error), reason="CERTIFICATE", status=USAGE) from error
