//! Basic checks of a kernel, which come before all other cases.

use anyhow::{Context as _, Result, ensure};
use proxy_user::programs::bpf::Link;
use proxy_user::programs::hooks::SOCKET_HOOKS;
use proxy_user::programs::{MissingFeature, attachments};

use super::tunnel::Tunnel;
use super::{Case, EMPTY, NodesCase, WEB, client_ip, ensure_sees_orig_dst, repair, vip};
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use crate::peer::{Attempt, SocketKind};
use crate::verify;
use proxy_testbed::Family;
use proxy_testbed::manifest::pod_ip;

pub(super) const WISH: Wish = Wish { pods: 2, services: &[WEB, EMPTY], flags: &[] };
/// Flags for small maps, and for a sync period so short that the agent soon finds what was removed.
#[rustfmt::skip]
const SOON_AGAIN: &[&str] = &[
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "1024", "--max-sockets", "1024", "--sync-period", "1s",
];

pub const CASES: &[Case] = &[
    Case { name: "smoke::all_programs_attached", wish: WISH, run: attached },
    Case {
        name: "smoke::every_path_and_family_works",
        wish: Wish { flags: &["--local-devices", "t*"], ..WISH },
        run: works,
    },
    Case {
        name: "smoke::removed_programs_and_entries_are_restored",
        wish: Wish { pods: 2, services: &[WEB], flags: SOON_AGAIN },
        run: repaired,
    },
];

pub const PROGRAMS: &[NodesCase] =
    &[NodesCase { name: "smoke::every_program_loads_in_every_mode", run: verify::all }];

pub const TOO_OLD: &[NodesCase] =
    &[NodesCase { name: "smoke::agent_reports_a_kernel_that_is_too_old", run: too_old }];

/// Whether this kernel is known to refuse the programs (docs/operations.md).
pub fn is_too_old() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split('.').map(|number| number.parse::<u32>().unwrap_or_default());
    (numbers.next(), numbers.next()) < (Some(5), Some(15))
}

fn too_old() -> Result<()> {
    let fixture = Fixture::new(Wish { pods: 0, services: &[], flags: SMALL })?;
    fixture.start()?;
    let log = fixture.take_agent()?.fails()?;
    // The log contains the verifier's output.
    let words = ["is older than 5.15", "boot a newer kernel", "Verifier output"];
    let lost = words.into_iter().find(|words| !log.contains(words));
    ensure!(lost.is_none(), "without {lost:?}: {log}");
    ensure!(attachments(&fixture.bpffs()).is_empty(), "something is attached");
    Ok(())
}

fn attached(fixture: &Fixture) -> Result<()> {
    let found = attachments(&fixture.bpffs());
    let expected = SOCKET_HOOKS.len() + fixture.packet_hooks();
    ensure!(found.len() == expected, "{expected} hooks, and there are {found:?}");
    // The place of a clsact filter is visible only inside the node's namespace; the cases with traffic check these filters.
    let lost = found.iter().find(|one| one.place.is_none() && !one.hook.starts_with("clsact"));
    ensure!(lost.is_none(), "attached to nothing: {lost:?}");
    Ok(())
}

pub(super) fn works(fixture: &Fixture) -> Result<()> {
    let by_packets = MissingFeature::SocketErrors.is_missing();
    if by_packets {
        // Refused calls continue as packets, which need a route out of the node.
        let [v4, v6] = Family::BOTH.map(|family| vip(family, EMPTY, SocketKind::Tcp).ip());
        fixture.node.ip(&format!("route add {v4} via 10.98.0.2\nroute add {v6} via fd98::2\n"))?;
    }
    // A device without a link-layer header has its own programs, which are loaded for it.
    let tunnel = Tunnel::new(fixture, 9)?;
    for family in Family::BOTH {
        for kind in SocketKind::ALL {
            let paths = [
                ("socket", &fixture.local, None),
                ("packet", &fixture.client, Some(client_ip(family))),
                ("tunnel", &tunnel.peer, Some(pod_ip(family, 9))),
            ];
            for (path, client, address) in paths {
                let attempt = Attempt::new(kind, vip(family, WEB, kind));
                let seen = client.reach(attempt).with_context(|| format!("{path}, {attempt:?}"))?;
                ensure_sees_orig_dst(&seen, attempt, attempt.to)?;
                let is_client = address.is_none_or(|address| seen.client.ip() == address);
                ensure!(is_client, "{path}: the pod saw {}", seen.client);
                // A refused packet causes an error only on a connected socket.
                if (path == "socket" && !by_packets) || kind != SocketKind::Datagram {
                    client.fails(Attempt::new(kind, vip(family, EMPTY, kind)), libc::ECONNREFUSED)?;
                }
            }
        }
    }
    Ok(())
}

/// Detaches all of Ballast's programs from the cgroup and the devices, and waits until the agent attaches them again.
fn repaired(fixture: &Fixture) -> Result<()> {
    repair::works(fixture)?;
    for path in repair::links(fixture)? {
        Link::pinned(&path)?.with_context(|| path.display().to_string())?.detach()?;
    }
    if MissingFeature::Tcx.is_missing() {
        for device in fixture.devices().iter() {
            let gone = fixture.node.command("tc").args(["qdisc", "del", "dev", device, "clsact"]).status()?;
            ensure!(gone.success(), "tc: {gone}");
        }
    }
    fixture.agent_mut()?.says(&["detached or removed externally", "program sock_connect4"])?;
    fixture.agent_mut()?.says(&["packet programs attached again"])?;
    eventually(SOON, || repair::works(fixture))?;
    eventually(SOON, || repair::complete(fixture))
}
