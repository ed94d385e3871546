//! Devices that are added while the agent runs, and filters of other programs on them.

use anyhow::{Context as _, Result, ensure};
use aya::EbpfLoader;
use aya::programs::SchedClassifier;
use proxy_user::programs::EMBEDDED;

use super::packet::CLSACT;
use super::{Case, EMPTY, WEB, vip};
use crate::agent::command;
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use crate::peer::{Attempt, SocketKind};
use proxy_testbed::Family;

pub const CASES: &[Case] = &[
    Case {
        name: "attach::a_new_device_is_served",
        wish: Wish { pods: 1, services: &[WEB, EMPTY], flags: SMALL },
        run: new_device,
    },
    Case {
        name: "attach::a_filter_before_ours_is_reported_and_one_of_our_priority_is_overtaken",
        wish: Wish { pods: 1, services: &[WEB], flags: CLSACT },
        run: foreign_filter,
    },
    Case {
        name: "attach::a_device_with_an_ingress_qdisc_is_reported_and_gets_no_half",
        wish: Wish { pods: 1, services: &[WEB], flags: CLSACT },
        run: ingress_qdisc,
    },
];

/// The bandwidth plugin has an `ingress` qdisc at the device of a pod.
fn ingress_qdisc(fixture: &Fixture) -> Result<()> {
    fixture.node.ip("link add shaped type veth peer name shaped1\n")?;
    let tc = |arguments: &[&str]| -> Result<String> {
        let output = fixture.node.command("tc").args(arguments).output()?;
        ensure!(output.status.success(), "tc {arguments:?}: {output:?}");
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    tc(&["qdisc", "replace", "dev", "shaped", "ingress"]).or_else(|_| {
        // The agent was faster.
        tc(&["qdisc", "del", "dev", "shaped", "clsact"])?;
        tc(&["qdisc", "add", "dev", "shaped", "ingress"])
    })?;
    eventually(SOON, || {
        let output = command(&fixture.node, &["status"], &fixture.bpffs())?;
        let shown = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(
            shown.contains("shaped") && shown.contains("a qdisc `ingress` in the place of clsact"),
            "{shown}"
        );
        Ok(())
    })?;
    let filters = tc(&["filter", "show", "dev", "shaped", "ingress"])?;
    ensure!(filters.trim().is_empty(), "{filters}");
    fixture.client.reach(Attempt::new(SocketKind::Tcp, vip(Family::V4, WEB, SocketKind::Tcp)))?;
    Ok(())
}

fn new_device(fixture: &Fixture) -> Result<()> {
    let (_space, late) = fixture.add_client()?;
    for family in Family::BOTH {
        for kind in [SocketKind::Tcp, SocketKind::Udp] {
            let to = vip(family, WEB, kind);
            let seen = eventually(SOON, || late.reach(Attempt::new(kind, to)))?;
            ensure!(seen.server.starts_with("0/"), "{seen:?}");
            late.fails(Attempt::new(kind, vip(family, EMPTY, kind)), libc::ECONNREFUSED)?;
        }
    }
    Ok(())
}

/// The agent of AWS' network policies attaches filters of priority 1 that end the list.
fn foreign_filter(fixture: &Fixture) -> Result<()> {
    let status = || -> Result<String> {
        let output = command(&fixture.node, &["status"], &fixture.bpffs())?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let reaches = || -> Result<()> {
        for family in Family::BOTH {
            fixture.client.reach(Attempt::new(SocketKind::Tcp, vip(family, WEB, SocketKind::Tcp)))?;
        }
        Ok(())
    };
    let mut other = EbpfLoader::new().btf(None).load(EMBEDDED)?;
    let foreign: &mut SchedClassifier = other.program_mut("nop").context("no such program")?.try_into()?;
    foreign.load()?;
    let pin = fixture.bpffs().join("foreign");
    foreign.pin(&pin)?;
    let add_foreign = || -> Result<()> {
        for device in fixture.devices().iter() {
            // Without `da`, the program's -1 means a match, and a match without actions ends the list with TC_ACT_OK.
            let mut tc = fixture.node.command("tc");
            tc.args(["filter", "add", "dev", device, "ingress", "prio", "1", "bpf", "object-pinned"]);
            let added = tc.arg(&pin).args(["classid", "1:1"]).status()?;
            ensure!(added.success(), "tc: {added}");
        }
        Ok(())
    };

    reaches()?;
    add_foreign()?;
    eventually(SOON, || {
        let shown = status()?;
        ensure!(
            shown.contains("of priority 1 runs before") && shown.contains("--clsact-priority 1"),
            "{shown}"
        );
        Ok(())
    })?;
    ensure!(reaches().is_err(), "the filter does not end the list");

    fixture.setup().flags.extend(["--clsact-priority", "1"].map(str::to_owned));
    fixture.restart()?;
    eventually(SOON, reaches)?;
    ensure!(!status()?.contains("runs before Ballast's"), "{}", status()?);

    add_foreign()?;
    eventually(SOON, reaches).context("the newest filter stays in front")?;
    ensure!(!status()?.contains("runs before Ballast's"), "{}", status()?);
    Ok(())
}
