//! `cargo xtask test cluster rolling`: rollouts of pods without probes and without a pause before their end, with one proxy
//! after the other on the same cluster. Connections then fail with any proxy; this command counts them.

use std::fmt::Write as _;
use std::io::Write as _;

use anyhow::{Context as _, Result};

use super::agents::Agents;
use super::clients;
use super::load::{Client, Count, Tally};
use super::page;
use super::probe::{Kind, Target};
use super::testbed::Testbed;
use crate::cluster::image::AGNHOST;
use crate::cluster::plan::Node;
use crate::cluster::{Given, Proxy, Workdir, apply_text, change_proxy, kubectl};
use crate::{log, signal};

const NAME: &str = "bare";
const ADDRESS: &str = "10.96.0.85:80";
const NODE_PORT: u16 = 30085;
const PODS: u8 = 6;
/// Default for the number of rollouts with each proxy.
const ROUNDS: u32 = 3;

/// Which proxies, and how often.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// The proxy for Services; can be given several times
    #[arg(long = "proxy", value_enum, default_values_t = [Proxy::BallastHost, Proxy::KubeProxyNftables])]
    proxies: Vec<Proxy>,
    /// Number of rollouts for each proxy
    #[arg(long, default_value_t = ROUNDS)]
    rounds: u32,
    #[command(flatten)]
    given: Given,
    /// Write the table to docs/benchmarks/faults.md
    #[arg(long)]
    page: bool,
}

/// Restarts the pods, and prints how many connections failed.
pub fn run(workdir: &Workdir, args: &Args) -> Result<()> {
    let mut rows = Vec::new();
    let done = args.proxies.iter().try_for_each(|&proxy| -> Result<()> {
        change_proxy(workdir, proxy, &args.given)?;
        log::step(format_args!("{PODS} pods without probes roll, {} times; proxy: {proxy}", args.rounds));
        // This command does nothing to agents, so it does not matter how they run.
        let testbed = Testbed::make_for(workdir, Agents::Host)?;
        let mut counts = Vec::new();
        let rolled = rolled(&testbed, args.rounds, &mut counts);
        rows.push((proxy, counts));
        rolled.and(testbed.clear())
    });
    let table = table(&rows);
    write!(std::io::stdout(), "{table}").context("cannot write the results")?;
    done?;
    if args.page {
        let mut command = "cargo xtask test cluster rolling --page".to_owned();
        if args.rounds != ROUNDS {
            let _ = write!(command, " --rounds {}", args.rounds);
        }
        page::write(
            "rolling",
            "A rolling restart without probes",
            &[command],
            &format!("{ABOUT}\n\n{table}"),
        )?;
    }
    Ok(())
}

const ABOUT: &str = "Six pods without readiness probes and without a pause before their end are replaced by `kubectl rollout \
restart`, while a process of a node, a pod, and a client outside by a node port make new connections; one proxy after the other on the \
same cluster.";

/// Restarts the pods, and adds the counts of each rollout.
fn rolled(testbed: &Testbed<'_>, rounds: u32, counts: &mut Vec<Count>) -> Result<()> {
    let workdir = testbed.workdir;
    let name = format!("deployment/{NAME}");
    let done = roll(testbed, &name, rounds, counts);
    kubectl(workdir, &["delete", "--ignore-not-found", &name, &format!("service/{NAME}")]).read()?;
    done
}

fn roll(testbed: &Testbed<'_>, name: &str, rounds: u32, counts: &mut Vec<Count>) -> Result<()> {
    let workdir = testbed.workdir;
    let objects = include_str!("../../../tools/cluster/bare.yaml")
        .replace("AGNHOST", AGNHOST)
        .replace("ADDRESS", ADDRESS.trim_end_matches(":80"))
        .replace("NODE_PORT", &NODE_PORT.to_string())
        .replace("PODS", &PODS.to_string());
    apply_text(workdir, &objects)?;
    let status = ["rollout", "status", name, "--timeout=180s"];
    kubectl(workdir, &status).read()?;
    let url = format!("http://{ADDRESS}/hostname");
    signal::wait_for("the Service", super::testbed::SOON, || {
        Ok(workdir.node(Node(1)).command(&["curl", "-sf", "-m", "1", &url]).try_read())
    })?;
    for _ in 0..rounds {
        signal::check()?;
        let (tally, done) = Testbed::run_clients_during(clients(testbed)?, || {
            kubectl(workdir, &["rollout", "restart", name]).read()?;
            kubectl(workdir, &status).read()?;
            signal::pause(super::table::AROUND * 5)
        })?;
        done?;
        counts.push(tally.total());
        shown(&tally);
    }
    Ok(())
}

fn shown(tally: &Tally) {
    let count = tally.total();
    log::line(format_args!("    {} answered, {} failed", count.answered, count.failed));
    tally.failures.iter().for_each(|failure| log::line(format_args!("    {failure}")));
}

fn clients(testbed: &Testbed<'_>) -> Result<Vec<Client>> {
    let outside = Target::new(Kind::New, &format!("{}:{NODE_PORT}", Node(1).v4()), NAME)?;
    let inside = Target::new(Kind::New, ADDRESS, NAME)?;
    // A process of the first node, a pod, and the client outside that uses the first node.
    let all = clients::all(testbed)?.into_iter().enumerate().filter(|(number, _)| [0, 1, 3].contains(number));
    Ok(all
        .map(|(number, client)| {
            let target = if number == 3 { &outside } else { &inside };
            Client { targets: vec![target.clone()], ..client }
        })
        .collect())
}

fn table(rows: &[(Proxy, Vec<Count>)]) -> String {
    let mut text = String::from(
        "| proxy | rollouts | connections | failed | in percent | each |\n|---|---:|---:|---:|---:|---|\n",
    );
    for (proxy, counts) in rows {
        let all: u64 = counts.iter().map(|count| count.answered + count.failed).sum();
        let failed: u64 = counts.iter().map(|count| count.failed).sum();
        let each: Vec<_> = counts.iter().map(|count| count.failed.to_string()).collect();
        let share = failed * 10_000 / all.max(1);
        let _ = writeln!(
            text,
            "| {proxy} | {} | {all} | {failed} | {}.{:02} | {} |",
            counts.len(),
            share / 100,
            share % 100,
            each.join(", ")
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_a_share_of_all_connections() {
        let count = |answered, failed| Count { answered, failed, ..Count::default() };
        let text = table(&[(Proxy::BallastHost, vec![count(97, 3), count(100, 0)])]);
        assert!(text.contains("| ballast-host | 2 | 200 | 3 | 1.50 | 3, 0 |"), "{text}");
    }
}
