//! The packet programs in this kernel, packet by packet (`BPF_PROG_TEST_RUN`): attached to nothing, with maps of
//! their own. Ignored unless asked for, since loading needs root: `cargo xtask test bpf`.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]
#![expect(clippy::print_stdout, reason = "some tests also tell figures")]

mod beyond;
mod cost;
mod events;
mod fixture;
mod flows;
mod fragments;
mod icmp;
mod node;
mod packet;
mod race;
mod random;
mod rig;
mod sctp;
mod table_full;
mod tables;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};
use rig::{Family, Rig};

/// A test of both families, in maps for so many flows.
struct Scenario {
    name: &'static str,
    flows: u32,
    test: fn(Family, &mut Rig),
}

impl Scenario {
    fn trials(self, bpffs: &Path) -> impl Iterator<Item = Trial> {
        let Self { name, flows, test } = self;
        Family::BOTH.into_iter().map(move |family| {
            let bpffs = bpffs.to_owned();
            Trial::test(format!("{family:?}: {name}"), move || {
                Rig::with(&bpffs, flows, |rig| test(family, rig));
                Ok(())
            })
        })
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let wanted = arguments.include_ignored || arguments.ignored;
    let bpffs = if wanted && !arguments.list { rig::isolate() } else { PathBuf::new() };
    let mut trials: Vec<Trial> = [tables::fixtures(), icmp::fixtures()]
        .concat()
        .into_iter()
        .map(|fixture| fixture.trial(&bpffs))
        .collect();
    for scenario in flows::SCENARIOS
        .into_iter()
        .chain(table_full::SCENARIOS)
        .chain(random::SCENARIOS)
        .chain(race::SCENARIOS)
        .chain(beyond::SCENARIOS)
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
