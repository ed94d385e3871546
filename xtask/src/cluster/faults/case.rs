//! A fault: what it does, what it needs, and which effects on connections are accepted.

use std::cell::RefCell;
use std::time::Duration;

use anyhow::Result;

use super::table::Excuse;
use super::testbed::{self, Testbed};
use crate::cluster::plan::Node;

/// Duration of the traffic before and after each fault.
pub(super) const AROUND: Duration = Duration::from_secs(1);
/// How long an agent is gone.
pub(super) const GONE: Duration = Duration::from_secs(1);

/// Parameters of the faults in a run.
pub(super) struct Kit {
    pub away: Duration,
    /// The node for faults of one node.
    pub node: Node,
    /// Number of pods after a fault.
    pub pods: u8,
    /// Remarks for the table.
    pub remarks: RefCell<Vec<String>>,
}

impl Kit {
    pub fn remark(&self, text: String) {
        self.remarks.borrow_mut().push(text);
    }
}

impl Default for Kit {
    fn default() -> Self {
        Self { away: Duration::ZERO, node: Node(1), pods: testbed::PODS, remarks: RefCell::default() }
    }
}

/// Injects a fault, and checks its expected effects besides zero lost connections.
pub(super) type Fault = fn(&Testbed<'_>, &Kit) -> Result<()>;

/// A fault under traffic.
pub(super) struct Case {
    pub what: &'static str,
    pub fault: Fault,
    /// Why connections may be lost; `None`: none may be lost.
    pub excuse: Option<Excuse>,
}

pub(super) const fn case(what: &'static str, fault: Fault) -> Case {
    Case { what, fault, excuse: None }
}

pub(super) const CABLE: Excuse = Excuse {
    may_fail: false,
    why: "what is sent while the cable is out is lost, with any proxy: TCP sends it again, UDP does not; session affinity moves on \
          from an endpoint that does not answer a SYN (docs/operations.md, \"Endpoints that fail\")",
};
