//! The parts of the source that are changed, and the tests that may detect the changes.

use std::fmt;

use super::plan_crate;

/// A part of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// The rules that programs and agent share: decide, select, conntrack
    Rules,
    /// The packet stages, built for the host
    Stages,
    /// The plan of a Service (what its own tests do not notice builds the agent's crate: slower)
    Plan,
}

/// Tests that are run for each change.
#[derive(Debug)]
pub struct Tests {
    /// Name of the folder with cargo-mutants' output.
    pub name: &'static str,
    /// Description for messages.
    pub what: &'static str,
    pub package: &'static str,
    pub features: &'static str,
    /// What cargo builds for each change: only these tests.
    pub targets: &'static [&'static str],
    /// Arguments that select the tests to run.
    pub filter: &'static [&'static str],
}

/// Settings of cargo: crates that are built for each change are built fast and linked without debug information. Unchanged
/// crates keep the profile `dev`.
pub const SETTINGS: [&str; 5] = [
    "profile.dev.package.proxy-common.debug=false",
    "profile.dev.package.proxy-ebpf.debug=false",
    "profile.dev.package.proxy-ebpf.opt-level=0",
    "profile.dev.package.proxy-user.debug=false",
    "profile.dev.package.proxy-plan.debug=false",
];

/// Number of random packets for each change.
pub const FUZZ_PACKETS: &str = "20000";

const RULES: Tests = Tests {
    name: "unit",
    what: "unit tests of proxy-common",
    package: "proxy-common",
    features: "user",
    targets: &["--lib"],
    filter: &[],
};
/// Without the tests of connection tracking under loom: they do not run the stages, and they take most of the time.
const PACKETS: Tests = Tests {
    name: "packets",
    what: "packets through the stages, unit tests of proxy-ebpf",
    package: "proxy-ebpf",
    features: "host",
    targets: &["--lib"],
    filter: &["--skip", "flow::model"],
};
const FUZZ: Tests = Tests {
    name: "fuzz",
    what: "the fuzz program's cases through the stages on the host, against its model",
    package: "proxy-user",
    features: "",
    targets: &["--test", "fuzz"],
    filter: &[],
};
const PLAN: Tests = Tests {
    name: "plan",
    what: "unit tests of the plan, in a crate of their own",
    package: plan_crate::NAME,
    features: "",
    targets: &["--lib"],
    filter: &["plan::"],
};
const AGENT: Tests = Tests {
    name: "agent",
    what: "all unit tests of proxy-user",
    package: "proxy-user",
    features: "",
    targets: &["--lib"],
    filter: &[],
};

impl Part {
    /// All parts, the fastest first.
    pub const ALL: [Self; 3] = [Self::Rules, Self::Stages, Self::Plan];

    /// Returns the name of the part's crate.
    pub const fn package(self) -> &'static str {
        match self {
            Self::Rules => "proxy-common",
            Self::Stages => "proxy-ebpf",
            Self::Plan => "proxy-user",
        }
    }

    /// Returns the tests that may detect a change, the cheapest first.
    pub const fn tests(self) -> &'static [Tests] {
        match self {
            Self::Rules => &[RULES, PACKETS, FUZZ],
            Self::Stages => &[PACKETS, FUZZ],
            Self::Plan => &[PLAN, AGENT],
        }
    }

    /// Returns the part's files, as globs.
    pub const fn files(self) -> &'static [&'static str] {
        match self {
            Self::Rules => {
                &["proxy-common/src/decide.rs", "proxy-common/src/select.rs", "proxy-common/src/conntrack.rs"]
            }
            Self::Stages => &["proxy-ebpf/src/stage/*.rs"],
            Self::Plan => &["proxy-user/src/plan/**/*.rs"],
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rules => "rules",
            Self::Stages => "stages",
            Self::Plan => "plan",
        })
    }
}
