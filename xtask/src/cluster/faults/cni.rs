//! Faults of the CNI plugin.

use std::thread::sleep;

use anyhow::Result;

use super::table::{GONE, Unsupported};
use super::testbed::{SOON, Testbed};
use crate::cluster::cni::{Cni, current_cni};
use crate::cluster::each;
use crate::cluster::machine::Machine;
use crate::cluster::plan::Node;
use crate::signal;

/// How often the daemon of each node is killed.
const ROUNDS: usize = 3;

/// Kills the plugin's daemon on every node and starts it again.
pub(super) fn restarted(testbed: &Testbed<'_>) -> Result<()> {
    rounds(testbed, |machine, cni, daemon, node| {
        machine.stop(daemon, libc::SIGKILL)?;
        sleep(GONE);
        cni.start_daemon(testbed.workdir, node)
    })
}

/// Deletes all rules of netfilter on every node: without the plugin's daemon, and while it runs if it writes its rules again.
pub(super) fn flushed(testbed: &Testbed<'_>) -> Result<()> {
    rounds(testbed, |machine, cni, daemon, node| {
        machine.stop(daemon, libc::SIGKILL)?;
        flush(machine)?;
        sleep(GONE);
        cni.start_daemon(testbed.workdir, node)?;
        await_rules(machine, cni)?;
        if cni.restores_rules() {
            flush(machine)?;
            await_rules(machine, cni)?;
        }
        Ok(())
    })
}

/// Does something to the plugin's daemon on every node, several times.
fn rounds(
    testbed: &Testbed<'_>,
    work: impl Fn(&Machine, Cni, &str, Node) -> Result<()> + Sync,
) -> Result<()> {
    let cni = current_cni(testbed.workdir)?;
    let Some(daemon) = cni.program() else {
        return Err(Unsupported(format!("the CNI plugin {cni} has no daemon")).into());
    };
    each(&testbed.nodes(), |node| {
        let machine = testbed.workdir.node(node);
        for _ in 0..ROUNDS {
            signal::check()?;
            work(&machine, cni, daemon, node)?;
        }
        Ok(())
    })
}

fn flush(machine: &Machine) -> Result<()> {
    machine.command(&["nft", "flush", "ruleset"]).read().map(|_| ())
}

fn await_rules(machine: &Machine, cni: Cni) -> Result<()> {
    let rule = cni.masquerade_rule().unwrap_or_default();
    signal::wait_for("the rules of the CNI plugin", SOON, || {
        let has = |list| machine.command(list).try_read().is_some_and(|rules| rules.contains(rule));
        Ok(cni.rule_lists().into_iter().all(has).then_some(()))
    })
}
