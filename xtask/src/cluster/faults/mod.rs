//! `cargo xtask test cluster faults`: injects faults into a cluster while clients on every path make connections, and
//! checks what must hold because nodes share a kernel.

mod agents;
mod bare;
mod chaos;
mod clients;
mod cni;
mod control_plane;
mod device;
mod facts;
mod load;
mod node;
mod objects;
pub mod page;
mod plugin;
mod probe;
mod rolling;
mod soak;
mod table;
mod testbed;
mod vip;

use std::fmt::Write as _;
use std::io::Write as _;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::workdir::Workdir;
use super::{Proxy, each};
use crate::{log, signal};
pub use bare::{Args as RollingArgs, run as rolling};
pub use chaos::{Args as RandomArgs, run as chaos};
pub use load::load;
pub use probe::Target;
pub use soak::run as soak;
use table::{AROUND, CABLE, Case, GONE, Line, Parameters, case};
use testbed::Testbed;

/// Duration of the case without a fault: it shows which problems the machine itself causes.
const QUIET: Duration = Duration::from_secs(30);
/// Number of agents that are killed, on all nodes together.
const KILLS: usize = 50;

/// Default for the number of seconds for which the API server is stopped; the page names any other number.
const AWAY: u64 = 600;

/// Which faults, and what becomes of the result.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Only faults whose line contains one of these texts
    only: Vec<String>,
    /// How many seconds the API server is stopped
    #[arg(long, value_name = "SECONDS", default_value_t = AWAY)]
    away: u64,
    /// Write the table to docs/benchmarks/faults.md
    #[arg(long)]
    page: bool,
}

impl Args {
    /// Returns the command line, for the page.
    fn line(&self) -> String {
        let mut line = "cargo xtask test cluster faults --page".to_owned();
        if self.away != AWAY {
            let _ = write!(line, " --away {}", self.away);
        }
        for only in &self.only {
            let _ = write!(line, " '{only}'");
        }
        line
    }
}

/// Returns the command line that creates a cluster with these settings, for the page.
fn up(proxy: Proxy, settings: &[String]) -> String {
    let mut line = format!("cargo xtask test cluster up --proxy {proxy}");
    for setting in settings {
        let _ = write!(line, " --setting {setting}");
    }
    line
}

/// Checks something that must hold.
type Fact = fn(&Testbed<'_>) -> Result<()>;

/// Faults under traffic. No connection may be lost, except as `accepted_loss` says.
const FAULTS: [Case; 14] = [
    case("nothing happens", |_, _| signal::pause(QUIET)),
    case("50 agents are killed", killed),
    case("every agent is replaced, node by node", |testbed, _| testbed.agents.replace(testbed.workdir)),
    case("agents run out of memory, again and again", |testbed, _| control_plane::out_of_memory(testbed)),
    Case {
        what: "a node's uplink flaps",
        fault: |testbed, _| node::uplink_flaps(testbed),
        accepted_loss: Some(CABLE),
    },
    case("a node gets another address, and loses it", |testbed, _| node::address_changes(testbed)),
    case("the CNI plugin is restarted", |testbed, _| cni::restarted(testbed)),
    case("all rules of netfilter are deleted", |testbed, _| cni::flushed(testbed)),
    case("endpoints come and go", |testbed, _| endpoints_change(testbed)),
    case("a pod's device comes and goes, again and again", |testbed, _| device::comes_and_goes(testbed)),
    case("etcd is restored from an older snapshot", |testbed, _| control_plane::etcd_restored(testbed)),
    case("the API server is away; then pods change", |testbed, parameters| {
        control_plane::api_away(testbed, parameters.away, &[testbed::PODS + 2, 2, testbed::PODS])
    }),
    case("one of two API servers is killed; the other answers on the virtual IP address", vip::goes_on),
    case("50 deployments roll at once", |testbed, _| rolling::all_at_once(testbed)),
];

/// Checks of a cluster at rest.
const FACTS: [(&str, Fact); 3] = [
    ("kubectl ballast asks every agent, with the rights of its page", plugin::asks_every_agent),
    ("nodes share nothing", facts::nothing_is_shared),
    ("pods of before and after the agent, of every kind, are served", facts::all_pods_are_served),
];

/// Injects faults into a cluster, one after the other, and prints what its clients saw.
pub fn run(workdir: &Workdir, args: &Args) -> Result<()> {
    let is_wanted = |what: &str| args.only.is_empty() || args.only.iter().any(|part| what.contains(part));
    let mut names = FAULTS.iter().map(|case| case.what).chain(FACTS.map(|(what, _)| what));
    ensure!(names.any(is_wanted), "no case has these words");
    let testbed = Testbed::make(workdir)?;
    let parameters = Parameters { away: Duration::from_secs(args.away), ..Parameters::default() };
    let mut lines = Vec::new();
    let mut all = || -> Result<()> {
        for case in FAULTS.iter().filter(|case| is_wanted(case.what)) {
            lines.push(under_traffic(&testbed, case, &parameters)?);
            signal::check()?;
        }
        for (what, fact) in FACTS.into_iter().filter(|(what, _)| is_wanted(what)) {
            lines.push(at_rest(what, || fact(&testbed)));
            signal::check()?;
        }
        Ok(())
    };
    let done = all();
    let proxy = testbed.agents.proxy();
    let title = if proxy == Proxy::Ballast { "The DaemonSet" } else { "A process of each node" };
    let (of_cases, some) = if args.only.is_empty() { ("", "") } else { (", some of the cases", ", some") };
    let part = (format!("{proxy}{some}"), format!("{title}{of_cases}"), args.line());
    finish(&testbed, done, &lines, args.page.then_some(part))
}

/// Removes the testbed, and prints the table, also of a run that has ended early. Writes the table of a whole run to this part
/// of the page, with this title and command. Fails if a case has failed.
fn finish(
    testbed: &Testbed<'_>,
    done: Result<()>,
    lines: &[Line],
    part: Option<(String, String, String)>,
) -> Result<()> {
    let cleared = testbed.clear();
    if !lines.is_empty() {
        write!(std::io::stdout(), "{}", table::markdown(lines)).context("cannot write the results")?;
    }
    done.and(cleared)?;
    if let Some((name, title, command)) = part {
        let commands = [up(testbed.agents.proxy(), &testbed.workdir.settings()), command];
        page::write(&name, &title, &commands, &table::markdown(lines))?;
    }
    table::require_good(lines)
}

fn under_traffic(testbed: &Testbed<'_>, case: &Case, parameters: &Parameters) -> Result<Line> {
    log::step(case.what);
    let start = Instant::now();
    let (tally, outcome) = clients::under_traffic(testbed, || {
        sleep(AROUND);
        let outcome = (case.fault)(testbed, parameters);
        sleep(AROUND);
        outcome
    })?;
    let (what, accepted_loss, took) = (case.what.to_owned(), case.accepted_loss, start.elapsed());
    let remarks = parameters.remarks.take();
    let line = Line { what, tally: Some(tally), accepted_loss, took, remarks, outcome };
    log::line(format_args!(
        "    {}, {}",
        log::seconds(took),
        if line.is_good() { "good" } else { "NOT GOOD" }
    ));
    Ok(line)
}

fn at_rest(what: &str, work: impl FnOnce() -> Result<()>) -> Line {
    log::step(what);
    let start = Instant::now();
    let outcome = work();
    Line {
        what: what.to_owned(),
        tally: None,
        accepted_loss: None,
        took: start.elapsed(),
        remarks: Vec::new(),
        outcome,
    }
}

/// Kills agents on all nodes in parallel, each as soon as the node has an agent again.
fn killed(testbed: &Testbed<'_>, _: &Parameters) -> Result<()> {
    let nodes = testbed.nodes();
    let rounds = KILLS.div_ceil(nodes.len());
    each(&nodes, |node| {
        (0..rounds).try_for_each(|_| {
            signal::check()?;
            testbed.agents.kill(testbed.workdir, node, GONE)
        })
    })
}

fn endpoints_change(testbed: &Testbed<'_>) -> Result<()> {
    for pods in [testbed::PODS + 4, testbed::PODS, 1, testbed::PODS] {
        testbed.scale(pods)?;
        rolling::await_equal(testbed)?;
    }
    Ok(())
}
