//! The health endpoints report the truth: a node on which most Services cannot be programmed leaves the load balancers, and
//! stops a rollout.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::{fs, io};

use anyhow::{Context as _, Result, ensure};
use aya::maps::MapData;
use aya_obj::generated::bpf_cmd;
use proxy_user::maps::sys::{attr, bpf};

use super::{Case, vip};
use crate::agent;
use crate::fixture::{Fixture, SOON, Wish, eventually};
use crate::peer::{Attempt, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Folder, Port, Service};

/// Room for the entries of `web` in each family, its address and its port, and for two more. A failure that lasts for
/// two seconds makes the node unhealthy.
const FLAGS: &[&str] = &["--max-frontends", "4", "--sync-period", "1s"];

const ONE: Service = web(&[Port { name: "http", is_tcp: true, number: 80, target: 8080, pods: &[0] }]);
const BOTH: Service = web(&[Port { name: "http", is_tcp: true, number: 80, target: 8080, pods: &[0, 1] }]);

pub const CASES: &[Case] = &[
    Case {
        name: "health::healthz_fails_if_services_do_not_fit",
        wish: Wish { pods: 1, services: &[ONE], flags: FLAGS },
        run: too_many,
    },
    Case {
        name: "health::healthz_fails_if_a_map_refuses_writes",
        wish: Wish { pods: 2, services: &[BOTH], flags: &["--sync-period", "1s"] },
        run: frozen,
    },
];

const fn web(ports: &'static [Port]) -> Service {
    Service { name: "web", number: 10, ports }
}

fn status(fixture: &Fixture, path: &str) -> Result<u16> {
    Ok(agent::get(&fixture.node, 10_256, path)?.0)
}

/// Waits until the three paths answer with these statuses.
fn answers(fixture: &Fixture, healthz: u16, livez: u16, readyz: u16) -> Result<()> {
    eventually(SOON, || {
        let found = (status(fixture, "/healthz")?, status(fixture, "/livez")?, status(fixture, "/readyz")?);
        ensure!(found == (healthz, livez, readyz), "healthz, livez, readyz: {found:?}");
        Ok(())
    })
}

fn attempt() -> Attempt {
    Attempt::new(SocketKind::Tcp, vip(Family::V4, ONE, SocketKind::Tcp))
}

fn works(fixture: &Fixture) -> Result<()> {
    fixture
        .clients()
        .into_iter()
        .try_for_each(|(path, client)| client.reach(attempt()).map(drop).context(path))
}

fn too_many(fixture: &Fixture) -> Result<()> {
    answers(fixture, 200, 200, 200)?;
    let folder = fixture.setup().manifests.clone().context("no folder")?;
    let service = |number: u8| {
        format!(
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: x-more-{number}, namespace: default}}\n\
             spec: {{clusterIP: 10.96.1.{number}, clusterIPs: [10.96.1.{number}], ports: [{{port: 80}}]}}\n"
        )
    };
    let more = folder.join("more.yaml");
    fs::write(&more, (1..=20).map(service).collect::<String>())?;
    answers(fixture, 503, 200, 200).context("it has been ready, and is not restarted")?;
    let problems = agent::get(&fixture.node, 10_249, "/status")?.1;
    ensure!(problems.contains("--max-frontends"), "{problems}");
    works(fixture)?;
    fixture.kill()?;
    fixture.start()?;
    fixture.agent_mut()?.says(&["first sync done"])?;
    answers(fixture, 503, 200, 503).context("a first sync that failed is not done")?;
    let reason = agent::get(&fixture.node, 10_256, "/readyz")?.1;
    ensure!(reason.contains("Service ports not programmed"), "{reason}");
    fs::remove_file(&more)?;
    answers(fixture, 200, 200, 200)?;
    works(fixture)
}

/// Freezes a map, like `bpftool map freeze`: programs can still write, and user space cannot.
fn freeze(map: &MapData) -> io::Result<()> {
    let mut attr = attr();
    attr.__bindgen_anon_2.map_fd = map.fd().as_fd().as_raw_fd().cast_unsigned();
    // SAFETY: the command reads one number.
    unsafe { bpf(bpf_cmd::BPF_MAP_FREEZE, &mut attr) }.map(drop)
}

fn frozen(fixture: &Fixture) -> Result<()> {
    answers(fixture, 200, 200, 200)?;
    let folder = Folder::at(fixture.setup().manifests.clone().context("no folder")?);
    // The agent can write the new list of endpoints, but not the Service's entry, which refers to it.
    freeze(&MapData::from_pin(fixture.bpffs().join("ballast/services"))?)
        .context("cannot freeze `services`")?;
    folder.put(ONE)?;
    answers(fixture, 503, 200, 200)?;
    let problems = agent::get(&fixture.node, 10_249, "/status")?.1;
    ensure!(problems.contains("default/web"), "{problems}");
    // Nevertheless, the removed endpoint gets no new connections.
    for (path, client) in fixture.clients() {
        let seen = super::spread(client, attempt(), 24)?;
        ensure!(seen.iter().all(|server| server.starts_with("0/")), "{path}: {seen:?}");
    }
    Ok(())
}
