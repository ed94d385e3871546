//! What a kernel has to show before anything else is worth a look.

use anyhow::{Context as _, Result, ensure};
use proxy_user::programs::attachments;
use proxy_user::programs::hooks::SOCKET_HOOKS;

use super::tunnel::Tunnel;
use super::{Case, EMPTY, WEB, client_ip, shows, vip};
use crate::lab::{Lab, Wish};
use crate::manifest::{Family, pod_ip};
use crate::peer::{Attempt, Kind};

const WISH: Wish = Wish { pods: 2, services: &[WEB, EMPTY], flags: &[] };

pub const CASES: &[Case] = &[
    Case { name: "smoke::all_programs_attached", wish: WISH, run: attached },
    Case { name: "smoke::every_path_and_family_works", wish: WISH, run: works },
];

fn attached(lab: &Lab) -> Result<()> {
    let found = attachments(&lab.bpffs());
    let expected = SOCKET_HOOKS.len() + 2 * lab.devices().len();
    ensure!(found.len() == expected, "{expected} hooks, and there are {found:?}");
    // Filters show themselves only inside the node's namespace; traffic shows the rest of them.
    let lost = found.iter().find(|one| one.place.is_none() && !one.hook.starts_with("clsact"));
    ensure!(lost.is_none(), "attached to nothing: {lost:?}");
    Ok(())
}

fn works(lab: &Lab) -> Result<()> {
    // Without link-layer header: it has programs of its own, which are loaded for it.
    let tunnel = Tunnel::new(lab, 9)?;
    for family in Family::BOTH {
        for kind in Kind::ALL {
            let paths = [
                ("socket", &lab.local, None),
                ("packet", &lab.client, Some(client_ip(family))),
                ("tunnel", &tunnel.peer, Some(pod_ip(family, 9))),
            ];
            for (path, client, address) in paths {
                let attempt = Attempt::new(kind, vip(family, WEB, kind));
                let seen = client.reach(attempt).with_context(|| format!("{path}, {attempt:?}"))?;
                shows(&seen, attempt, attempt.to)?;
                let is_client = address.is_none_or(|address| seen.client.ip() == address);
                ensure!(is_client, "{path}: the pod saw {}", seen.client);
                // A packet's refusal reaches only sockets that are connected.
                if path == "socket" || kind != Kind::Datagram {
                    client.fails(Attempt::new(kind, vip(family, EMPTY, kind)), libc::ECONNREFUSED)?;
                }
            }
        }
    }
    Ok(())
}
