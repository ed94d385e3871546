//! Faults of the CNI plugin.

use std::thread::sleep;

use anyhow::Result;

use super::case::GONE;
use super::table::Unsupported;
use super::testbed::{SOON, Testbed};
use crate::cluster::cni::{FLANNELD, current_cni, start_flanneld};
use crate::cluster::each;
use crate::cluster::machine::Machine;
use crate::signal;

/// How often the daemon of each node is killed.
const ROUNDS: usize = 3;

/// Kills Flannel's daemon on every node and starts it again, and deletes all rules of netfilter: without the daemon, and while
/// it runs. The daemon writes its rules again.
pub(super) fn restarted_and_flushed(testbed: &Testbed<'_>) -> Result<()> {
    let cni = current_cni(testbed.workdir)?;
    if cni.program() != Some(FLANNELD) {
        return Err(Unsupported(format!("the CNI plugin is {cni}, not Flannel")).into());
    }
    each(&testbed.nodes(), |node| {
        let machine = testbed.workdir.node(node);
        for _ in 0..ROUNDS {
            signal::check()?;
            machine.stop(FLANNELD, libc::SIGKILL)?;
            flush(&machine)?;
            sleep(GONE);
            start_flanneld(testbed.workdir, node)?;
            await_rules(&machine)?;
        }
        flush(&machine)?;
        await_rules(&machine)
    })
}

fn flush(machine: &Machine) -> Result<()> {
    machine.command(&["nft", "flush", "ruleset"]).read().map(|_| ())
}

fn await_rules(machine: &Machine) -> Result<()> {
    let lists = [["iptables", "-t", "nat", "-S"], ["ip6tables", "-t", "nat", "-S"]];
    signal::wait_for("the rules of Flannel", SOON, || {
        let has =
            |list| machine.command(list).try_read().is_some_and(|rules| rules.contains("-j FLANNEL-POSTRTG"));
        Ok(lists.iter().all(|list| has(list)).then_some(()))
    })
}
