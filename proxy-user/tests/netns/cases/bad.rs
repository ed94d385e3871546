//! Invalid input: only the wrong object is affected, and the agent reports it.

use anyhow::{Result, ensure};

use super::{Case, WEB, packet::WIDE, tcp, vip};
use crate::agent;
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use crate::peer::{Attempt, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Service, text};

pub const CASES: &[Case] = &[
    Case {
        name: "bad::invalid_service_leaves_the_others_served",
        wish: Wish { pods: 2, services: &[WEB], flags: SMALL },
        run: broken,
    },
    Case {
        name: "bad::a_full_map_stops_one_service_only",
        // Two ports of one Service, and its address, fill the map of each family.
        wish: Wish { pods: 2, services: &[WIDE], flags: FULL },
        run: full,
    },
];

/// [`SMALL`], with room for two frontends and the entry of their address in each family.
#[rustfmt::skip]
const FULL: &[&str] = &[
    "--max-services", "64", "--max-frontends", "3", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384", "--max-sockets", "4096",
];
/// Of two Services of one age and size, the first by name is programmed.
const LATE: Service = Service { name: "younger", number: 50, ..WIDE };
const NARROW: Service = Service { ports: &[tcp(80, 8080, &[1])], ..WIDE };

fn works(fixture: &Fixture, service: Service) -> Result<()> {
    for (_, client) in fixture.clients() {
        for family in Family::BOTH {
            for kind in SocketKind::ALL {
                client.reach(Attempt::new(kind, vip(family, service, kind)))?;
            }
        }
    }
    Ok(())
}

fn broken(fixture: &Fixture) -> Result<()> {
    let file = format!(
        "{}---\n{{apiVersion: v1, kind: Service, metadata: {{name: crooked, namespace: default}}, \
         spec: {{clusterIP: 10.96.0.300, clusterIPs: [10.96.0.300], ports: [{{port: 80}}]}}}}\n{}",
        text(WIDE),
        text(LATE)
    );
    fixture.folder.put_text("mixed", &file)?;
    eventually(SOON, || [WEB, WIDE, LATE].into_iter().try_for_each(|service| works(fixture, service)))?;
    fixture.agent_mut()?.says(&["crooked", "10.96.0.300"])?;
    let status = agent::command(&fixture.node, &["status"], &fixture.bpffs())?;
    let said = String::from_utf8_lossy(&status.stdout).into_owned();
    ensure!(!status.status.success() && said.contains("10.96.0.300"), "{said}");

    // For a file that is no YAML at all, the agent keeps the objects that it last held.
    fixture.folder.put_text("mixed", "{{{ no: yaml\n")?;
    fixture.agent_mut()?.says(&["mixed.yaml"])?;
    [WEB, WIDE, LATE].into_iter().try_for_each(|service| works(fixture, service))
}

fn full(fixture: &Fixture) -> Result<()> {
    fixture.folder.put(LATE)?;
    fixture.agent_mut()?.says(&["default/younger", "--max-frontends"])?;
    works(fixture, WIDE)?;
    // The other Services continue to work, also after changes, and the waiting Service is programmed once there is room.
    fixture.change(NARROW, &["1/8080"])?;
    fixture.folder.remove(WIDE.name)?;
    eventually(SOON, || works(fixture, LATE))?;
    // The last parts of the deleted Service are removed after that.
    eventually(SOON, || {
        let list = agent::ask(&fixture.node, &["service", "list"], &fixture.bpffs())?.to_string();
        ensure!(!list.contains("default/wide"), "{list}");
        Ok(())
    })
}
