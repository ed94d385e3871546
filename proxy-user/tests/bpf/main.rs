//! Tests that run the packet programs in this kernel, packet by packet (`BPF_PROG_TEST_RUN`). The programs are attached to
//! no hook and have maps of their own. The tests are ignored by default, because loading needs root: `cargo xtask test bpf`.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]
#![expect(clippy::print_stdout, reason = "some tests also tell figures")]

mod algorithms;
mod cost;
mod dsr;
mod dsr_xdp;
mod eject;
mod events;
mod fixture;
mod flows;
mod fragments;
mod icmp;
mod lasting;
mod latency;
mod load;
mod race;
mod random;
mod removal;
mod sctp;
mod snat;
mod table_full;
mod tables;

use proxy_testbed::isolate::isolate;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};
use proxy_testbed::Family;
use proxy_testbed::harness::Harness;

/// A test that runs for both families, with maps for `flows` flows.
struct Scenario {
    name: &'static str,
    flows: u32,
    test: fn(Family, &mut Harness),
}

impl Scenario {
    /// Returns a trial for each family, without and with XDP before tc.
    fn trials(self, bpffs: &Path) -> impl Iterator<Item = Trial> {
        let Self { name, flows, test } = self;
        let both = |family| [(family, false), (family, true)];
        Family::BOTH.into_iter().flat_map(both).map(move |(family, early)| {
            let bpffs = bpffs.to_owned();
            let hook = if early { " XDP" } else { "" };
            Trial::test(format!("{family:?}{hook}: {name}"), move || {
                Harness::with(&bpffs, flows, early, |harness| test(family, harness));
                Ok(())
            })
        })
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let wanted = arguments.include_ignored || arguments.ignored;
    let bpffs = if wanted && !arguments.list { isolate() } else { PathBuf::new() };
    let mut trials: Vec<Trial> = [tables::fixtures(), icmp::fixtures()]
        .concat()
        .into_iter()
        .flat_map(|fixture| [fixture.clone().trial(&bpffs, false), fixture.trial(&bpffs, true)])
        .collect();
    for scenario in flows::SCENARIOS
        .into_iter()
        .chain(lasting::SCENARIOS)
        .chain(table_full::SCENARIOS)
        .chain(random::SCENARIOS)
        .chain(algorithms::SCENARIOS)
        .chain(eject::SCENARIOS)
        .chain(removal::SCENARIOS)
        .chain(latency::SCENARIOS)
        .chain(load::SCENARIOS)
        .chain(race::SCENARIOS)
        .chain(snat::SCENARIOS)
        .chain(dsr::SCENARIOS)
        .chain(dsr_xdp::SCENARIOS)
        .chain(fragments::SCENARIOS)
        .chain(icmp::SCENARIOS)
        .chain(events::SCENARIOS)
        .chain(sctp::SCENARIOS)
    {
        trials.extend(scenario.trials(&bpffs));
    }
    trials.push(cost::trial(&bpffs));
    let trials = trials.into_iter().map(|trial| trial.with_ignored_flag(true)).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}
